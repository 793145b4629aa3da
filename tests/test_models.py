"""Models that must simply work."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import PRESETS, inputs, mlp, regression, tokens, train

from stallfree import ZenFlowAdamW, ZenFlowConfig, channel_dims
from stallfree.engine.blocks import by_modules, channel_dim_of


@pytest.fixture(params=list(PRESETS))
def settings(request):
    return PRESETS[request.param]


class Tied(nn.Module):
    """A tiny language model whose head is its embedding, with a block used twice."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 12), nn.Linear(12, 20, bias=False)
        self.block = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh())
        self.head.weight = self.embed.weight
        self.reentrant = checkpointing

    def part(self, hidden: Tensor) -> Tensor:
        return hidden + self.block(hidden)

    def tail(self, hidden: Tensor) -> Tensor:
        return self.head(self.part(hidden))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for part in (self.part, self.tail):
            hidden = part(hidden) if self.reentrant is None else checkpoint(part, hidden, use_reentrant=self.reentrant)
        return hidden


def language(model: nn.Module, t: int) -> Tensor:
    ids = tokens(t, 20, 3, 7, like=model)
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


# Models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(device, settings, dtype):
    train(mlp(device, dtype), regression, settings)


def test_parameters_of_different_dtypes(device, settings):
    model = mlp(device, torch.bfloat16)
    model[2].float()

    def loss(model, t):
        hidden = model[1](model[0](inputs(t, 4, 12, like=model)))
        return model[5](model[4](model[3](model[2](hidden.float()).bfloat16()))).float().pow(2).mean()

    train(model, loss, settings)


def test_one_tiny_layer(device, settings):
    train(nn.Linear(12, 1).to(device), regression, settings)


def test_frozen_among_trained(device, settings):
    model = mlp(device)
    frozen = {id(p) for p in (model[0].weight, model[3].bias)}
    for p in model.parameters():
        p.requires_grad_(id(p) not in frozen)
    kept = [p.detach().clone() for p in model.parameters() if id(p) in frozen]
    train(model, regression, settings)
    assert all(
        torch.equal(p.detach(), k) for p, k in zip([p for p in model.parameters() if id(p) in frozen], kept, strict=True)
    )


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_tied_weights_and_a_block_used_twice_with_gradient_checkpointing(device, settings, checkpointing):
    train(Tied(checkpointing).to(device), language, settings)


def test_parameters_without_a_gradient_in_some_calls(device, settings):
    def loss(model, t):
        x = inputs(t, 4, 12, like=model)
        hidden = model[2](model[1](model[0](x)))
        return model[5](hidden if t % 3 == 1 else model[4](model[3](hidden))).pow(2).mean()

    train(mlp(device), loss, settings)


def test_a_parameter_that_never_gets_a_gradient(device, settings):
    model = mlp(device)
    model.unused = nn.Linear(8, 8).to(device)
    kept = model.unused.weight.detach().clone()
    train(model, lambda model, t: regression(model[:6], t), settings)
    assert torch.equal(model.unused.weight.detach(), kept)


def test_convolutions_and_norms(device, settings):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(2), nn.Conv1d(8, 6, 3, groups=2), nn.BatchNorm1d(6)
    )

    def loss(model, t):
        return (model(inputs(t, 2, 3, 6, 6, like=model)) - 1).pow(3).mean()

    train(model.to(device), loss, settings)


class Experts(nn.Module):
    """Four experts, all of which see every token."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 96, 64) / 8), nn.Parameter(torch.randn(4, 64, 96) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("eoi,ebi->bo", self.down, F.silu(torch.einsum("eoi,bi->ebo", self.up, x)))


def test_every_row_of_an_expert_is_a_channel(device, settings):
    model = nn.Sequential(nn.Linear(12, 64), Experts(), nn.Linear(64, 12)).to(device)
    assert channel_dims(model) == {"0.weight": 1, "1.up": 0, "1.down": 0, "2.weight": 1}
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=1e-2, topk_ratio=0.25, min_numel=0)
    weights = {state.weight.name: state.weight for state in optimizer.engine.weights.values()}
    sizes = {name: (weight.channels, weight.length, weight.selected_count) for name, weight in weights.items()}
    assert sizes == {"0.weight": (12, 64, 3), "1.up": (384, 64, 96), "1.down": (256, 96, 64), "2.weight": (64, 12, 16)}
    optimizer.close()
    train(model, regression, settings)


def test_a_long_convolution_is_no_stack_of_matrices():
    model = nn.Conv1d(3, 4, 65, bias=False)
    assert channel_dims(model) == {"weight": 1}
    assert channel_dims(nn.ParameterList([nn.Parameter(torch.ones(3, 4, 63)), nn.Parameter(torch.ones(3, 4, 64))])) == {
        "0": 1,
        "1": 0,
    }


def test_channels_last_weights(device, settings):
    model = nn.Conv2d(3, 8, 3).to(device, memory_format=torch.channels_last)
    train(model, lambda model, t: (model(inputs(t, 2, 3, 6, 6, like=model)) - 1).pow(2).mean(), settings)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_transposed_memory(device, settings):
    """A parameter whose memory is not row-major, as some checkpoint loaders leave it."""
    model = nn.Linear(12, 5).to(device)
    model.weight = nn.Parameter(torch.randn(12, 5, device=device).t())
    train(model, regression, settings)


def test_attention_and_recurrence(device, settings):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.rnn = nn.MultiheadAttention(12, 2, batch_first=True), nn.LSTM(12, 8, batch_first=True)

        def forward(self, x):
            return self.rnn(self.attention(x, x, x, need_weights=False)[0])[0]

    train(Model().to(device), lambda model, t: (model(inputs(t, 2, 5, 12, like=model)) - 1).pow(2).mean(), settings)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_models(device, settings, family):
    """GPT-2's Conv1D stores input channels as rows; embeddings are tables of rows in both."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    if family == "gpt2":
        config = GPT2Config(
            vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    else:
        config = LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config).to(device)
    dims = channel_dims(model)
    rows = {name for name, dim in dims.items() if dim == 0}
    if family == "gpt2":
        assert rows == set(dims)  # wte, wpe, and Conv1D everywhere
    else:
        assert rows == {"model.embed_tokens.weight", "lm_head.weight"}

    def loss(model, t):
        ids = tokens(t, 20, 2, 8, like=model)
        return model(input_ids=ids, labels=ids).loss

    train(model, loss, settings | dict(channel_dim=dims))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_names_and_modules_give_the_same_channel_axes(family, tied):
    """Rows for the table and the output layer, which is the same parameter where they are tied."""
    import transformers

    sizes = dict(vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = getattr(transformers, f"{family}Config")(tie_word_embeddings=tied, num_key_value_heads=1, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    named = [(name, param) for name, param in model.named_parameters() if param.dim() > 1]
    dims, tables = channel_dims(model), {"model.embed_tokens.weight", *(() if tied else ["lm_head.weight"])}
    assert {name: dims[name] for name, _ in named} == {name: channel_dim_of(name, param, "auto") for name, param in named}
    assert {name for name, _ in named if dims[name] == 0} == tables
    assert dims["lm_head.weight"] == 0


def test_an_embedding_without_a_telling_name_has_rows_and_its_layers_columns():
    model = nn.ModuleDict({"words": nn.Embedding(20, 12), "proj": nn.Linear(12, 20), "output": nn.Linear(4, 8192, bias=False)})
    assert channel_dims(model) == {"words.weight": 0, "proj.weight": 1, "output.weight": 0}


def test_auto_is_resolved_by_the_model_and_what_is_given_stays():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    assert by_modules(ZenFlowConfig(lag=2), model) == ZenFlowConfig(lag=2, channel_dim={"0.weight": 0, "1.weight": 1})
    for given in (0, {"1": 0}):
        assert by_modules(ZenFlowConfig(channel_dim=given), model).channel_dim == given


@pytest.mark.parametrize(
    "backend, preset", [("aot_eager", "zero-offload"), ("aot_eager", "stallfree"), ("inductor", "stallfree")]
)
def test_compiled_models(backend, preset):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    model = mlp("cpu")
    compiled = torch.compile(model, backend=backend)
    train(model, lambda it, t: regression(compiled if it is model else it, t), PRESETS[preset])


def test_models_compiled_layer_by_layer(settings):
    model = mlp("cpu")
    for i in (0, 3, 5):
        model[i].compile(backend="aot_eager")
    train(model, regression, settings)
