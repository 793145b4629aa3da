"""The study's JSONL as markdown tables: python -m benchmarks.convergence.report FILE..."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from .plan import METHODS, MODERATE, SEEDS, STEPS, SYNC, loss_of, read, run_of

Records = Mapping[tuple[str, float, int], Mapping[str, Any]]  # of one task and length: (method, rate, seed) -> record


def diverged(record: Mapping[str, Any]) -> bool:
    """Not a number, or worse than the untrained model."""
    return not loss_of(record) < record["untrained"]


def losses(records: Records, method: str, lr: float | None) -> dict[int, float]:
    """Final held-out loss by seed."""
    runs = {seed: records.get((method, lr, seed)) for seed in SEEDS} if lr else {}
    return {seed: loss_of(record) for seed, record in runs.items() if record}


def rates_of(records: Records, method: str | None = None) -> list[float]:
    return sorted({lr for its, lr, _ in records if method in (None, its)})


def best_lr(records: Records, method: str) -> float | None:
    """The rate of the lowest mean loss, among those with the most seeds."""
    tried = {lr: losses(records, method, lr) for lr in rates_of(records, method)}
    most = max(map(len, tried.values()), default=0)
    means = {lr: statistics.fmean(found.values()) for lr, found in tried.items() if len(found) == most}
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


def summary(records: Records) -> str:
    """One row for each method: at its best rate, and at a moderate one."""
    rates = rates_of(records)
    moderate = MODERATE if MODERATE in rates else rates[0]
    reference = losses(records, SYNC.name, best_lr(records, SYNC.name))
    moderate_reference = losses(records, SYNC.name, moderate)
    rows = []
    for method in METHODS:
        best, tried = best_lr(records, method), rates_of(records, method)
        if best is None:
            continue
        at_best, at_moderate = losses(records, method, best), losses(records, method, moderate)
        runs = [records[method, best, seed] for seed in at_best]
        rows.append([
            method, f"{best:g}" + (" (edge)" if best in (tried[0], tried[-1]) else ""), str(len(at_best)),
            mean_and_spread(at_best.values()), against(at_best, reference),
            f"{statistics.fmean(run['exact_match'][-1] for run in runs):.3f}",
            mean_and_spread(at_moderate.values()), against(at_moderate, moderate_reference),
            f"{statistics.fmean(run['rho'] or math.nan for run in runs):.3f}",
        ])  # fmt: skip
    header = ["method", "best LR", "seeds", "held-out loss", "above synchronous", "exact match",
              f"loss at {moderate:g}", "above synchronous", "rho"]  # fmt: skip
    return table(header, rows)


def grid(records: Records) -> str:
    """Final held-out loss of the first seed, methods by learning rates."""
    rates = rates_of(records)

    def cell(method: str, lr: float) -> str:
        record = records.get((method, lr, SEEDS[0]))
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
    """A section for each task and number of steps."""
    sections: dict[tuple[str, int], dict[tuple[str, float, int], Mapping[str, Any]]] = {}
    for record in read(paths):
        run = run_of(record)
        sections.setdefault((run.task, run.steps), {})[run.method, run.lr, run.seed] = record
    probes = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["kind"] == "probe":
                probes[record["task"], record.get("steps", STEPS)] = record
    parts = []
    for (task, steps), records in sorted(sections.items(), key=itemgetter(0)):
        some = next(iter(records.values()))
        parts += [
            f"## {task}, {steps} steps\n",
            f"{steps} steps of {some['batch']} sequences; held-out loss before training {some['untrained']:.4f}. "
            f"{some['device']}, torch {some['torch']}, {some['date']}.\n",
            summary(records),
            "Held-out loss after the last step, first seed, by learning rate:\n",
            grid(records),
        ]
        if (task, steps) in probes:
            parts += [
                "rho and retention by kind of parameter, on the gradients of synchronous AdamW:\n",
                locality(probes[task, steps]),
            ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    print(report(parser.parse_args().files))


if __name__ == "__main__":
    main()
