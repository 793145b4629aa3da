"""The convergence study on a tiny model, from weights to results."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.convergence import study
from benchmarks.convergence.llama import BatchedLlama, Llama, flatten, random_weights
from benchmarks.convergence.plan import METHODS, Run
from benchmarks.convergence.pretrained import dequantize
from benchmarks.convergence.report import report
from benchmarks.convergence.rule import learning_rates
from benchmarks.convergence.tasks import Task
from benchmarks.convergence.update import Hyper

TINY = Llama(vocab=61, hidden=24, layers=2, heads=4, kv_heads=2, ffn=40)


def tiny_task(count=40, held_out=16, length=9):
    """A language with a rule: each token is the one before plus one."""
    first = torch.arange(count)[:, None] * 7 % 50
    data = dict(tokens=(first + torch.arange(length)).int(), starts=torch.full((count,), 4), ends=torch.full((count,), 7))
    data["ends"][::3] = 6
    return Task(data | dict(held_out=torch.tensor(held_out)), "cpu")


def tiny_start():
    layout = TINY.layout(tile=64)
    weights = {name: w * 5 if w.std() > 0 else w for name, w in random_weights(TINY, torch.Generator().manual_seed(1)).items()}
    return layout, weights, flatten(weights, layout)


def test_llama_gives_the_logits_of_transformers():
    transformers = pytest.importorskip("transformers")
    layout, weights, flat = tiny_start()
    config = transformers.LlamaConfig(
        vocab_size=TINY.vocab, hidden_size=TINY.hidden, num_hidden_layers=TINY.layers, num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads, intermediate_size=TINY.ffn, tie_word_embeddings=True, rms_norm_eps=TINY.eps,
        rope_parameters=dict(rope_type="default", rope_theta=TINY.theta),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    names = dict(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj", gate="mlp.gate_proj",
                 up="mlp.up_proj", down="mlp.down_proj",
                 input_norm="input_layernorm", post_norm="post_attention_layernorm")  # fmt: skip
    state = {
        "model.embed_tokens.weight": weights["embed"],
        "model.norm.weight": weights["norm"][0],
        "lm_head.weight": weights["embed"],
    }
    for name, weight in weights.items():
        kind, _, layer = name.partition(".")
        if layer:
            state[f"model.layers.{layer}.{names[kind]}.weight"] = weight[0] if "norm" in kind else weight
    model.load_state_dict(state)
    tokens = torch.randint(0, TINY.vocab, (3, 7))
    ours = BatchedLlama(TINY, layout, flat[None]).logits(tokens[None], torch.arange(7).expand(1, 3, 7))[0]
    torch.testing.assert_close(ours, model(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)


def trained(names, monkeypatch, steps=12, **overrides):
    methods = {name: replace(METHODS[name], full_warm_up_rounds=3, select_interval=4, **overrides) for name in names}
    monkeypatch.setattr(study, "METHODS", METHODS | methods)
    layout, _, flat = tiny_start()
    runs = [Run("tiny", name, 1e-2, seed, steps) for seed, name in enumerate(names)]
    return study.train(runs, tiny_task(), TINY, layout, flat, batch=4, backend="torch", dtype=torch.float32, chunk=5)


def test_runs_side_by_side_do_not_touch_each_other(monkeypatch):
    names = ["replay S=4", "synchronous AdamW", "zenflow S=4"]
    together = trained(names, monkeypatch)
    alone = trained(names[:1], monkeypatch)
    assert together[0]["held_out"] == pytest.approx(alone[0]["held_out"], rel=1e-4)
    assert len({record["held_out"][-1] for record in together}) == 3
    for record in together:
        assert record["held_out"][-1] < record["held_out"][0]
        json.dumps(record)


def test_synchronous_training_is_plain_training(monkeypatch):
    """The whole loop against autograd, clip_grad_norm_ and torch.optim.AdamW on one model."""
    (record,) = trained(["synchronous AdamW"], monkeypatch)
    layout, _, flat = tiny_start()
    model, task, hyper = BatchedLlama(TINY, layout, flat[None].clone()), tiny_task(), Hyper()
    params = [p for stack in model.params.values() for p in stack]
    adamw = torch.optim.AdamW(params, betas=hyper.betas, eps=hyper.eps, weight_decay=hyper.weight_decay)
    lr, order = learning_rates(1e-2, 12, 6), task.order(0, 12, 4)
    for call in range(1, 13):
        model.loss(*(tensor[None] for tensor in task.batch(order[call - 1]))).sum().backward()
        torch.nn.utils.clip_grad_norm_(params, hyper.max_grad_norm)
        adamw.param_groups[0]["lr"] = float(lr[call])
        adamw.step()
        adamw.zero_grad()
    tokens, positions, labels = task.batch(torch.arange(task.held_out))
    with torch.no_grad():
        logits = model.logits(tokens[None], positions[None])[0]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert record["held_out"][-1] == pytest.approx(loss.item(), rel=1e-4)


def test_blocks_of_quantized_weights_are_read_as_gguf_reads_them():
    gguf = pytest.importorskip("gguf")
    weights = torch.randn(4, 96).numpy()
    for kind in ("Q4_1", "Q8_0"):
        raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
        expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
        torch.testing.assert_close(dequantize(torch.from_numpy(raw), kind), expected)
    with pytest.raises(ValueError, match="Q6_K"):
        dequantize(torch.zeros(1, 34, dtype=torch.uint8), "Q6_K")


def test_study_runs_to_its_end_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "SMOLLM2", TINY)
    _, weights, _ = tiny_start()
    raw = {name: (weight.view(torch.uint8), "F32") for name, weight in weights.items()}
    parts = [tmp_path / "part1.pt", tmp_path / "part2.pt"]
    data = dict(tokens=torch.randint(0, TINY.vocab, (40, 9)).int(), starts=torch.full((40,), 4), ends=torch.full((40,), 7))
    torch.save(dict(weights=dict(list(raw.items())[:7])), parts[0])
    torch.save(dict(weights=dict(list(raw.items())[7:]), tasks=dict(tiny=data | dict(held_out=torch.tensor(8)))), parts[1])
    out = tmp_path / "results.jsonl"
    common = ["--out", str(out), "--device", "cpu", "--backend", "torch", "--steps", "24", "--batch", "2", "--concurrency", "4"]
    common += ["--parts", *map(str, parts), "--methods", "synchronous AdamW", "replay S=4"]
    study.main([*common, "--time-limit", "0"])
    assert not out.exists()
    study.main(common)
    assert "0 are known to be left" in capsys.readouterr().out
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [run["task"] for run in runs if run["kind"] == "probe"] == ["tiny"]
    assert {run["seed"] for run in runs if run["kind"] == "run"} == {0, 1, 2}
    study.main(common)
    assert len(out.read_text().splitlines()) == len(runs)
    capsys.readouterr()
    study.main([*common, "--group", "long"])
    assert "8 runs known to be left, about 4 s" in capsys.readouterr().out
    longer = [json.loads(line) for line in out.read_text().splitlines()][len(runs) :]
    assert [(run["kind"], run["steps"]) for run in longer].count(("run", 96)) == 8
    assert "| replay S=4 |" in report([out])
