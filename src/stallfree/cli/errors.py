"""The one error that a command shows without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What other tools call it -> our names; those of ZenFlowConfig count only where they are known.
OTHER_NAMES = {
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "max_steps": "steps",
    "num_steps": "steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "batch_size": "micro_batch",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "gradient_accumulation": "accumulation",
    "max_length": "seq_length",
    "max_seq_length": "seq_length",
    "clip_grad_norm": "max_grad_norm",
    "output_dir": "output",
    "model_name_or_path": "model",
    "dataset": "data",
    "train_file": "data",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "logging_steps": "log_every",
    "bf16": "dtype",
    "resume_from_checkpoint": "resume",
    "top_k": "topk_ratio",
    "topk": "topk_ratio",
    "interval": "update_interval",
    "look_ahead": "lookahead",
}


class UsageError(ValueError):
    """A mistake in what the user gave. Its message is one sentence that names the way out."""


def did_you_mean(name: str, known: Iterable[str], *, or_else: str = "") -> str:
    """`"; did you mean a, b?"` for what other tools call `name`, then for names near it, else `or_else`. Flags: with dashes."""
    by_plain_name = {_plain(candidate): candidate for candidate in known}
    meant = OTHER_NAMES.get(_plain(name))
    if meant in by_plain_name:
        return f"; did you mean {by_plain_name[meant]}?"
    close = difflib.get_close_matches(_plain(name), by_plain_name, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(by_plain_name[match] for match in close)}?" if close else or_else


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
