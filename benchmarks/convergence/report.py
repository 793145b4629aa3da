"""The study's JSONL as markdown tables: python -m benchmarks.convergence.report FILE..."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .plan import GRID, METHODS, MODERATE, SEEDS, SYNC, Run, loss_of, read, run_of

Records = Mapping[Run, Mapping[str, Any]]


def diverged(record: Mapping[str, Any]) -> bool:
    """Not a number, or worse than the untrained model."""
    return not loss_of(record) < record["untrained"]


def losses(records: Records, task: str, method: str, lr: float) -> dict[int, float]:
    """Final held-out loss by seed."""
    runs = {seed: records.get(Run(task, method, lr, seed)) for seed in SEEDS}
    return {seed: loss_of(record) for seed, record in runs.items() if record}


def best_lr(records: Records, task: str, method: str) -> float | None:
    """The rate of the lowest mean loss, among those with the most seeds."""
    tried = {lr: losses(records, task, method, lr) for lr in GRID}
    most = max(map(len, tried.values()))
    means = {lr: statistics.fmean(found.values()) for lr, found in tried.items() if len(found) == most > 0}
    return min(means, key=means.__getitem__, default=None)


def mean_and_spread(values: Iterable[float]) -> str:
    values = list(values)
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return "diverged"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def against(found: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """Mean difference over the seeds that both have, and its standard deviation: a seed is the same data in the same order."""
    differences = [found[seed] - reference[seed] for seed in found if seed in reference]
    if not differences or not all(map(math.isfinite, differences)):
        return "–"
    spread = f" ± {statistics.stdev(differences):.4f}" if len(differences) > 1 else ""
    return f"{statistics.fmean(differences):+.4f}{spread}"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def summary(records: Records, task: str) -> str:
    """One row for each method: at its best rate, and at the moderate one."""
    reference = best_lr(records, task, SYNC.name)
    rows = []
    for method in METHODS:
        best = best_lr(records, task, method)
        if best is None:
            continue
        at_best, moderate = losses(records, task, method, best), losses(records, task, method, MODERATE)
        sync_best = losses(records, task, SYNC.name, reference) if reference else {}
        runs = [records[Run(task, method, best, seed)] for seed in at_best]
        edge = (
            "" if GRID.index(best) + 1 < len(GRID) and losses(records, task, method, GRID[GRID.index(best) + 1]) else " (edge)"
        )
        rows.append([
            method, f"{best:g}{edge}", str(len(at_best)), mean_and_spread(at_best.values()), against(at_best, sync_best),
            f"{statistics.fmean(run['exact_match'][-1] for run in runs):.3f}",
            mean_and_spread(moderate.values()), against(moderate, losses(records, task, SYNC.name, MODERATE)),
            f"{statistics.fmean(run['rho'] or math.nan for run in runs):.3f}",
        ])  # fmt: skip
    header = ["method", "best LR", "seeds", "held-out loss", "above synchronous", "exact match",
              f"loss at {MODERATE:g}", "above synchronous", "rho"]  # fmt: skip
    return table(header, rows)


def grid(records: Records, task: str) -> str:
    """Final held-out loss of the first seed, methods by learning rates."""
    rates = [lr for lr in GRID if any(run.task == task and run.lr == lr for run in records)]

    def cell(method: str, lr: float) -> str:
        record = records.get(Run(task, method, lr, SEEDS[0]))
        if record is None:
            return ""
        return f"{loss_of(record):.4f}" + (" (diverged)" if diverged(record) else "")

    rows = [[method, *(cell(method, lr) for lr in rates)] for method in METHODS]
    return table(["method", *(f"{lr:g}" for lr in rates)], [row for row in rows if any(row[1:])])


def locality(probe: Mapping[str, Any]) -> str:
    """rho and retention of each kind of parameter."""
    rows = []
    for kind, found in probe["table"].items():
        if "rho" in found:
            rows.append([kind, "", f"{found['rho']:.3f}", "", "", ""])
            continue
        cells = [f"{found[axis][value]:.3f}" for axis in ("columns", "rows") for value in ("rho", "retention")]
        rows.append([kind, f"{found['share']:.3f}", *cells])
    return table(["kind", "share of squared norm", "rho, columns", "retention, columns", "rho, rows", "retention, rows"], rows)


def report(paths: list[Path]) -> str:
    records = {run_of(record): record for record in read(paths)}
    probes = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["kind"] == "probe":
                probes[record["task"]] = record
    parts = []
    for task in sorted({run.task for run in records}):
        some = next(record for run, record in records.items() if run.task == task)
        parts += [
            f"## {task}\n",
            f"{some['steps']} steps of {some['batch']} sequences; held-out loss before training {some['untrained']:.4f}. "
            f"{some['device']}, torch {some['torch']}, {some['date']}.\n",
            summary(records, task),
            "Held-out loss after the last step, first seed, by learning rate:\n",
            grid(records, task),
        ]
        if task in probes:
            parts += [
                "rho and retention by kind of parameter, on the gradients of synchronous AdamW:\n",
                locality(probes[task]),
            ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    print(report(parser.parse_args().files))


if __name__ == "__main__":
    main()
