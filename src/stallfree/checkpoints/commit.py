"""How a checkpoint is there at once or never, whoever writes its files: aside, on the disk, and named by one rename.

Up to the rename whatever goes wrong is an error, and the older checkpoints are as they were. After it the new one is saved, and
what goes wrong is a warning.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from stallfree.checkpoints import layout
from stallfree.checkpoints.errors import CheckpointError
from stallfree.checkpoints.layout import LOCK


class New(NamedTuple):
    """A checkpoint that is being written."""

    aside: Path  # the directory that its files are written into
    path: Path  # what that is called when they are there


@contextmanager
def new_checkpoint(directory: Path, keep: int, check: Callable[[Path], object]) -> Iterator[New]:
    """A checkpoint in `directory`, for the block to write and sync the files of; it exists from the end of the block on.

    Args:
        keep: how many stay that `check` lets pass; older ones are removed then.
        check: raises CheckpointError for one that is damaged. Such are neither counted nor touched: someone may want to look.

    Raises:
        CheckpointError: if it cannot be written, or another process is saving into `directory`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            new = _begin(directory)
            try:
                yield new
                sync(new.aside)
                new.aside.rename(new.path)
            except BaseException:
                shutil.rmtree(new.aside, ignore_errors=True)
                raise
            _conclude(new.path, keep, check)
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint could be written into {directory} ({error.strerror or error}); those that were there are unchanged"
        ) from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time. The system lets go of the lock of a process that dies."""
    file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is saving into {directory}: give each run a directory of its own") from None
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may hold the file open
    finally:
        os.close(file)


def _begin(directory: Path) -> New:
    for left in [*directory.glob(".saving-*"), *directory.glob(".removing-*")]:  # by processes that died: we hold the lock
        _remove(left)
    number = max((layout.number(path) for path in layout.checkpoints(directory)), default=0) + 1
    new = New(directory / f".saving-{number:08d}", directory / f"checkpoint-{number:08d}")
    new.aside.mkdir()
    return new


def _conclude(path: Path, keep: int, check: Callable[[Path], object]) -> None:
    try:
        sync(path.parent)
        found = layout.checkpoints(path.parent)
    except OSError as error:
        _warn(
            f"{path} is saved, but the directory above has trouble ({error.strerror or error}): it may not outlast a loss of "
            "power, and older ones are kept; look after the disk"
        )
        return
    kept = 0
    for old in reversed(found):
        try:
            check(old)
        except CheckpointError:
            continue
        kept += 1
        if kept > keep:
            _remove_checkpoint(old)


def _remove_checkpoint(path: Path) -> None:
    gone = path.with_name(f".removing-{path.name}")
    try:
        path.rename(gone)  # first, so that a process that dies here leaves no half checkpoint
    except OSError as error:
        _warn_of_rest(path, error)
    else:
        _remove(gone)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        _warn_of_rest(path, error)


def _warn_of_rest(path: Path, error: OSError) -> None:
    _warn(f"{path} is no longer needed and cannot be removed ({error.strerror or error}): remove it when that is possible")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def sync(path: Path) -> None:
    """Make sure that a file or the names in a directory are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
