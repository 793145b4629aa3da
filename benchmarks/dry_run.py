"""What a step waits for, without a GPU: python -m benchmarks.dry_run 7B --step-ms 670 --host-ms 488

The engine itself trains a model of some shape in miniature, on streams that only write down what it gives them to do: kernels,
copies, and who waits for whom. A model of the machine says afterwards when each of these would begin and end. So every order,
wait and piece is the engine's own; only durations are assumed, in proportion to the bytes of the shape in full size.

Forward and backward take `--step-ms` of the computing stream, by matrix products; the launching thread takes no time, and is
always ahead. Host work takes `--host-ms` of each step; by default what the measured cost model says. There is no selection.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.scaling.cases import ADAMW_S, BOTH_WAYS, DRAM, FORWARD, KERNELS_S, MODELS, PCIE, THREADS, Model
from benchmarks.scaling.simulation import window_s
from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine import pipeline, ring, window
from stallfree.engine.device_link import DeviceLink
from stallfree.engine.streams import Point, Timeline
from stallfree.kernels.torch_block import TorchBlock

SMALLER = 16  # in each direction: matrices have 256 times fewer elements, and what passes through staging memory likewise
COMPUTE, HOST = "compute", "host"
BLOCK_NUMEL = ZenFlowConfig().block_numel


@dataclass(eq=False, slots=True)
class Op:
    """Something for a stream to do."""

    kind: str  # kernel, copy, host; raise, wait: a moment on a timeline; record, event: one on a stream; end: of a call
    call: int
    work: float = 0.0  # seconds of kernels and host work, bytes of copies
    of: Any = None  # of waits and raises: timeline and count; of events: the op that they wait for
    begin: float = -1.0
    end: float = -1.0


class Recorder:
    """In the place of `Streams`: writes everything down."""

    to_host, to_device, beside, showing = "down", "up", "beside", "showing"

    def __init__(self, scale: float) -> None:
        """scale: bytes that a byte stands for."""
        self.scale, self.call = scale, 0
        self.ops: dict[str, list[Op]] = {name: [] for name in (COMPUTE, "down", "up", "beside", "showing", HOST)}
        self._on = COMPUTE

    def add(self, stream: str | None, kind: str, work: float = 0.0, of: Any = None) -> Op:
        self.ops[stream or COMPUTE].append(Op(kind, self.call, work, of))
        return self.ops[stream or COMPUTE][-1]

    def kernel(self, seconds: float) -> None:
        self.add(self._on, "kernel", seconds)

    @contextmanager
    def on(self, stream: str | None) -> Iterator[None]:
        before, self._on = self._on, stream or COMPUTE
        yield
        self._on = before

    def enqueue(self, *tasks: tuple[str | None, str, float, Any]) -> None:
        for task in tasks:
            self.add(*task)

    def copy(self, target: Tensor, source: Tensor, stream: str) -> tuple[str, str, float, Any]:
        return stream, "copy", source.nbytes * self.scale, None

    def raise_to(self, stream: str | None, point: Point) -> tuple[str | None, str, float, Any]:
        return stream, "raise", 0.0, (point.timeline.address, point.value)

    def wait_for(self, stream: str | None, point: Point) -> tuple[str | None, str, float, Any]:
        return stream, "wait", 0.0, (point.timeline.address, point.value)

    def record(self, stream: str | None) -> Any:
        return Moment(self.add(stream, "record"))

    def wait(self, stream: str | None, moment: Moment) -> None:
        self.add(stream, "event", of=moment.op)

    def current(self) -> None:
        return None

    def current_handle(self) -> int:
        return 0

    def device_guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def nothing(self, *_: object) -> None:
        pass

    hold = register = unregister = synchronize = nothing


@dataclass
class Moment:
    """In the place of a stream's event."""

    op: Op

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class Kernels(TorchBlock):
    """Gradients are not taken apart, and nothing is published: that takes its time."""

    recorder: Recorder

    def split(self, layout: Any, targets: Any, grads: Any, squares: Any, selected: Any, deferred: Tensor, low: int = 0) -> None:
        numel = deferred.numel() / layout.deferred_numel * sum(segment.numel for segment in layout.segments)
        self.recorder.kernel((KERNELS_S - ADAMW_S) * numel * self.recorder.scale)

    def publish(self, layout: Any, targets: Any, weights: Any, values: Tensor, low: int = 0) -> None:
        self.recorder.kernel(1e-12 * values.nbytes * self.recorder.scale)  # read once and written once, at 2 TB/s


class Unit(torch.autograd.Function):
    """A part of the model: its gradients are there after some seconds of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorder: Recorder, seconds: float, backward_seconds: float, *params: Tensor) -> Tensor:
        ctx.recorder, ctx.seconds = recorder, backward_seconds
        ctx.shapes = [param.shape for param in params]
        recorder.kernel(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.recorder.kernel(ctx.seconds)
        return grads[0], None, None, None, *(torch.zeros(shape, dtype=torch.bfloat16) for shape in ctx.shapes)


@dataclass
class Run:
    """What was written down of some calls, and after `play` when it ran."""

    recorder: Recorder
    host_s: float  # of an element of a window
    causes: dict[int, str]  # what the computing stream waits for, by the address of a timeline
    bandwidth: float = PCIE
    waits: list[dict[str, float]] = field(default_factory=list)  # seconds of the computing stream, by call and cause
    seconds: list[float] = field(default_factory=list)  # by call

    def play(self) -> None:
        """Streams take their ops in order; an op begins when it comes first and what it waits for is done."""
        queues = {name: deque(ops) for name, ops in self.recorder.ops.items()}
        left = {op: op.work for ops in queues.values() for op in ops}
        raised: dict[int, int] = defaultdict(int)
        now = 0.0
        while True:
            while sum(self._pass(queue, now, raised) for queue in queues.values()):
                pass
            running = {name: queue[0] for name, queue in queues.items() if queue and queue[0].work}
            if not running:
                break
            ways = [name for name, op in running.items() if op.kind == "copy"]
            rates = dict.fromkeys(running, 1.0)
            rates |= dict.fromkeys(ways, self.bandwidth * (BOTH_WAYS if len(ways) > 1 else 1.0))
            pause = min(left[op] / rates[name] for name, op in running.items())
            now += pause
            for name, op in running.items():
                left[op] -= pause * rates[name]
                if left[op] <= 1e-9 * op.work:
                    op.end = now
                    queues[name].popleft()
        assert not any(queues.values()), "streams wait for each other"
        self._read()

    def _pass(self, queue: deque[Op], now: float, raised: dict[int, int]) -> int:
        """What takes no time, up to the next op that does. How many there were."""
        count = len(queue)
        while queue:
            op = queue[0]
            op.begin = now if op.begin < 0 else op.begin
            if op.kind == "raise":
                raised[op.of[0]] = op.of[1]
            elif (
                (op.kind == "wait" and raised[op.of[0]] < op.of[1])
                or (op.kind == "event" and op.of.end < 0)
                or (op.kind in ("kernel", "copy", "host") and op.work)
            ):
                break
            op.end = now
            queue.popleft()
        return count - len(queue)

    def _read(self) -> None:
        ends = [0.0, *(op.end for op in self.recorder.ops[COMPUTE] if op.kind == "end")]
        self.seconds = [end - begin for begin, end in pairwise(ends)]
        self.waits = [defaultdict(float) for _ in self.seconds]
        for op in self.recorder.ops[COMPUTE]:
            if op.kind in ("wait", "event") and op.end > op.begin:
                cause = "other streams" if op.kind == "event" else self.causes.get(op.of[0], "other streams")
                self.waits[op.call][cause] += op.end - op.begin


def record(model: Model, config: ZenFlowConfig, step_s: float, host_s: float, calls: int) -> Run:
    """Train a model in miniature. step_s: forward and backward; host_s: host work in each step."""
    named = {
        name: nn.Parameter(torch.zeros([size // SMALLER for size in param.shape], dtype=torch.bfloat16))
        for name, param in model.named()
    }
    smaller = SMALLER * SMALLER
    scale = model.parameters / sum(param.numel() for param in named.values())
    recorder, kernels = Recorder(scale), Kernels()
    kernels.recorder = recorder
    config = config.replace(block_numel=max(1, config.block_numel // smaller), min_numel=1)
    with ExitStack() as stack:
        for place, name, value in (
            (pipeline, "block_kernel", lambda device: kernels),
            (pipeline, "link_to", lambda device: DeviceLink(device, recorder)),  # type: ignore[arg-type]
            (ring, "STAGING_BYTES", ring.STAGING_BYTES // smaller),
            (window, "LEAST_PORTION", max(1, window.LEAST_PORTION // smaller)),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        optimizer = ZenFlowAdamW(named.items(), lr=1e-5, config=config)
        engine, link = optimizer.engine, optimizer.engine.link
        assert isinstance(link, DeviceLink)
        deferred = sum(state.block.deferred_numel for state in engine.blocks) * scale
        run = Run(recorder, host_s * int(config.update_interval) / deferred, _causes(link))
        for name, value in _host(run, link.host).items():
            stack.enter_context(mock.patch.object(engine.worker, name, value))
        stack.enter_context(mock.patch.object(engine.tuner, "after_call", recorder.nothing))
        units, x = list(_units(model, named, step_s)), torch.zeros(1, requires_grad=True)
        for recorder.call in range(calls):
            y = x
            for forward, backward, params in units:
                y = Unit.apply(y, recorder, forward, backward, *params)
            y.sum().backward()
            recorder.kernel(ADAMW_S * model.parameters)
            optimizer.step()
            recorder.add(COMPUTE, "end")
            optimizer.zero_grad()
    return run


def _causes(link: DeviceLink) -> dict[int, str]:
    timelines = {"staging memory": link._came_down, "what is published in backward": link._shown, "the rest": link._went_up}
    return {timeline.address: cause for cause, timeline in timelines.items()}


def _host(run: Run, done: Timeline) -> dict[str, Any]:
    """In the place of a `HostWorker`'s methods: windows are written down, in the order in which they are given."""
    recorder = run.recorder

    def submit(works: Sequence[Any]) -> list[Point]:
        points = []
        for work in works:
            for gate in work.gates:
                recorder.add(HOST, "wait", of=(gate.address, gate.value))
            begin, end = work.span or (0, work.calls[0].memory.numel())
            recorder.add(HOST, "host", run.host_s * (end - begin) * recorder.scale)
            points.append(done.next())
            recorder.add(HOST, "raise", of=(done.address, points[-1].value))
        return points

    return {"submit": submit, "wait": recorder.nothing, "keep_pace": recorder.nothing}


def _units(model: Model, named: dict[str, nn.Parameter], step_s: float) -> Iterator[tuple[float, float, list[nn.Parameter]]]:
    """Seconds forward and backward, and the parameters: in the order of forward."""
    products = model.layers * model.layer + model.head
    embedding = [named["embed_tokens.weight"]]
    yield 0.0, 0.0, embedding
    for layer in range(model.layers):
        inside = {name: param for name, param in named.items() if name.startswith(f"layers.{layer}.")}
        numel = sum(param.numel() for param in inside.values())
        for part in (["q", "k", "v", "o"], ["gate", "up"], ["down"]):
            params = [param for name, param in inside.items() if name.split(".")[2].removesuffix("_proj") in part]
            share = step_s * model.layer / products * sum(param.numel() for param in params) / numel
            yield FORWARD * share, (1 - FORWARD) * share, params
    head = step_s * model.head / products
    yield FORWARD * head, (1 - FORWARD) * head, embedding if model.tied else [named["lm_head.weight"]]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[model.name for model in MODELS])
    parser.add_argument("--interval", type=int, default=4, help="S")
    parser.add_argument("--moments", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--step-ms", type=float, help="forward and backward (as measured, or assumed, for 8 × 1024 tokens)")
    parser.add_argument("--host-ms", type=float, help="host work of a step (the cost model's)")
    parser.add_argument("--bandwidth", type=float, default=PCIE / 1e9, help="GB/s of the bus, each way (%(default)s)")
    parser.add_argument("--select-interval", type=int, metavar="CALLS", help="with selections (none but the first)")
    parser.add_argument("--calls", type=int, default=20)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Run:
    model = next(model for model in MODELS if model.name == options.model)
    config = ZenFlowConfig(
        update_interval=options.interval,
        max_update_interval=options.interval,
        moments_dtype=options.moments,
        full_warm_up_rounds=1,
        select_interval=options.select_interval or 10**6,
        block_numel=BLOCK_NUMEL,
    )
    host_s = window_s(options.interval, THREADS, DRAM) * 0.9 * model.parameters / options.interval
    run = record(
        model,
        config,
        model.compute_s if options.step_ms is None else options.step_ms / 1e3,
        host_s if options.host_ms is None else options.host_ms / 1e3,
        options.calls,
    )
    run.bandwidth = options.bandwidth * 1e9
    run.play()
    return run


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    run, count = measure(options), options.interval
    print(f"{options.model}, S={count}: the last {count} of {options.calls} calls, ms")
    for call in range(options.calls - count, options.calls):
        waits = ", ".join(f"{1e3 * seconds:.1f} for {cause}" for cause, seconds in sorted(run.waits[call].items()))
        print(f"  {1e3 * run.seconds[call]:7.1f}, waiting {waits or 'for nothing'}")
    print(f"  {1e3 * sum(run.seconds[-count:]) / count:7.1f} on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())
