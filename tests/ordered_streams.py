"""A GPU's path on the CPU, with streams that tell `Orders` what happens, and when."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from orders import COMPUTING, COPIES, HOST, LAUNCHING, MODULO, Clock, Orders
from torch import Tensor

from stallfree import ZenFlowAdamW
from stallfree.engine import device, pipeline, ring
from stallfree.engine.device_link import DeviceLink
from stallfree.engine.host import HostWorker
from stallfree.engine.streams import Point
from stallfree.engine.transfer import Link
from stallfree.kernels.block import Targets, block_targets
from stallfree.kernels.torch_block import TorchBlock, TorchUpdate
from stallfree.kernels.torch_judging import TorchJudging


@dataclass
class Event:
    orders: Orders
    clock: Clock

    def synchronize(self) -> None:
        self.orders.learn(LAUNCHING, self.clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Streams:
    """See stallfree.engine.streams.Streams."""

    to_host, to_device, beside, showing = COPIES

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    def device_guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def current(self) -> str:
        return self.orders.current

    def current_handle(self) -> int:
        return hash(self.orders.current)

    def record(self, stream: str) -> Event:
        return Event(self.orders, self.orders.moment(stream))

    def wait(self, stream: str, event: Event) -> None:
        self.orders.tick(stream)
        if self._stands():
            self.orders.learn(stream, event.clock)

    def _stands(self) -> bool:
        """Whether a wait is not to be left out."""
        frame = sys._getframe(2)
        while (name := frame.f_code.co_qualname.partition(".<locals>")[0]).rpartition(".")[2] in ("_wait", "_stall", "staging"):
            assert frame.f_back is not None
            frame = frame.f_back
        self.orders.waits.add(name)
        return name != self.orders.without

    def on(self, stream: str) -> AbstractContextManager[None]:
        return self.orders.acting(stream)

    def hold(self, tensor: Tensor, stream: str) -> None:
        self.orders.holds[tensor.untyped_storage().data_ptr()].add(stream)

    def enqueue(self, *tasks: Callable[[], None]) -> None:
        for task in tasks:
            task()

    def copy(self, target: Tensor, source: Tensor, stream: str) -> Callable[[], None]:
        assert target.nbytes == source.nbytes

        def copy() -> None:
            with self.orders.acting(stream):
                target.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8))

        return copy

    def raise_to(self, stream: str, point: Point) -> Callable[[], None]:
        def raise_() -> None:
            self.orders.raise_to(stream, point.timeline.address, point.value)
            point.timeline._word.value = point.value

        return raise_

    def wait_for(self, stream: str, point: Point) -> Callable[[], None]:
        stands = self._stands()
        return lambda: self.orders.wait_for(stream, point.timeline.address, point.value) if stands else None

    def register(self, memory: Tensor) -> None:
        self.orders.watch(memory, "host memory", on_device=False)

    def unregister(self, memory: Tensor) -> None:
        pass

    def synchronize(self, stream: str | None = None) -> None:
        for one in (self.orders.current, *COPIES) if stream is None else (stream,):
            self.orders.learn(LAUNCHING, self.orders.moment(one))


class LinkInOrder(DeviceLink):
    """Memory for selected gradients is the same whenever it is taken, as an allocator might do, and was in use until then; what
    is copied to a device is not where it was."""

    def __init__(self, device: torch.device, orders: Orders) -> None:
        self.orders = orders
        super().__init__(device, Streams(orders))
        for line in (self.host, self._computed, self._came_down, self._went_up, self._beside, self._shown):
            line.value = line._word.value = orders.first_count
        self._joined = self._shown.now()
        self._carried = self._called = self._computed.now()
        self.selected: Tensor | None = None

    def hold(self, tensors: Sequence[Tensor | None], shared: bool) -> None:
        super().hold(tensors, shared)
        if any(tensor is self.selected for tensor in tensors if tensor is not None):  # and is free now
            self.orders.free(self.selected, COMPUTING)

    def to_device(self, source: Tensor) -> Tensor:
        return super().to_device(source.clone())


def _take(self: LinkInOrder, nbytes: int) -> Tensor:
    if self.selected is None or self.selected.numel() < nbytes:
        self.selected = torch.empty(nbytes, dtype=torch.uint8)
        self.orders.watch(self.selected, "memory for selected gradients", on_device=True)
    self.orders.access(COMPUTING, self.selected, writes=True, what="other work, until it is taken,")
    return self.selected


class Kernel(TorchBlock):
    """Runs on the stream that launches go to; torch does not see what it writes."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    def launched(self) -> AbstractContextManager[None]:
        return self.orders.acting(self.orders.actor or self.orders.current)

    def split(self, *args: Any) -> None:
        with self.launched():
            super().split(*args)

    def publish(self, layout: Any, targets: Any, weights: Any, *args: Any) -> None:
        with self.launched():
            super().publish(layout, targets, [None if weight is None else weight.data for weight in weights], *args)

    def judging(self, evidence: Any, policy: Any) -> Any:
        kernel = self

        class Judging(TorchJudging):
            def judge(self, *args: Any, **named: Any) -> None:
                with kernel.launched():
                    super().judge(*args, **named)

        return Judging(evidence, policy)

    def plan(self, parts: Any) -> Any:
        kernel = self

        class Update(TorchUpdate):
            def step(self, *args: Any) -> None:
                with kernel.launched():
                    super().step(*args)

        return Update(parts)


def use(monkeypatch, orders: Orders, staging_bytes: int) -> None:
    """Let a new optimizer take a GPU's path, with so much staging memory; `watch` it, and train within `Watch(orders)`."""
    submit, wait, run = HostWorker.submit, HostWorker.wait, HostWorker.run

    def submit_one_by_one(self: HostWorker, works: Sequence[Any]) -> list[Point]:
        points: list[Point] = []
        for work in works:
            for gate in work.gates:
                orders.wait_for(HOST, gate.address, gate.value % MODULO)
            orders.tick(HOST)
            with orders.acting(HOST):
                points += submit(self, [work])
            orders.raise_to(HOST, points[-1].timeline.address, points[-1].value)
        return points

    def wait_for_host(self: HostWorker, point: Point) -> None:
        wait(self, point)
        orders.learn(LAUNCHING, orders.when(point.timeline.address, point.value) or {})

    def run_at_once(self: HostWorker, job: Any, name: str) -> None:
        orders.learn(LAUNCHING, orders.clocks[HOST])
        run(self, job, name)

    def targets_of(*args: Any) -> Targets:
        made = block_targets(*args)
        moved = Targets(*(orders.memory(tensor, COMPUTING) for tensor in made))
        for ours, theirs in zip(moved, made, strict=True):
            ours.copy_(theirs)
        return moved

    monkeypatch.setattr(device, "block_targets", targets_of)
    monkeypatch.setattr(HostWorker, "submit", submit_one_by_one)
    monkeypatch.setattr(HostWorker, "wait", wait_for_host)
    monkeypatch.setattr(HostWorker, "run", run_at_once)
    monkeypatch.setattr(Point, "passed", property(orders.passed))
    monkeypatch.setattr(Link, "take", _take)
    monkeypatch.setattr(ring, "STAGING_BYTES", staging_bytes)
    monkeypatch.setattr(pipeline, "block_kernel", lambda device: Kernel(orders))
    monkeypatch.setattr(pipeline, "link_to", lambda device: LinkInOrder(device, orders))


def watch(optimizer: ZenFlowAdamW, orders: Orders) -> None:
    """All memory of an optimizer that more than one actor may reach."""
    engine = optimizer.engine
    link = engine.link
    assert isinstance(link, LinkInOrder)
    for name, memory in (("down", link._down_ring._memory), ("up", link._up_ring._memory)):
        orders.watch(memory, f"staging memory on the way {name}", on_device=True)
    orders.watch(engine.channels.squares, "squares", on_device=True)
    for block in engine.blocks:
        orders.watch(block.half.memory, f"device state of {block.names}", on_device=True)
        orders.watch(block.half.numbers, f"numbers of {block.names}", on_device=True)
        if block.exchange is not None:
            orders.watch(block.exchange.selected, f"the host's selection of {block.names}", on_device=False)
        for state in block.weights:
            weight = state.weight
            orders.watch(weight.shard.detach(), weight.name, on_device=True)
            for part in ("master", "exp_avg", "exp_avg_sq", "steps", "deferred"):
                orders.watch(getattr(state.host, part), f"{part} of {weight.name}", on_device=False)
