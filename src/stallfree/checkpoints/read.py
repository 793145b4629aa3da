"""Loading: files, names, shapes and settings are checked before anything is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from torch import Tensor, nn

from stallfree.checkpoints import layout
from stallfree.checkpoints.errors import CheckpointError, NoCheckpointError, check_optimizer
from stallfree.checkpoints.layout import CHECKPOINT_NAME, CONTENTS, MANIFEST
from stallfree.checkpoints.tensors import TensorFiles
from stallfree.checkpoints.tree import decode

if TYPE_CHECKING:
    from stallfree.optimizer import ZenFlowAdamW

PARTS = ("optimizer", "model", "extra")


def load_checkpoint(directory: str | Path, optimizer: ZenFlowAdamW, *, model: nn.Module | None = None) -> Any:
    """Go on where a checkpoint was saved, bit for bit; returns what was saved as `extra`.

    Every byte is compared with its checksum first. Copies from the mapped files into the state and the weights that are there;
    besides, until the next call the optimizer keeps a copy of the weights that it trains, by which it knows them again.

    Args:
        directory: what `save_checkpoint` was given: its newest checkpoint is loaded, or refused. Or one checkpoint itself.
        model: the model to load, if it was saved. Trained weights come with the optimizer; buffers and frozen ones do not.

    Raises:
        NoCheckpointError: there is none.
        CheckpointError: it is damaged or not there, which is said together with the newest good one.
        ValueError: it is of another model or configuration. In all these cases nothing has been changed.
        RuntimeError: the optimizer is loaded, and what the model runs while it loads (hooks, `set_extra_state`) has failed.
    """
    check_optimizer(optimizer, "load_checkpoint")
    optimizer.engine.refuse_sharded("load_checkpoint()")
    path = _newest(Path(directory))
    try:
        state = _read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}; {_way_out(path)}") from error
    if model is not None:
        _check_model(path, model, state["model"])
    extra = _copied(state["extra"])
    optimizer.load_state_dict(state["optimizer"])
    if model is not None:
        _load_model(path, model, state["model"])
    return extra


def _newest(directory: Path) -> Path:
    if CHECKPOINT_NAME.fullmatch(directory.name) or (directory / MANIFEST).exists():
        if not directory.exists():
            raise CheckpointError(f"there is no {directory}; {_way_out(directory)}")
        return directory
    if directory.is_file():
        raise CheckpointError(f"{directory} is a file: give what save_checkpoint was given, or one checkpoint in it")
    found = layout.checkpoints(directory)
    if not found:
        raise NoCheckpointError(f"there is no checkpoint in {directory}")
    return found[-1]


def _way_out(path: Path) -> str:
    others = [other for other in layout.checkpoints(path.absolute().parent) if other.name != path.name]
    found = next(layout.good(others), None)
    return "no other good one is there" if found is None else f"the newest good one is {found}"


def _read(path: Path) -> dict[str, Any]:
    manifest = layout.verify(path)
    try:
        contents = json.loads((path / CONTENTS).read_text(encoding="utf-8"))
        tensors = TensorFiles([path / name for name in manifest.files if name != CONTENTS])
        return {part: decode(contents[part], tensors) for part in PARTS}
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"its files do not fit together ({type(error).__name__}: {error})") from error


def _check_model(path: Path, model: nn.Module, saved: Any) -> None:
    if saved is None:
        raise CheckpointError(f"{path} was saved without a model: load it without one")
    ours = model.state_dict()
    if ours.keys() != saved.keys():
        raise ValueError(f"{path} is of another model: they differ in {', '.join(sorted(ours.keys() ^ saved.keys())[:4])}")
    for name, value in ours.items():
        if isinstance(value, Tensor) and (not isinstance(saved[name], Tensor) or saved[name].shape != value.shape):
            raise ValueError(f"{path} is of another model: {name} has another shape there")


def _load_model(path: Path, model: nn.Module, saved: Any) -> None:
    try:
        model.load_state_dict(saved)
    except Exception as error:
        raise RuntimeError(
            f"of {path} the optimizer is loaded, and the model only in part ({type(error).__name__}: {error}): mend what fails "
            "in the model's load_state_dict(), and build both anew"
        ) from error


def _copied(value: Any) -> Any:
    """Free of the files."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
