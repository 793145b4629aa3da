"""Saving: everything that training goes on from, written as it lies in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stallfree.checkpoints import layout
from stallfree.checkpoints.commit import new_checkpoint
from stallfree.checkpoints.errors import check_optimizer
from stallfree.checkpoints.layout import CONTENTS, MANIFEST, WORKERS, Manifest
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
        keep: how many checkpoints stay whose sizes and manifests are right; older ones are removed when the new one is safe,
            with a warning where that is not possible.

    Raises:
        TypeError: for something in `extra`, `model` or the param_groups that a checkpoint cannot hold.
        CheckpointError: if it cannot be written, or another process is saving into `directory`.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    check_optimizer(optimizer, "save_checkpoint")
    optimizer.engine.refuse_sharded("save_checkpoint()")
    collector = Collector()
    state = {"optimizer": optimizer.state_dict(), "model": None if model is None else model.state_dict(), "extra": extra}
    contents = {name: collector.encode(part, name) for name, part in state.items()}
    for name, tensor in collector.tensors.items():
        if tensor.dtype not in NAMES:
            raise TypeError(f"{name} is of {tensor.dtype}, which a checkpoint cannot hold")
    with new_checkpoint(Path(directory), keep, layout.read_manifest) as new:
        _write(new.aside, contents, collector.tensors, optimizer.engine.clock.call)
    return new.path


def _write(aside: Path, contents: Any, tensors: Mapping[str, Tensor], call: int) -> None:
    files = {CONTENTS: write_file(aside / CONTENTS, iter([json.dumps(contents).encode()]))} | _write_tensors(aside, tensors)
    manifest = Manifest(call, files).to_json(f"torch {torch.__version__}")
    write_file(aside / MANIFEST, iter([manifest.encode()]))


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
