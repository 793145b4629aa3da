"""Whether anything orders what happens to the same bytes, or it is a race.

Everything is done at once, as the launching thread asks for it. So results are right even where a wait is missing, and what
would run at the same time on a device is found by vector clocks. There are actors: the launching thread, streams, and the
host. Each counts what it has done, and knows how far it is behind each of the others: it learns that where it waits for a
timeline or an event, and from the launching thread where it is given something to do. Two accesses to the same bytes, one of
which writes, are a race unless the actor of the second one knows of the first.

Accesses are those of torch's operations, which all pass through here. What the launching thread does to a device's memory it
gives to the computing stream to do; what it reads of it, it waits for.
"""

from __future__ import annotations

import random
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stallfree.engine.streams import Point

LAUNCHING, COMPUTING, HOST = "the launching thread", "the computing stream", "the host"
COPIES = ("the stream down", "the stream up", "the stream beside", "the stream that shows")
MODULO, HALF = 1 << 32, 1 << 31  # of counts
Clock = dict[str, int]  # by actor: how much of what it has done is known to be over


@dataclass(frozen=True)
class Access:
    actor: str
    time: int  # by the actor's own clock
    begin: int
    end: int
    writes: bool
    what: str


@dataclass
class Memory:
    name: str
    begin: int
    end: int
    on_device: bool
    accesses: list[Access] = field(default_factory=list)


class Orders:
    """Clocks, and the memory that is watched."""

    def __init__(self, seed: int, first_count: int = 0) -> None:
        """first_count: of all timelines."""
        self.first_count = first_count % MODULO
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)
        self.raised: defaultdict[int, list[tuple[int, Clock]]] = defaultdict(list)  # by timeline: count, and when
        self.memories: list[Memory] = []
        self._held: list[Tensor] = []  # addresses are used once
        self.current = COMPUTING  # the stream that forward or backward runs on
        self.actor: str | None = None  # who does what comes next, whatever memory it is in
        self.observed = 0.0  # how often the launching thread sees that something is over without waiting for it
        self.random = random.Random(seed)
        self.waits: set[str] = set()  # where in the code streams are told to wait
        self.without = ""  # the place whose waits are left out
        self.holds: defaultdict[int, set[str]] = defaultdict(set)  # by address of memory: the streams that hold it
        self._free: defaultdict[str, list[tuple[Tensor, list[Clock]]]] = defaultdict(list)  # memory, and until when it is held
        self.races: list[str] = []  # accesses that nothing orders, and waits for what nobody will do

    # Memory

    def watch(self, tensor: Tensor, name: str, on_device: bool) -> None:
        begin, end = extent(tensor)
        if begin < end and self.find(begin, end) is None:
            self.memories.append(Memory(name, begin, end, on_device))
            self._held.append(tensor)

    def memory(self, like: Tensor, stream: str) -> Tensor:
        """A stream's, uninitialized."""
        self.reuse(stream)
        whole = numpy.empty(like.nbytes, dtype=numpy.uint8)
        given = whole[:]  # lives as long as a tensor's storage
        self._held.append(torch.from_numpy(whole))
        self.watch(self._held[-1], f"memory of {like.dtype} {tuple(like.shape)}", on_device=True)
        weakref.finalize(given, self.free, self._held[-1], stream)
        return torch.from_numpy(given).view(like.dtype).view(like.shape)

    def free(self, memory: Tensor, stream: str) -> None:
        """Nobody refers to a stream's memory any more. Streams hold it until they have done what they were told so far."""
        self._free[stream].append((memory, [self.moment(other) for other in self.holds.pop(memory.data_ptr(), ())]))

    def reuse(self, stream: str) -> None:
        """A stream uses the memory that it has back for something else, as soon as those who hold it allow."""
        for memory, clocks in self._free.pop(stream, ()):
            for clock in clocks:
                self.learn(stream, clock)
            self.access(stream, memory, writes=True, what="other work, once it is free,")

    def find(self, begin: int, end: int) -> Memory | None:
        return next((memory for memory in self.memories if memory.begin <= begin and end <= memory.end), None)

    def access(self, actor: str, tensor: Tensor, writes: bool, what: str) -> None:
        begin, end = extent(tensor)
        memory = self.find(begin, end) if begin < end else None
        if memory is None:
            return
        time, clock, kept = self.tick(actor), self.clocks[actor], []
        for earlier in memory.accesses:
            if earlier.begin < end and begin < earlier.end:
                known = earlier.actor == actor or clock.get(earlier.actor, 0) >= earlier.time
                if not known and (writes or earlier.writes):
                    both = ((begin, end), (earlier.begin, earlier.end))
                    ours, theirs = (f"bytes {low - memory.begin} to {high - memory.begin}" for low, high in both)
                    self.races.append(
                        f"{memory.name}: {actor} does {what}, {ours}, beside {earlier.what} of {earlier.actor}, {theirs}"
                    )
                covered = begin <= earlier.begin and earlier.end <= end
                if known and covered and (writes or (earlier.actor == actor and not earlier.writes)):
                    continue  # whoever is behind this access is behind that one
            kept.append(earlier)
        memory.accesses = [*kept, Access(actor, time, begin, end, writes, what)]

    # Clocks

    def tick(self, actor: str) -> int:
        """Something that the launching thread lets an actor do."""
        if actor != LAUNCHING:
            self.learn(actor, self.clocks[LAUNCHING])
        clock = self.clocks[actor]
        clock[actor] = clock.get(actor, 0) + 1
        return clock[actor]

    def learn(self, actor: str, clock: Clock) -> None:
        mine = self.clocks[actor]
        for other, time in clock.items():
            mine[other] = max(mine.get(other, 0), time)

    def moment(self, actor: str) -> Clock:
        self.tick(actor)
        return dict(self.clocks[actor])

    def raise_to(self, actor: str, address: int, value: int) -> None:
        counts = self.raised[address]
        last = counts[-1][0] if counts else self.first_count
        if not reached(value, last):
            self.races.append(f"{actor} sets a count from {last} back to {value}")
        counts.append((value, self.moment(actor)))

    def when(self, address: int, value: int) -> Clock | None:
        """What is over when a count is reached; None if nobody has been told to raise it so far."""
        if reached(self.first_count, value):
            return {}
        return next((clock for count, clock in self.raised[address] if reached(count, value)), None)

    def wait_for(self, actor: str, address: int, value: int) -> None:
        clock = self.when(address, value)
        self.tick(actor)
        if clock is None:
            self.races.append(f"{actor} waits for a count that nobody has been told to raise yet")
        else:
            self.learn(actor, clock)

    def passed(self, point: Point) -> bool:
        """Whether the launching thread knows, or happens to see, that a moment is over."""
        clock = self.when(point.timeline.address, point.value)
        if clock is None:
            return False
        mine = self.clocks[LAUNCHING]
        if any(mine.get(actor, 0) < time for actor, time in clock.items()):
            if self.random.random() >= self.observed:
                return False
            self.learn(LAUNCHING, clock)
        return True

    @contextmanager
    def acting(self, actor: str | None) -> Iterator[None]:
        before, self.actor = self.actor, actor
        try:
            yield
        finally:
            self.actor = before


def reached(count: int, value: int) -> bool:
    return (count - value) % MODULO < HALF


def extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes between a tensor's first and last element."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


class Watch(TorchDispatchMode):
    """Tells of every operation on watched memory."""

    def __init__(self, orders: Orders) -> None:
        super().__init__()
        self.orders = orders

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors_in((args, kwargs))):
            return NotImplemented  # a handle's own operations come here in turn
        name = func._schema.name.removeprefix("aten::")
        views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        if not views and not name.endswith("_like") and not name.startswith("new_"):  # which read no numbers
            self._tell(func._schema.arguments, name, args, kwargs)
        return func(*args, **kwargs)

    def _tell(self, arguments: Sequence[Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        orders, reads = self.orders, False
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        for argument in arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(given.get(argument.name)):
                memory = orders.find(*extent(tensor))
                if memory is not None:
                    stream = orders.actor or (orders.current if memory.on_device else LAUNCHING)
                    orders.access(stream, tensor, writes, name)
                    reads = reads or (memory.on_device and not writes)
        if reads and name in ("_local_scalar_dense", "_to_copy") and orders.actor is None:
            orders.learn(LAUNCHING, orders.moment(orders.current))  # it may be a copy to the host


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for one in value for tensor in tensors_in(one)]
