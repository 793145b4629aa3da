"""What is run, and in which order: groups of methods, learning rates, seeds, steps.

The order is by importance. A study that stops early has complete parts, and one that is started again with its results goes on.
The default group depends on results so far: every method over the grid with the first seed, further out where the best rate is
at the grid's edge; then the other seeds at the best rate and at one moderate rate; then at the best one's neighbours.
The other groups are lists of runs (`STAGES`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .rule import Method

WARM_UP = 20  # calls in which the learning rate rises; the methods' warm-up covers them unless their name says otherwise
STEPS = 300
SYNC = Method(name="synchronous AdamW", topk_ratio=1.0)
DEFAULT = (
    SYNC,
    Method(name="replay S=4"),
    Method(name="replay S=4, no look-ahead", lookahead=0.0),
    Method(name="zenflow S=4", rule="mean", stagger=False, lag=4, lookahead=0.0),
    Method(name="replay S=2", update_interval=2),
    Method(name="replay S=8", update_interval=8),
    Method(name="replay S=4, deferred LR x 0.5", deferred_lr_scale=0.5),
    Method(name="staggered mean S=4", rule="mean", lookahead=0.0),
    Method(name="replay S=4, warm-up 4", full_warm_up_rounds=4),
    Method(name="replay S=4, plain warm-up", warm_up_lookahead=0.0),
    Method(name="replay S=2, no look-ahead", update_interval=2, lookahead=0.0),
    Method(name="replay S=8, no look-ahead", update_interval=8, lookahead=0.0),
    Method(name="replay S=4, deferred LR x 0.5, no look-ahead", deferred_lr_scale=0.5, lookahead=0.0),
    Method(name="replay S=4, warm-up 4, no look-ahead", full_warm_up_rounds=4, lookahead=0.0),
    Method(name="zenflow S=4, warm-up 4", rule="mean", stagger=False, lag=4, lookahead=0.0, full_warm_up_rounds=4),
    Method(name="replay S=4, k=0", topk_ratio=0.0),
)
USUAL = 0.5  # look-ahead inside the warm-up of methods that have the rule's own
REFINE = (  # what could bring replay nearer to synchronous AdamW
    Method(name="replay S=4, look-ahead 3", lookahead=3.0, warm_up_lookahead=USUAL),
    Method(name="replay S=4, look-ahead 4", lookahead=4.0, warm_up_lookahead=USUAL),
    Method(name="replay S=4, warm-up 60", full_warm_up_rounds=60),
    Method(name="replay S=2, warm-up 60", update_interval=2, full_warm_up_rounds=60),
    Method(name="replay, S=2 to call 60, then 4", ramp=((2, 60),)),
    Method(name="replay S=4, k=0.2", topk_ratio=0.2),
    Method(name="replay S=4, k=0.3", topk_ratio=0.3),
    Method(name="replay S=1, lag 1", update_interval=1),
    Method(name="replay S=2, look-ahead 2", update_interval=2, lookahead=2.0, warm_up_lookahead=USUAL),
    Method(name="replay S=4, deferred beta1 0.8", deferred_beta1=0.8),
)
METHODS = {method.name: method for method in (*DEFAULT, *REFINE)}
GROUPS = {
    "default": tuple(method.name for method in DEFAULT),
    "refine": tuple(method.name for method in REFINE),
    "long": (SYNC.name, "replay S=4", "replay S=2", "zenflow S=4", "staggered mean S=4"),
}
GRID = (3e-6, 1e-5, 3e-5, 1e-4, 2e-4, 4e-4, 1e-3, 2e-3, 4e-3)
START = GRID[2:7]
MODERATE = 3e-5
SEEDS = (0, 1, 2)
PROBE = (SYNC.name, 1e-4, 0)  # method, rate and seed of the runs whose gradients are measured for rho and retention


class Stage(NamedTuple):
    """All methods of a group, whatever the results so far."""

    group: str
    lrs: tuple[float, ...]
    seed: int
    lengthening: int = 1  # of the number of steps


STAGES = (  # the most important first
    Stage("refine", (1e-4, 2e-4, 4e-4), 0),
    Stage("long", (5e-5, 1e-4, 2e-4, 4e-4), 0, lengthening=4),
    Stage("refine", (1e-4, 2e-4, 4e-4), 1),
)


class Run(NamedTuple):
    task: str
    method: str
    lr: float
    seed: int
    steps: int = STEPS


Results = Mapping[Run, float]  # final held-out loss


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Records of finished runs from JSONL files; a later record of the same run replaces an earlier one."""
    records = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["kind"] == "run":
                records[run_of(record)] = record
    return list(records.values())


def run_of(record: Mapping[str, Any]) -> Run:
    return Run(*(record[field] for field in Run._fields))


def loss_of(record: Mapping[str, Any]) -> float:
    """Final held-out loss; infinite for a run that diverged (JSON has no NaN: None)."""
    loss = record["held_out"][-1]
    return math.inf if loss is None else loss


def best_lr(results: Results, task: str, method: str, seed: int, steps: int) -> float:
    """The learning rate of the lowest held-out loss with one seed."""
    tried = {lr: results.get(Run(task, method, lr, seed, steps)) for lr in GRID}
    return min((lr for lr in GRID if tried[lr] is not None), key=tried.__getitem__)


def neighbours(lr: float) -> list[float]:
    place = GRID.index(lr)
    return list(GRID[max(place - 1, 0) : place] + GRID[place + 1 : place + 2])


def missing(
    results: Results, tasks: Sequence[str], methods: Container[str], steps: int = STEPS, groups: Container[str] = ("default",)
) -> list[Run]:
    """The runs of these groups still to be made, most important first."""
    runs = []
    if "default" in groups:
        runs += _explore(results, tasks, [name for name in GROUPS["default"] if name in methods], steps)
    for group, lrs, seed, lengthening in (stage for stage in STAGES if stage.group in groups):
        names = [name for name in GROUPS[group] if name in methods]
        listed = [Run(task, name, lr, seed, steps * lengthening) for task in tasks for name in names for lr in lrs]
        runs += [run for run in listed if run not in results]
    return list(dict.fromkeys(runs))


def _explore(results: Results, tasks: Iterable[str], methods: Iterable[str], steps: int) -> list[Run]:
    first, *others = SEEDS
    wanted: list[tuple[int, Run]] = []
    for task in tasks:
        for method in methods:
            wanted += [(0, Run(task, method, lr, first, steps)) for lr in START]
            if any(run not in results for _, run in wanted[-len(START) :]):
                continue
            best = best_lr(results, task, method, first, steps)
            around = [Run(task, method, lr, first, steps) for lr in neighbours(best)]
            wanted += [(1, run) for run in around]
            if any(run not in results for run in around):
                continue
            wanted += [(2, Run(task, method, lr, seed, steps)) for lr in (best, MODERATE) for seed in others]
            wanted += [(3, Run(task, method, lr, seed, steps)) for lr in neighbours(best) for seed in others]
    ordered = sorted((entry for entry in wanted if entry[1] not in results), key=lambda entry: entry[0])
    return [run for _, run in ordered]


def batch_of(runs: list[Run], size: int) -> list[Run]:
    """The first runs that can go together: of the task and number of steps whose turn it is."""
    return [run for run in runs if (run.task, run.steps) == (runs[0].task, runs[0].steps)][:size]
