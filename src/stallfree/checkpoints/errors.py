"""The errors of this package."""

from __future__ import annotations

from typing import Any


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is refused; the message says why, and which one is good. Nothing has been changed."""


class NoCheckpointError(CheckpointError):
    """There is none yet: a run that begins, and no damage."""


def check_optimizer(optimizer: Any, function: str) -> None:
    """Refuse another optimizer.

    Raises:
        TypeError: it is none of ours.
    """
    if not hasattr(optimizer, "engine"):
        raise TypeError(f"{function}() takes a ZenFlowAdamW, not {type(optimizer).__name__}: save another with torch.save")
