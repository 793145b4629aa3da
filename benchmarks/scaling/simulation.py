"""A discrete-event simulation of one rank's steps.

compute    forward, backward; on one GPU also the kernels that take gradients apart; AdamW of selected channels in `step()`
beside     those kernels for later pieces of large blocks
gather     all-gathers of weights, one unit ahead            reduce   reduce-scatters; the kernels that take gradients apart
down, up   copies of deferred gradients and of published weights
host       replay of the windows that closed, in the order in which backward finishes the blocks
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.scaling.cases import (
    ADAMW_S,
    ARITHMETIC,
    BOTH_WAYS,
    EXPONENT,
    FORWARD,
    KERNELS_S,
    PCIE,
    THREAD_S,
    Case,
    blocks_of,
)
from stallfree.engine.blocks import Block
from stallfree.engine.calls import CALLS, Mark
from stallfree.engine.pace import Pace
from stallfree.engine.ring import STAGING_BYTES, piece_bytes
from stallfree.kernels.block import FIRST


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
    host: list[float]  # busy in each of S calls
    ops: list[Op] = field(repr=False, default_factory=list)


def simulate(case: Case) -> Step:
    """The mean of S steps, after S + 2 others."""
    count = max(case.interval, 1)
    first, calls = count + 2, 2 * count + 2
    ops = _ops(case, calls)
    _run(ops, Rates(case))
    ends = [max(op.end for op in ops if op.call == call and op.stream == "compute") for call in (first - 1, calls - 1)]
    busy: dict[str, float] = defaultdict(float)
    host = [0.0] * count
    for op in ops:
        if op.call >= first:
            busy[op.stream] += (op.end - op.begin) / count
            host[op.call - first] += (op.end - op.begin) * (op.stream == "host")
    return Step((ends[1] - ends[0]) / count, dict(busy), host, ops)


def paced(case: Case) -> Case:
    """With as many of the host's threads as the engine leaves it in the end: all that a call does not need are taken away."""
    pace, now, steps = Pace(case.at.threads), Mark(0.0, 0.0, 0.0), {}
    for call in range(8 * CALLS):
        if pace.threads not in steps:
            steps[pace.threads] = simulate(_with(case, pace.threads))
        step = steps[pace.threads]
        busy = step.host[call % len(step.host)]
        now = Mark(now.seconds + step.seconds, now.busy + busy, 0.0)
        pace.after_call(now, case.interval)
    return _with(case, pace.threads)


def _with(case: Case, threads: int) -> Case:
    return replace(case, host=replace(case.at, threads=threads))


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
        """The kernels and copies of a block's gradients. Returns the last copy.

        Where staging memory does not hold the block whole, the first piece is small, and the others run beside computation.
        """
        nbytes = 2 * block.deferred_numel / ranks
        large = nbytes > STAGING_BYTES
        first = [piece_bytes() / FIRST] if large else []
        count = max(1, math.ceil((nbytes - sum(first)) / piece_bytes()))
        for piece, size in enumerate([*first, *[(nbytes - sum(first)) / count] * count]):
            staged_bytes, freed = size, None
            for copy, other in reversed(staged):
                staged_bytes += other
                if staged_bytes > STAGING_BYTES:
                    freed = copy
                    break
            seconds = (KERNELS_S - ADAMW_S) * block.whole_numel / ranks * size / nbytes
            ready = add("beside" if piece and large else splits, call, seconds, ready, freed)
            staged.append((add("down", call, size, ready), size))
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
