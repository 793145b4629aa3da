"""What an interrupted run leaves behind: one file to resume from, replaced only by a complete newer one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from stallfree.cli.errors import UsageError

CHECKPOINT_FILE = "checkpoint.pt"


def save_checkpoint(directory: Path, state: dict[str, Any]) -> None:
    """Write `state`; whatever goes wrong on the way, the previous checkpoint stays.

    Raises:
        UsageError: if it cannot be written.
    """
    partial = directory / f"{CHECKPOINT_FILE}.partial"
    try:
        torch.save(state, partial)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        partial.unlink(missing_ok=True)
        raise UsageError(f"{partial} could not be written ({error}): make room in {directory}") from error
    partial.replace(directory / CHECKPOINT_FILE)


def load_checkpoint(directory: Path, fingerprint: str) -> dict[str, Any]:
    """The state of an interrupted run.

    Raises:
        UsageError: if there is none, or the data changed since.
    """
    path = directory / CHECKPOINT_FILE
    if not path.is_file():
        raise UsageError(
            f"the run in {directory} has no checkpoint to resume from: it is complete, or start anew with --overwrite"
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many for a damaged file
        raise UsageError(f"{path} is damaged ({type(error).__name__}): start anew with --overwrite") from error
    if state["fingerprint"] != fingerprint:
        raise UsageError(
            f"the data or the tokenizer changed since the run in {directory}: restore it, or start anew with --overwrite"
        )
    return state


def resume_command(directory: Path) -> str:
    return f"stallfree finetune --resume --output {shlex.quote(str(directory.absolute()))}"
