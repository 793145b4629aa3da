"""A step of FSDP2 with Stallfree on 1 to 1,024 GPUs, on paper:

    python -m benchmarks.scaling.report --output RESULT.md --picture PICTURE.svg

No GPU is used. Durations of computation, copies, host work and collectives come from constants (`cases.py`), each with its
source or marked as an assumption, and a discrete-event simulation of one rank (`simulation.py`) puts them in order: what runs
beside what, what waits for what. All ranks are alike, so one rank, with its share of a host and of the network, stands for
all. Blocks, phases, what is selected and host memory are the library's own.

Older than the engine: a block that staging memory holds is cut into pieces here, and a window goes to the host whole.
Left out: selections, the warm-up, waits for a slot of the last close, room in the ring for copies up, activations, stragglers,
the launching thread, whatever slows a kernel down because another one or a full memory bus is beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.scaling.cases import HIDDEN, INTERVALS, MEASURED, MODELS, NODE, ROOM, WORLDS, Case
from benchmarks.scaling.simulation import Step, paced, simulate

RESULTS = Path(__file__).parents[1] / "results"
TWO_GPUS = ("", "-pace", "-s8", "-evening", "-night")  # runs of fsdp-h200x2-2026-11-30.md, in order, on several machines
TWO_MODES = {
    "stallfree:update_interval=4": ("4", Case(model=MODELS[0], world=2)),
    "stallfree:update_interval=8": ("8", Case(model=MODELS[0], world=2, interval=8)),
    "idle-host:update_interval=4": ("4, no host work", Case(model=MODELS[0], world=2, free=True)),
}
TWO_HEAD = (
    "| 1.5B, two GPUs | S | floor, ms: measured | model | error | step / floor: measured | model | error "
    "| host threads: measured | model | host busy, ms: measured | model | error | with all threads |"
)


@dataclass
class Row:
    case: Case
    floor: Step
    step: Step
    smallest: int | None  # S that hides the host's work and copies

    @property
    def collectives_s(self) -> float:
        """Of weights and gradients, one after the other: the network does no more at once."""
        ops = [op for op in self.floor.ops if op.stream in ("gather", "reduce")]
        return sum(op.work for op in ops) / (1 + max(op.call for op in ops))

    @property
    def fewest_tokens(self) -> float:
        """Of a GPU, for which copies and host work at this S still take no more than `ROOM` of forward and backward."""
        return self.case.tokens * max(self.step.busy[name] for name in ("host", "down", "up")) / (ROOM * self.case.compute_s)


def row(case: Case) -> Row:
    def hides(interval: int) -> bool:
        some = replace(case, interval=interval)
        return simulate(some).seconds <= HIDDEN * simulate(replace(some, free=True)).seconds

    smallest = next((interval for interval in INTERVALS if hides(interval)), None)
    return Row(case, simulate(replace(case, interval=0)), simulate(case), smallest)


HEAD = (
    "| model | GPUs | compute | gather + reduce | down | up | host | all-reduce | floor | step / floor | longest | of ours "
    "| smallest S | tokens | host GB | fits |"
)


def line(item: Row) -> str:
    case, busy = item.case, item.step.busy
    collectives = item.collectives_s
    ours = {"down": busy["down"], "up": busy["up"], "host": busy["host"], "all-reduce": case.flat_s}
    all_ = {"compute": case.compute_s, "gather + reduce": collectives} | ours
    times = [case.compute_s, collectives, busy["down"], busy["up"], busy["host"], case.flat_s, item.floor.seconds]
    cells = [case.model.name, f"{case.world:,}", *(ms(time) for time in times)]
    cells += [f"{item.step.seconds / item.floor.seconds:.3f}", max(all_, key=all_.__getitem__), max(ours, key=ours.__getitem__)]
    cells += [str(item.smallest or "none"), f"{item.fewest_tokens:,.0f}", f"{case.host_bytes / 1e9:,.1f}"]
    return "| " + " | ".join([*cells, "yes" if case.fits else "no"]) + " |"


def ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 1 or not value else f"{value:.2f}"


def table(rows: Sequence[Row]) -> str:
    return "\n".join([HEAD, "|---" * HEAD.count(" | ") + "|---|", *(line(item) for item in rows)])


def check() -> str:
    """The model against what was measured, on one GPU and on two."""
    return f"{check_one()}\n\n{check_two()}"


def check_one() -> str:
    small = MODELS[0]
    lines = ["| 1.5B, one GPU, S=4 | measured | model |", "|---|---|---|"]
    case = Case(model=small, world=1)
    step = simulate(case)
    size = sum(op.work for op in step.ops if op.stream == "down" and op.call == 2) / small.parameters
    back = sum(op.work for op in step.ops if op.stream == "up" and op.call >= 6) / 4 / small.parameters
    lines += [f"| step, ms | 210.1 | {ms(step.seconds)} |", f"| bytes down, per parameter | 1.800 | {size:.3f} |"]
    lines += [f"| bytes up, per parameter | 0.450 | {back:.3f} |"]
    for threads, measured in ((14, 80), (10, 108), (8, 124)):
        busy = simulate(replace(case, host=replace(MEASURED, threads=threads))).busy["host"]
        lines.append(f"| host busy with {threads} threads, ms | {measured} | {ms(busy)} |")
    left = paced(case)  # measured: step-h200-1.5b-8x1024-2026-11-30-night.json
    lines.append(f"| threads that the engine leaves at work | 5 and 6 | {left.at.threads} |")
    lines.append(f"| host busy with them, ms | 144 | {ms(simulate(left).busy['host'])} |")
    return "\n".join(lines)


def check_two() -> str:
    """Every run there is. The model's host work is with as many threads as worked there, and then with all that there are."""
    lines = [TWO_HEAD, "|---" * TWO_HEAD.count(" | ") + "|---|"]
    for run in TWO_GPUS:
        saved = json.loads((RESULTS / f"fsdp-h200x2-2026-11-30{run}.json").read_text(encoding="utf-8"))
        modes = {mode["mode"]: mode for mode in saved["modes"]}
        lines += [_two(run, modes["floor"], mode) for name, mode in modes.items() if name in TWO_MODES]
    return "\n".join(lines)


def _two(run: str, floor: dict, mode: dict) -> str:
    name, case = TWO_MODES[mode["mode"]]
    step, base = simulate(case), simulate(replace(case, interval=0))
    cells = [run.removeprefix("-") or "first", name, *_beside(floor["mean_ms"], base.seconds * 1e3, ".0f")]
    cells += _beside(mode["ratio"], step.seconds / base.seconds, ".3f")
    if case.free:
        return "| " + " | ".join([*cells, *"––––––"]) + " |"
    worked, left = set(mode.get("round_host_threads", ())), paced(case)  # in these runs of S=4 and 8 it is one number
    cells += [" and ".join(map(str, sorted(worked))) or "–", str(left.at.threads)]
    there = replace(case, host=replace(case.at, threads=min(worked))) if worked else left
    busy = simulate(there).busy["host"] * 1e3
    cells += _beside(mode["host_ms"], busy, ".0f") if "host_ms" in mode else ["–", f"{busy:.0f}", "–"]
    return "| " + " | ".join([*cells, f"{step.busy['host'] * 1e3:.0f}"]) + " |"


def _beside(measured: float, model: float, form: str) -> list[str]:
    """Both, and by how much the model is off."""
    return [f"{measured:{form}}", f"{model:{form}}", f"{100 * (model / measured - 1):+.0f}%"]


def traffic() -> str:
    lines = ["| | all-reduce in `step()`, MB | gradients, gathered instead, MB | ratio |", "|---|---|---|---|"]
    for model in MODELS:
        flat, whole = Case(model=model, world=8).flat_bytes, 2 * model.parameters
        lines.append(f"| {model.name} | {flat / 1e6:.2f} | {whole / 1e6:,.0f} | {whole / flat:,.0f} |")
    return "\n".join(lines)


def variants() -> str:
    """What single assumptions are worth, for 8 and 1,024 GPUs."""
    lines = [
        "| 8,192 tokens a GPU unless it says so, S=4 | GPUs | step / floor 1.5B | 7B | 72B | host busy / step 1.5B | 7B | 72B |"
    ]
    lines.append("|---" * 8 + "|")
    several: list[tuple[str, int, dict]] = [
        ("as above", 8, {}),
        ("a link for each GPU", 8, {"host": replace(NODE, paired=False)}),
        ("DRAM of a node 300 GB/s", 8, {"host": replace(NODE, dram=300e9)}),
        ("DRAM of a node 900 GB/s", 8, {"host": replace(NODE, dram=900e9)}),
        ("4 threads a rank", 8, {"host": replace(NODE, threads=4)}),
        ("2,048 tokens", 8, {"tokens": 2048}),
        ("1,024 tokens", 8, {"tokens": 1024}),
        ("1,024 tokens, DRAM of a node 900 GB/s", 8, {"tokens": 1024, "host": replace(NODE, dram=900e9)}),
        ("as above", 1024, {}),
        ("1,024 tokens", 1024, {"tokens": 1024}),
        ("all-reduce: 100 us for each doubling of nodes", 1024, {"tree_net_s": 100e-6}),
        ("HSDP: sharded inside a node", 1024, {"shard": 8}),
        ("HSDP, 1,024 tokens", 1024, {"shard": 8, "tokens": 1024}),
    ]
    for name, world, changed in several:
        cases = [Case(model=model, world=world, **changed) for model in (MODELS[0], MODELS[1], MODELS[3])]
        steps = [(simulate(case), simulate(replace(case, interval=0))) for case in cases]
        cells = [f"{step.seconds / floor.seconds:.3f}" for step, floor in steps]
        cells += [f"{step.busy['host'] / step.seconds:.3f}" for step, _ in steps]
        lines.append("| " + " | ".join([name, f"{world:,}", *cells]) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scaling"
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, len(MODELS), figsize=(13, 3.6), sharey=True)
    terms = {
        "forward + backward": lambda item: item.case.compute_s,
        "gather + reduce": lambda item: item.collectives_s,
        "host": lambda item: item.step.busy["host"],
        "copies down": lambda item: item.step.busy["down"],
        "copies up": lambda item: item.step.busy["up"],
        "flat all-reduce": lambda item: item.case.flat_s,
    }
    colors = dict(zip(terms, ("#333333", "#999999", "#e8a33d", "#2f6fb0", "#8fb8de", "#3f8f5f"), strict=True))
    for model, place in zip(MODELS, places, strict=True):
        items = [item for item in rows if item.case.model is model]
        for name, of in terms.items():
            points = [(item.case.world, 1e3 * of(item)) for item in items if of(item) > 0]
            place.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=colors[name])
        place.set(xscale="log", yscale="log", title=f"Qwen2.5 {model.name}", xlabel="GPUs", xticks=WORLDS)
        place.set_xticklabels([f"{world:,}" for world in WORLDS])
        place.minorticks_off()
        place.grid(alpha=0.3)
    places[0].set_ylabel("ms per step, S=4")
    figure.legend(*places[0].get_legend_handles_labels(), loc="lower center", ncols=len(terms), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="markdown")
    parser.add_argument("--picture", type=Path, help="SVG; needs matplotlib")
    args = parser.parse_args()
    rows = [row(Case(model=model, world=world)) for model in MODELS for world in WORLDS]
    command = " ".join(["python -m benchmarks.scaling.report", *sys.argv[1:]])
    parts = [f"```\n{command}\n```", f"{datetime.date.today()}, torch {torch.__version__}; no GPU."]
    parts += ["## Against what was measured", check(), "## Times per step, ms", table(rows)]
    parts += ["## Bytes of the collective", traffic(), "## What assumptions are worth", variants()]
    report = "\n\n".join(parts) + "\n"
    print(report)
    if args.output:
        args.output.write_text(report, encoding="utf-8")
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
