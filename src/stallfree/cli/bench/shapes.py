"""What `--model` names -> a model with random weights. Nothing is ever downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.errors import UsageError
from stallfree.cli.local import how_to_fetch, read, shortened

SHAPES = {  # Qwen2.5: hidden, inner, layers, heads, key-value heads, vocabulary
    "tiny": (128, 256, 2, 4, 2, 512),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "3b": (2048, 11008, 36, 16, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}
UNTIED = ("7b",)  # whose output layer is not the embedding


def model_config(settings: BenchSettings) -> Any:
    """The Transformers configuration of `--model`.

    Raises:
        UsageError: if there is no such model, or its sequences are shorter than `--seq`.
    """
    config = _qwen(settings.model) if settings.model in SHAPES else _from_directory(Path(settings.model))
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.seq > longest:
        raise UsageError(f"--seq {settings.seq}: {settings.model} takes at most {longest} tokens")
    return config


def build_model(config: Any, settings: BenchSettings, device: str) -> nn.Module:
    """A model on `device` ("meta": without memory) that trains; the same weights every time."""
    from transformers import AutoModelForCausalLM

    from stallfree.cli.finetune.models import checkpoint_activations

    torch.manual_seed(0)
    try:
        with torch.device(device):
            dtype = getattr(torch, settings.dtype)
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:  # not a causal language model
        raise UsageError(f"no model can be built from {settings.model}: {shortened(error)}") from error
    if settings.gradient_checkpointing:
        checkpoint_activations(model)
    return model.train()


def random_batch(config: Any, settings: BenchSettings) -> Tensor:
    """`[batch, seq]` token ids."""
    vocabulary = config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (settings.batch, settings.seq), device=settings.device)


def _qwen(name: str) -> Any:
    from transformers import Qwen2Config

    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[name]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=name not in UNTIED,
    )


def _from_directory(path: Path) -> Any:
    from transformers import AutoConfig

    path = path.parent if path.name == "config.json" else path
    if not (path / "config.json").is_file():
        named = str(path)
        fetch = how_to_fetch(named, "config.json")
        raise UsageError(f"model {named!r} is neither a directory with a config.json nor one of: {', '.join(SHAPES)}{fetch}")
    return read("config.json", path, AutoConfig.from_pretrained)
