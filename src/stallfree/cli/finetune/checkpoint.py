"""What an unfinished run leaves behind to resume from: checkpoints, of which the last two are kept.

One process writes them by `save_checkpoint`, ranks by torch.distributed.checkpoint (`sharded_checkpoint.py`).
"""

from __future__ import annotations

import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from stallfree.checkpoints import CheckpointError, NoCheckpointError, layout, load_checkpoint, save_checkpoint
from stallfree.cli.errors import UsageError
from stallfree.cli.finetune import sharded_checkpoint
from stallfree.cli.finetune.report import REPORT_FILE
from stallfree.cli.finetune.settings import SETTINGS_FILE
from stallfree.cli.finetune.train import Training

CHECKPOINTS = "checkpoints"  # in the output directory


def save(directory: Path, training: Training, about: dict[str, Any]) -> None:
    """Write a checkpoint; whatever goes wrong on the way, the previous ones stay.

    Raises:
        UsageError: if it cannot be written.
    """
    path = directory / CHECKPOINTS
    try:
        if training.ranks.sharded:
            sharded_checkpoint.save(path, training, {"training": training.progress(), "about": about})
        else:
            extra = {"training": training.state_dict(), "about": about}
            save_checkpoint(path, training.optimizer, model=training.model, extra=extra)
    except CheckpointError as error:
        raise UsageError(f"{error}: make room, or give another --output") from error


class RunIsComplete(Exception):
    """Nothing is wrong: whatever starts a run again until it ends may stop."""


def load(directory: Path, training: Training, fingerprint: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Put a training where an interrupted one was; returns what was saved about it.

    Where a run has ended, what is left of the checkpoints that it was removing goes as well.

    Raises:
        RunIsComplete: there is nothing to resume.
        UsageError: if there is no checkpoint, it is damaged or of another run, or the data or the settings changed since.
    """
    path = directory / CHECKPOINTS
    if not path.is_dir():
        remove(directory)  # what a process left that died while it did
        if (directory / REPORT_FILE).exists():
            raise RunIsComplete(
                f"the run in {directory} is complete: its result and {REPORT_FILE} are there, nothing to resume"
            )
        raise UsageError(f"the run in {directory} has no checkpoint to resume from: start anew with --overwrite")

    def check(extra: dict[str, Any]) -> None:
        if extra["about"]["fingerprint"] != fingerprint:
            raise UsageError(
                f"the data or the tokenizer changed since the run in {directory}: restore it, or start anew with --overwrite"
            )
        for name, then in extra["about"].get("settings", {}).items():
            if settings.get(name, then) != then:
                raise UsageError(
                    f"{directory / SETTINGS_FILE} says {name}: {settings[name]}, and the run had {then}: restore it, or start "
                    "anew with --overwrite"
                )

    try:
        if training.ranks.sharded:
            extra = sharded_checkpoint.load(path, training, check)
            training.load_progress(extra["training"])
            training.reseed()
        else:
            extra = load_checkpoint(path, training.optimizer, model=training.model)
            check(extra)
            training.load_state_dict(extra["training"])
    except NoCheckpointError as error:
        raise UsageError(f"{error}: start anew with --overwrite") from error
    except CheckpointError as error:
        raise UsageError(f"{error}. Remove the refused one to resume from another, or start anew with --overwrite") from error
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(
            f"the checkpoints in {path} are of another run or release ({error}): start anew with --overwrite"
        ) from error
    about: dict[str, Any] = extra["about"]
    return about


def exists(directory: Path) -> bool:
    """Whether there is something to resume from."""
    return bool(layout.checkpoints(directory / CHECKPOINTS))


def remove(directory: Path) -> None:
    """All checkpoints of a run, or none if the process dies."""
    gone = directory / f".removing-{CHECKPOINTS}"
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):
        (directory / CHECKPOINTS).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def resume_command(directory: Path) -> str:
    return f"stallfree finetune --resume --output {shlex.quote(str(directory.absolute()))}"
