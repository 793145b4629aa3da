"""Saving: beside the older ones, and visible at once or never."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stallfree.checkpoints import layout
from stallfree.checkpoints.errors import CheckpointError, check_optimizer
from stallfree.checkpoints.layout import CONTENTS, LOCK, MANIFEST, WORKERS, Manifest
from stallfree.checkpoints.tensors import NAMES, FileSum, write_file, write_tensors
from stallfree.checkpoints.tree import Collector

if TYPE_CHECKING:
    from stallfree.optimizer import ZenFlowAdamW

FILE_BYTES = 1 << 28  # after which a new file begins; a larger tensor has one of its own


def save_checkpoint(
    directory: str | Path, optimizer: ZenFlowAdamW, *, model: nn.Module | None = None, extra: Any = None, keep: int = 2
) -> Path:
    """Save everything that training goes on from, and return the new checkpoint's directory, in `directory`.

    Between two steps, from the training thread. Changes nothing that training can see, copies no state: what is written are
    the live arrays, piece by piece. Killed at any moment, or out of room, it leaves the older checkpoints as they are. There
    must be room for `keep` + 1.

    Args:
        model: its state_dict is saved too; weights that the optimizer trains are stored once.
        extra: anything made of tensors, numbers, text, None, lists, tuples and dicts: schedules, counters, generators' states.
        keep: how many checkpoints stay whose sizes and manifests are right; older ones are removed when the new one is safe.

    Raises:
        TypeError: for something in `extra`, `model` or the param_groups that a checkpoint cannot hold.
        CheckpointError: if it cannot be written, or another process is saving into `directory`.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    check_optimizer(optimizer, "save_checkpoint")
    optimizer.engine.refuse_sharded("save_checkpoint()")
    directory = Path(directory)
    collector = Collector()
    state = {"optimizer": optimizer.state_dict(), "model": None if model is None else model.state_dict(), "extra": extra}
    contents = {name: collector.encode(part, name) for name, part in state.items()}
    for name, tensor in collector.tensors.items():
        if tensor.dtype not in NAMES:
            raise TypeError(f"{name} is of {tensor.dtype}, which a checkpoint cannot hold")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            path = _write(directory, contents, collector.tensors, optimizer.engine.clock.call)
            _remove_old(directory, keep)
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint could be written into {directory} ({error.strerror or error}); those that were there are unchanged"
        ) from error
    return path


@contextmanager
def locked(directory: Path) -> Iterator[None]:
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


def _write(directory: Path, contents: Any, tensors: Mapping[str, Tensor], call: int) -> Path:
    for left in [*directory.glob(".saving-*"), *directory.glob(".removing-*")]:  # by processes that died: we hold the lock
        shutil.rmtree(left)
    number = max((layout.number(path) for path in layout.checkpoints(directory)), default=0) + 1
    aside, path = directory / f".saving-{number:08d}", directory / f"checkpoint-{number:08d}"
    aside.mkdir()
    try:
        files = {CONTENTS: write_file(aside / CONTENTS, iter([json.dumps(contents).encode()]))} | _write_tensors(aside, tensors)
        manifest = Manifest(call, files).to_json(f"torch {torch.__version__}")
        write_file(aside / MANIFEST, iter([manifest.encode()]))
        sync(aside)
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync(directory)
    return path


def _write_tensors(aside: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileSum]:
    groups = list(_grouped(tensors))
    names = [f"tensors-{place:05d}.safetensors" for place in range(len(groups))]
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="stallfree-save") as writers:
        try:
            sums = list(writers.map(write_tensors, [aside / name for name in names], groups))
        except BaseException:
            writers.shutdown(cancel_futures=True)
            raise
    return dict(zip(names, sums, strict=True))


def _grouped(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if group and size + tensor.nbytes > FILE_BYTES:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    if group:
        yield group


def _remove_old(directory: Path, keep: int) -> None:
    """All but the last good ones. What is damaged is neither counted nor touched: someone may want to look at it."""
    kept = 0
    for path in reversed(layout.checkpoints(directory)):
        try:
            layout.read_manifest(path)
        except CheckpointError:
            continue
        kept += 1
        if kept > keep:
            gone = directory / f".removing-{path.name}"
            path.rename(gone)  # first, so that a process that dies here leaves no half checkpoint
            shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    """Make sure that a file or the names in a directory are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
