"""What is run, and in which order: methods, learning rates, seeds.

The order is by importance, and depends on results so far: every method over the grid with the first seed, further out where
the best rate is at the grid's edge; then the other seeds at the best rate and at one moderate rate; then at the best one's
neighbours. A study that stops early has complete parts, and one that is started again with its results goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .rule import Method

WARM_UP = 20  # calls in which the learning rate rises; the methods' warm-up covers them unless their name says otherwise
SYNC = Method(name="synchronous AdamW", topk_ratio=1.0)
METHODS = {
    method.name: method
    for method in (
        SYNC,
        Method(name="replay S=4"),
        Method(name="replay S=4, no look-ahead", lookahead=0.0),
        Method(name="zenflow S=4", rule="mean", stagger=False, lag=4, lookahead=0.0),
        Method(name="replay S=2", update_interval=2),
        Method(name="replay S=8", update_interval=8),
        Method(name="replay S=4, deferred LR x 0.5", deferred_lr_scale=0.5),
        Method(name="staggered mean S=4", rule="mean", lookahead=0.0),
        Method(name="replay S=4, warm-up 4", full_warm_up_rounds=4),
        Method(name="replay S=4, plain warm-up", warm_up_lookahead=False),
        Method(name="replay S=2, no look-ahead", update_interval=2, lookahead=0.0),
        Method(name="replay S=8, no look-ahead", update_interval=8, lookahead=0.0),
        Method(name="replay S=4, deferred LR x 0.5, no look-ahead", deferred_lr_scale=0.5, lookahead=0.0),
        Method(name="replay S=4, warm-up 4, no look-ahead", full_warm_up_rounds=4, lookahead=0.0),
        Method(name="zenflow S=4, warm-up 4", rule="mean", stagger=False, lag=4, lookahead=0.0, full_warm_up_rounds=4),
        Method(name="replay S=4, k=0", topk_ratio=0.0),
    )
}
GRID = (3e-6, 1e-5, 3e-5, 1e-4, 2e-4, 4e-4, 1e-3, 2e-3, 4e-3)
START = GRID[2:7]
MODERATE = 3e-5
SEEDS = (0, 1, 2)
PROBE = (SYNC.name, 1e-4, 0)  # the run whose gradients are measured for rho and retention


class Run(NamedTuple):
    task: str
    method: str
    lr: float
    seed: int


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
    return Run(record["task"], record["method"], record["lr"], record["seed"])


def loss_of(record: Mapping[str, Any]) -> float:
    """Final held-out loss; infinite for a run that diverged (JSON has no NaN: None)."""
    loss = record["held_out"][-1]
    return math.inf if loss is None else loss


def best_lr(results: Results, task: str, method: str, seed: int = 0) -> float:
    """The learning rate of the lowest held-out loss with one seed."""
    return min(
        (lr for lr in GRID if Run(task, method, lr, seed) in results), key=lambda lr: results[Run(task, method, lr, seed)]
    )


def neighbours(lr: float) -> list[float]:
    place = GRID.index(lr)
    return list(GRID[max(place - 1, 0) : place] + GRID[place + 1 : place + 2])


def missing(results: Results, tasks: Iterable[str], methods: Iterable[str], seeds: Iterable[int] = SEEDS) -> list[Run]:
    """The runs still to be made, most important first."""
    first, *others = seeds
    wanted: list[tuple[int, Run]] = []
    for task in tasks:
        for method in methods:
            wanted += [(0, Run(task, method, lr, first)) for lr in START]
            if any(run not in results for _, run in wanted[-len(START) :]):
                continue
            best = best_lr(results, task, method, first)
            around = [Run(task, method, lr, first) for lr in neighbours(best)]
            wanted += [(1, run) for run in around]
            if any(run not in results for run in around):
                continue
            wanted += [(2, Run(task, method, lr, seed)) for lr in (best, MODERATE) for seed in others]
            wanted += [(3, Run(task, method, lr, seed)) for lr in neighbours(best) for seed in others]
    ordered = sorted((entry for entry in wanted if entry[1] not in results), key=lambda entry: entry[0])
    return list(dict.fromkeys(run for _, run in ordered))


def batch_of(runs: list[Run], size: int) -> list[Run]:
    """The first runs that can go together: of the task whose turn it is."""
    return [run for run in runs if run.task == runs[0].task][:size]
