"""A step of FSDP2 with Stallfree on 1 to 1,024 GPUs, on paper: python benchmarks/scaling.py --output RESULT.md --picture P.svg

No GPU is used. Durations of computation, copies, host work and collectives come from the constants below, each with its source
or marked as an assumption, and a discrete-event simulation of one rank puts them in order: what runs beside what, what waits
for what. All ranks are alike, so one rank, with its share of a host and of the network, stands for all. Blocks, phases, what is
selected and host memory are the library's own.

    compute    forward, backward; on one GPU also the kernels that take gradients apart; AdamW of selected channels in `step()`
    beside     those kernels for later pieces of large blocks
    gather     all-gathers of weights, one unit ahead            reduce   reduce-scatters; the kernels that take gradients apart
    down, up   copies of deferred gradients and of published weights
    host       replay of the windows that closed, in the order in which backward finishes the blocks

Left out: selections, the warm-up, waits for a slot of the last close, room in the ring for copies up, activations, stragglers,
the launching thread, whatever slows a kernel down because another one or a full memory bus is beside it.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import nn

from stallfree import ZenFlowConfig
from stallfree.engine.blocks import Block, build_blocks, classify
from stallfree.engine.ring import STAGING_BYTES, piece_bytes
from stallfree.planner import SPARE, plan

GIB = 1 << 30
TOKENS = 8 * 1024  # of a GPU and step
WORLDS = (1, 2, 8, 64, 1024)
INTERVALS = (1, 2, 4, 8)
HIDDEN = 1.01  # times the step with a host and copies up that take no time: no more is called hidden
ROOM = 0.85  # of a step may be host work: what `update_interval="auto"` allows (engine/interval.py)

# Measured on one H200 with its host: benchmarks/results/step-h200-2026-11-29.md
FORWARD = 0.36  # of forward and backward: 37 to 42 of 107 to 113 ms
KERNELS_S = 5.0e-3 / 1.544e9  # per parameter of a rank: 102.3 ms of kernels against 97.3
ADAMW_S = 2.4e-3 / 1.544e9  # of that in `step()`
PCIE = 55e9  # bytes per second, one way
BOTH_WAYS = 101 / 110  # of it if the other way is in use
THREAD_S = 2.02e-9  # of one thread, for an element's window at S=4; with DRAM and EXPONENT it gives what was measured
DRAM = 151e9  # with 4, 8, 12, 14 threads: 0.510, 0.287, 0.241, 0.234 ns (0.509, 0.287, 0.243, 0.235)
EXPONENT = 4
THREADS = 14

# Measured on a Zen 5 core: benchmarks/results/replay-zen5-2core.md. Only how arithmetic grows with S is used.
ARITHMETIC = (0.094, 0.128)  # ns for a window, and for each of its steps

# Assumptions
FLOPS = 494e12  # of models from 7B on; from 352 ms for 4,096 tokens of the 7B model
NVLINK = 360e9  # bytes per second and GPU in a collective inside a node, and over nodes with a 400 Gb/s adapter for each GPU
NIC = 45e9  # of one adapter, where only ranks of the same place in their nodes talk
BASE_S, RING_S, RING_NET_S = 8.4e-6, 3.4e-6, 14e-6  # of a ring: start, a step inside a node, a step between nodes: NCCL's own
TREE_S, TREE_NET_S = (
    30e-6,
    15e-6,
)  # all-reduce: inside a node (20 to 40 us); per doubling of nodes, each way (10 to 20 us)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine and what its GPUs share."""

    gpus: int
    threads: int  # for the host's work, of each rank
    dram: float  # bytes per second, of all ranks
    paired: bool  # two GPUs share a PCIe x16 link
    memory: int


MEASURED = Host(gpus=1, threads=THREADS, dram=DRAM, paired=False, memory=128 * GIB)
# Assumed: two sockets of 56 cores, 8 channels of DDR5-4800 each, 78% of 614 GB/s; 12 threads for each of 8 ranks.
NODE = Host(gpus=8, threads=12, dram=480e9, paired=True, memory=2048 * GIB)


@dataclass(frozen=True)
class Model:
    """A shape of Qwen2.5."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    vocabulary: int
    tied: bool = False
    measured_s: float | None = None  # of forward and backward of TOKENS on one GPU

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters without memory. Biases are left out."""
        hidden, inner, narrow = self.hidden, self.inner, 128 * self.groups
        shapes = {"embed_tokens": (self.vocabulary, hidden)}
        for layer in range(self.layers):
            matrices = {"q": (hidden, hidden), "k": (narrow, hidden), "v": (narrow, hidden), "o": (hidden, hidden)}
            matrices |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            shapes |= {f"layers.{layer}.{name}_proj": shape for name, shape in matrices.items()}
        if not self.tied:
            shapes["lm_head"] = (self.vocabulary, hidden)
        empty = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
        return [(f"{name}.weight", nn.Parameter(tensor)) for name, tensor in empty.items()]

    @cached_property
    def parameters(self) -> int:
        return sum(param.numel() for _, param in self.named())

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        return (self.parameters - self.head * (1 if self.tied else 2)) // self.layers

    @property
    def compute_s(self) -> float:
        """Forward and backward of TOKENS: measured, or 6 operations per token and parameter of a matrix product."""
        return self.measured_s or 6 * (self.layers * self.layer + self.head) * TOKENS / FLOPS


MODELS = (
    Model("1.5B", 1536, 8960, 28, 12, 2, 151936, tied=True, measured_s=0.1995),
    Model("7B", 3584, 18944, 28, 28, 4, 152064, measured_s=2 * 0.352),  # measured with half the tokens
    Model("32B", 5120, 27648, 64, 40, 8, 152064),
    Model("72B", 8192, 29568, 80, 64, 8, 152064),
)


@cache
def blocks_of(model: Model, interval: int) -> tuple[Block, ...]:
    config = ZenFlowConfig(update_interval=interval)
    return tuple(build_blocks(classify(model.named(), config)[1], config))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on some GPUs."""

    model: Model
    world: int
    interval: int = 4  # S; 0: forward and backward alone
    host: Host | None = None  # None: the measured one up to two GPUs, then NODE
    shard: int | None = None  # ranks that a model is spread over (HSDP if fewer than all)
    tokens: int = TOKENS  # of a GPU and step
    free: bool = False  # what S is there to hide, host work and copies up, takes no time
    tree_net_s: float = TREE_NET_S

    @property
    def at(self) -> Host:
        return self.host or (MEASURED if self.world < NODE.gpus else NODE)

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return self.model.compute_s * self.tokens / TOKENS

    @property
    def ranks(self) -> int:
        return self.shard or self.world

    @property
    def latency_s(self) -> float:
        """Of an all-gather or reduce-scatter."""
        if self.ranks == 1:
            return 0.0
        between = max(1, self.ranks // NODE.gpus) - 1
        return BASE_S + between * RING_NET_S + (self.ranks - 1 - between) * RING_S

    def transfer_s(self, nbytes: float) -> float:
        """Likewise, for so many bytes in all."""
        return nbytes * (self.ranks - 1) / self.ranks / NVLINK

    def across_s(self, nbytes: float) -> float:
        """With HSDP: the sum of the shards over the nodes, after the reduce-scatter inside each."""
        copies = self.world // self.ranks
        if copies == 1:
            return 0.0
        return 2 * nbytes / self.ranks * (copies - 1) / copies / NIC + TREE_S + 2 * math.log2(copies) * self.tree_net_s

    @property
    def flat_bytes(self) -> int:
        """Of the all-reduce in `step()`: channels that are split over ranks, and two sums for each weight."""
        weights = [weight for block in blocks_of(self.model, 4) for weight in block.weights]
        return 4 * (sum(weight.channels for weight in weights if weight.channel_dim == 1) + 2 * len(weights) + 1)

    @property
    def flat_s(self) -> float:
        if self.ranks == 1:
            return 0.0
        nodes = max(1, self.ranks // NODE.gpus)
        return TREE_S + 2 * math.log2(nodes) * self.tree_net_s + 2 * self.flat_bytes / NVLINK

    @property
    def host_bytes(self) -> float:
        """Memory of a machine."""
        config = ZenFlowConfig(update_interval=self.interval or 4)
        return plan(self.model.named(), config).host / self.ranks * self.at.gpus

    @property
    def device_bytes(self) -> float:
        """Weights and state of selected channels, without gathered layers, activations and staging."""
        config = ZenFlowConfig(update_interval=self.interval or 4)
        return (2 * self.model.parameters + plan(self.model.named(), config).device_state) / self.ranks

    @property
    def fits(self) -> bool:
        return self.host_bytes <= SPARE * self.at.memory and self.device_bytes <= SPARE * 141e9


# The simulation


@dataclass(eq=False, slots=True)
class Op:
    stream: str
    call: int
    work: float  # seconds; bytes of copies; elements of host work
    after: Sequence[Op]
    shares: bool = False  # the network
    begin: float = -1.0
    end: float = -1.0


@dataclass
class Rates:
    """How fast work goes, given what runs beside it."""

    case: Case

    def __call__(self, running: dict[str, Op]) -> dict[str, float]:
        rates = dict.fromkeys(running, 1.0)
        sharing = [name for name, op in running.items() if op.shares]
        rates |= dict.fromkeys(sharing, 1 / max(1, len(sharing)))
        host = self.case.at
        copies = [way for way in ("down", "up") if way in running]
        for way in copies:
            rates[way] = PCIE * (0.5 if host.paired else 1.0) * (BOTH_WAYS if len(copies) == 2 else 1.0)
        if "host" in running:
            left = host.dram / host.gpus - sum(rates[way] for way in copies)
            rates["host"] = 1 / window_s(self.case.interval, host.threads, max(left, 0.1 * host.dram / host.gpus))
        return rates


def window_s(interval: int, threads: int, dram: float) -> float:
    """Replay of an element's window (fp32 moments, bf16 gradients): the threads' limit and the memory's, softly the larger."""
    nbytes = 24 + 2 * interval + 2
    base, step = ARITHMETIC
    harder = max(nbytes / 34, (base + step * interval) / (base + step * 4))
    parts = (THREAD_S * harder / threads, nbytes / dram)
    return sum(part**EXPONENT for part in parts) ** (1 / EXPONENT)


@dataclass
class Step:
    """A step in its steady state, in seconds."""

    seconds: float
    busy: dict[str, float]  # by stream
    ops: list[Op] = field(repr=False, default_factory=list)


def simulate(case: Case) -> Step:
    """The mean of S steps, after S + 2 others."""
    count = max(case.interval, 1)
    first, calls = count + 2, 2 * count + 2
    ops = _ops(case, calls)
    _run(ops, Rates(case))
    ends = [max(op.end for op in ops if op.call == call and op.stream == "compute") for call in (first - 1, calls - 1)]
    busy: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.call >= first:
            busy[op.stream] += (op.end - op.begin) / count
    return Step((ends[1] - ends[0]) / count, dict(busy), ops)


def _run(ops: Sequence[Op], rates: Rates) -> None:
    """Streams take their ops in order; an op begins when it comes first and what it waits for is done."""
    streams: dict[str, deque[Op]] = defaultdict(deque)
    for op in ops:
        streams[op.stream].append(op)
    left = {op: op.work for op in ops}
    now = 0.0
    while any(streams.values()):
        running = {name: queue[0] for name, queue in streams.items() if queue and all(b.end >= 0 for b in queue[0].after)}
        assert running, "ops wait for each other"
        speed = rates(running)
        for op in running.values():
            op.begin = now if op.begin < 0 else op.begin
        pause = min(left[op] / speed[name] for name, op in running.items())
        now += pause
        for name, op in running.items():
            left[op] -= pause * speed[name]
            if left[op] <= 1e-9 * op.work:
                op.end = now
                streams[name].popleft()


def _ops(case: Case, calls: int) -> list[Op]:
    model, ranks = case.model, case.ranks
    ops: list[Op] = []

    def add(stream: str, call: int, work: float, *after: Op | None) -> Op:
        ops.append(Op(stream, call, work, [op for op in after if op is not None]))
        return ops[-1]

    def collective(stream: str, call: int, nbytes: float, *after: Op | None) -> Op:
        add(stream, call, case.latency_s, *after)
        last = add(stream, call, case.transfer_s(nbytes))
        last.shares = ranks > 1
        if stream == "reduce" and (across := case.across_s(nbytes)):
            last = add(stream, call, across)
        return last

    products = model.layers * model.layer + model.head
    forward, backward = FORWARD * case.compute_s / products, (1 - FORWARD) * case.compute_s / products
    layer_bytes, root_bytes = 2 * model.layer, 2 * (model.parameters - model.layers * model.layer)
    interval = max(case.interval, 1)
    blocks: dict[int, list[Block]] = defaultdict(list)  # by layer; -1: the root
    for block in blocks_of(model, interval):
        name = block.weights[0].name  # whose gradient comes last
        blocks[int(name.split(".")[1]) if name.startswith("layers") else -1].append(block)
    order = [block for unit in [*reversed(range(model.layers)), -1] for block in blocks[unit]]
    copied = 0.0 if case.free else 1.0
    splits = "compute" if ranks == 1 else "reduce"
    step: Op | None = None
    staged: deque[tuple[Op, float]] = deque()  # copies down that may still hold staging memory
    due: list[Op] = []
    beside: Op | None = None  # the last of the call before

    def stage(block: Block, call: int, ready: Op | None) -> Op:
        """The kernels and copies of a block's gradients. Later pieces run beside computation. Returns the last copy."""
        nbytes = 2 * block.deferred_numel / ranks
        pieces = max(1, math.ceil(nbytes / piece_bytes()))
        for piece in range(pieces):
            staged_bytes, freed = nbytes / pieces, None
            for copy, size in reversed(staged):
                staged_bytes += size
                if staged_bytes > STAGING_BYTES:
                    freed = copy
                    break
            seconds = (KERNELS_S - ADAMW_S) * block.whole_numel / ranks / pieces
            ready = add("beside" if piece else splits, call, seconds, ready, freed)
            staged.append((add("down", call, nbytes / pieces, ready), nbytes / pieces))
            if len(staged) > 64:
                staged.popleft()
        return staged[-1][0]

    for call in range(calls):
        # Forward, the next unit's weights gathered meanwhile. The root's stay gathered for backward.
        done: list[Op | None] = [step, collective("gather", call, root_bytes, step)]
        for _ in range(model.layers):
            weights = collective("gather", call, layer_bytes, done[-2])
            done.append(add("compute", call, forward * model.layer, weights, done[-1]))
        done.append(add("compute", call, (forward + backward) * model.head, done[-1]))
        down: dict[Block, Op] = {}
        if ranks == 1 and case.interval:  # without fully_shard, a head of its own does not wait for the embedding
            down |= {block: stage(block, call, done[-1]) for block in blocks[-1] if block.weights[0].name.startswith("lm_head")}
        for layer in reversed(range(model.layers)):
            weights = collective("gather", call, layer_bytes, done[-2])
            # fully_shard reduces a layer as a whole; on one GPU its blocks are ready one after the other.
            parts = [[block] for block in reversed(blocks[layer])] if ranks == 1 else []
            for part in parts or [blocks[layer]]:
                last = add("compute", call, backward * model.layer / max(1, len(parts)), weights)
                done.append(last)
                last = collective("reduce", call, layer_bytes, last)
                if case.interval:
                    down |= {block: stage(block, call, last) for block in part}
        last = collective("reduce", call, root_bytes, done[-1])
        if case.interval:
            down |= {block: stage(block, call, last) for block in blocks[-1] if block not in down}
        # step(): norms and scores over all ranks; what is due; AdamW of selected channels; windows close.
        last = next(op for op in reversed(ops) if op.stream == splits)
        step = add("compute", call, case.flat_s if case.interval else 0.0, last, beside)
        beside = next((op for op in reversed(ops) if op.stream == "beside"), None)
        if case.interval:
            judged = step
            add("compute", call, 0.0, *due)
            step = add("compute", call, ADAMW_S * model.parameters / ranks)
            due = []
            for block in order:
                if call % interval == block.phase % interval:
                    elements = block.deferred_numel / ranks
                    replay = add("host", call, copied * elements, down[block], judged)
                    due.append(add("up", call, copied * 2 * elements, replay))
    return ops


# The report


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
    """The model against what was measured on one GPU."""
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
    return "\n".join(lines)


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
    parts = ["```\npython " + " ".join(sys.argv) + "\n```", f"{datetime.date.today()}, torch {torch.__version__}; no GPU."]
    parts += ["## Against one GPU", check(), "## Times per step, ms", table(rows)]
    parts += ["## Bytes of the collective", traffic(), "## What assumptions are worth", variants()]
    report = "\n\n".join(parts) + "\n"
    print(report)
    if args.output:
        args.output.write_text(report, encoding="utf-8")
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
