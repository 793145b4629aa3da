"""Checkpoints of several ranks, by torch.distributed.checkpoint: any number of ranks can go on from them.

A save flushes first, which takes all that belongs to one rank out of the state. It is committed as those of
`stallfree.checkpoints` are, by rank 0. The files are torch's, and run.json.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from stallfree.checkpoints import CheckpointError, NoCheckpointError, layout
from stallfree.checkpoints.commit import new_checkpoint
from stallfree.checkpoints.tensors import write_file
from stallfree.cli.finetune.ranks import Ranks
from stallfree.cli.finetune.train import Training

RUN_FILE = "run.json"  # what is not sharded, and the sizes of the other files
KEEP = 2

Result = TypeVar("Result")


def save(directory: Path, training: Training, extra: dict[str, Any]) -> None:
    """Write a checkpoint, on all ranks; whatever goes wrong on the way, the previous ones stay.

    Raises:
        CheckpointError: on all ranks alike, if it cannot be written.
    """
    ranks = training.ranks
    training.optimizer.flush()
    training.reseed()
    with ExitStack() as held:  # on rank 0: the new checkpoint, which is one when this is closed without an error
        new = _on_first(ranks, lambda: held.enter_context(new_checkpoint(directory, KEEP, _read_run)))
        try:
            _quietly(save_shards, _state(training), checkpoint_id=new.aside)
        except CheckpointException as error:
            raise CheckpointError(f"no checkpoint could be written into {directory} ({_cause(error)})") from error
        _on_first(ranks, lambda: _complete(new.aside, extra | {"ranks": ranks.world}, held))


def load(directory: Path, training: Training, accept: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Go on from the newest checkpoint, on all ranks; returns what was saved as `extra`, which `accept` may refuse first.

    Raises:
        CheckpointError: there is none, or it is not whole.
        ValueError: it is of another model or configuration.
    """
    found = layout.checkpoints(directory)
    if not found:
        raise NoCheckpointError(f"there is no checkpoint in {directory}")
    path, others = found[-1], found[:-1]
    try:
        run = _read_run(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}; {_way_out(others)}") from error
    accept(run)
    state = _state(training)
    more = training.ranks.world > run["ranks"]  # who was not there then asks for what is not there now
    planner = DefaultLoadPlanner(allow_partial_load=more)
    try:
        _quietly(load_shards, state, checkpoint_id=path, planner=planner)
    except CheckpointException as error:
        raise CheckpointError(f"{path} cannot be loaded ({_cause(error)}); {_way_out(others)}") from error
    set_state_dict(training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return run


def _state(training: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def _complete(aside: Path, run: dict[str, Any], held: ExitStack) -> None:
    sizes = {path.name: path.stat().st_size for path in aside.iterdir()}
    write_file(aside / RUN_FILE, iter([json.dumps(run | {"files": sizes}).encode()]))
    held.close()


def _read_run(path: Path) -> dict[str, Any]:
    """What was saved as `extra` in a checkpoint whose files have the right sizes.

    Raises:
        CheckpointError: with the reason.
    """
    try:
        run: dict[str, Any] = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
        wrong = [name for name, size in run["files"].items() if (path / name).stat().st_size != size]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"it is not whole ({error})") from error
    if wrong:
        raise CheckpointError(f"{wrong[0]} does not have the size it was written with")
    return run


def _on_first(ranks: Ranks, do: Callable[[], Result]) -> Result:
    """What `do` gives on rank 0, on all ranks; or its error."""
    result, failed = None, ""
    if ranks.first:
        try:
            result = do()
        except CheckpointError as error:
            failed = str(error)
        except OSError as error:
            failed = f"no checkpoint could be written ({error.strerror or error})"
    result, failed = ranks.same((result, failed))
    if failed:
        raise CheckpointError(failed)
    return result  # type: ignore[return-value]


def _quietly(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    with warnings.catch_warnings(action="ignore"):  # of deprecations inside torch
        function(*args, **options)


def _cause(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {' '.join(str(cause).split())[:300]}"


def _way_out(others: list[Path]) -> str:
    return f"the one before is {others[-1]}" if others else "no other is there"
