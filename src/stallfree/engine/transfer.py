"""Copies between slots in host memory and the device.

On the CPU (`Link`) the two are the same memory, and waiting for the host is waiting. On a GPU (`DeviceLink`) the launching
thread never waits. Each direction has a stream; gradients pass through a bounded ring of device memory on their way down,
weights on their way up, both in pieces where a block is large. The device itself waits for host work, and host work for the
device, on timelines. Everything that a wait depends on is enqueued before it, so that no two waits can wait for each other.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from stallfree.engine.blocks import Block
from stallfree.engine.memory import host_memory
from stallfree.engine.ring import Ring, Share, piece_bytes, ring_bytes
from stallfree.engine.stalls import Stalls
from stallfree.engine.streams import Point, Stream, Streams, Timeline
from stallfree.kernels.queue import HostError
from stallfree.kernels.windows import Gate

LINE = 16  # int32 words of a cache line: each timeline has one of its own


@dataclass(frozen=True, slots=True)
class Arrival:
    """A copy on its way up."""

    share: Share
    point: Point

    def forget(self) -> None:
        """Nobody will use it."""
        self.share.used = self.point


class Link:
    """Moves rows down to the host and up to the device, and counts the bytes where the copies are issued.

    This one is for parameters in host memory: what goes down is there at once, and the launching thread waits for host work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_down = self.bytes_up = 0
        self.staging_nbytes = 0  # of device memory
        self.delay: Callable[[str], float] | None = None  # seconds to lose at a copy
        self.stalls, self.crowding = Stalls(), Stalls()  # for what comes up, and for staging memory on the way down
        self.host = Timeline(torch.zeros(1, dtype=torch.int32, device="cpu"), 0)  # windows done
        self.wait_for_host: Callable[[Point], None] = lambda point: None  # lets the launching thread wait

    def waited(self) -> float:
        """Seconds for which the device has waited for the host or for staging memory, as far as they are known."""
        return self.stalls.so_far() + self.crowding.so_far()

    def device_guard(self) -> AbstractContextManager[object]:
        """Whatever enqueues copies does so inside."""
        return nullcontext()

    def follow(self) -> int:
        """Note that gradients are computed on the current stream: what uses them on another one will wait for it.

        Returns a number of that stream.
        """
        return 0

    def hold(self, tensors: Sequence[Tensor | None], shared: bool) -> None:
        """Keep tensors' memory, even if it is freed, until the current stream has read it.

        shared: it belongs to another stream, as fully_shard's gradients do, which counts on them to outlive backward.
        """

    @property
    def piece_bytes(self) -> int:
        """How much goes through staging memory at a time; a row more, if need be."""
        return sys.maxsize

    def stages_whole(self, nbytes: int) -> bool:
        """Whether staging memory on the way down holds so much at once."""
        return True

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Make room for copies of these blocks' pieces."""

    def host_memory(self, nbytes: int) -> Tensor:
        """Host memory that the device can reach, beginning at a page."""
        return host_memory(nbytes)

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same as a tensor; contents undefined."""
        return self.host_memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def send(self, source: Tensor) -> Tensor:
        """A device copy of a host tensor that need not live on; waits for it."""
        self._count(up=source.nbytes)
        return source

    @contextmanager
    def staging(self, target: Tensor, after: Sequence[Point] = ()) -> Iterator[Tensor]:
        """Where the device writes what `down` then copies to `target`, with the same `after`."""
        self._wait_for_all(after)
        yield target

    def down(self, source: Tensor, target: Tensor, after: Sequence[Point] = ()) -> None:
        """Copy a device tensor into host memory, once some moments have passed.

        The source must be memory that lives on: the copy may be made much later.
        """
        self._wait_for_all(after)
        self._count(down=source.nbytes)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)

    def beside(self, tensors: Sequence[Tensor | None]) -> AbstractContextManager[None]:
        """What is staged inside, from these tensors, runs beside computation, which does not wait for staging memory."""
        return nullcontext()

    def rejoin(self, at_once: bool) -> None:
        """In each call: let computation wait for what ran beside it before the last call, or for all of it."""

    def carried(self, nbytes: int) -> None:
        """A kernel has been told to write so much into host memory, which host work and `wait_down` are to wait for."""
        self._count(down=nbytes)

    def sent(self) -> Point | None:
        """When everything that has been sent down so far is there."""
        return None

    def gates(self, sent: Point | None = None) -> tuple[Gate, ...]:
        """What host work waits for to see what kernels have written and what has been sent down: until then, or all so far."""
        return ()

    def hold_gates(self, until: Sequence[Point]) -> None:
        """Gates made from now on open only when some moments have passed, too."""

    def lead(self) -> int | None:
        """How far the launching thread is ahead of the device, in pieces staged or shown. None: there is no device."""
        return None

    def wait_down(self) -> None:
        """Let the launching thread wait for everything that has been sent down so far."""

    def begin_up(self, source: Tensor, work: Point | None) -> Arrival | None:
        """Begin an `up` early, if there is room: the copy is made as soon as the host work is done."""
        return None

    @contextmanager
    def up(self, source: Tensor, work: Point | None, arrival: Arrival | None = None) -> Iterator[Tensor]:
        """A device copy of host memory once host work is done. On a GPU it has been begun."""
        if work is not None:
            self.wait(work)
        self._count(up=source.nbytes)
        yield source

    def begin_return(self, target: Tensor, source: Tensor, work: Point | None) -> Point | None:
        """Begin a `take_back` early: nobody uses the target meanwhile."""
        return None

    def take_back(self, target: Tensor, source: Tensor, work: Point | None, arrival: Point | None = None) -> None:
        """Copy host memory into a device tensor once host work is done, unless that was begun early."""
        with self.up(source, work) as values:
            target.copy_(values)

    def wait(self, work: Point) -> None:
        """Let the launching thread wait for host work."""
        start = time.perf_counter()
        self.wait_for_host(work)
        self.stalls.add(time.perf_counter() - start)

    def _wait_for_all(self, points: Sequence[Point]) -> None:
        """The same, for memory that the host has still to read. If it fails, the next call says so."""
        for point in points:
            if not point.passed:
                with suppress(HostError):
                    self.wait(point)

    def _count(self, down: int = 0, up: int = 0) -> None:
        self.bytes_down += down
        self.bytes_up += up
        if self.delay:
            time.sleep(self.delay("copy"))

    def close(self) -> None:
        """Let nothing on the device wait any more, and give the memory back. Idempotent."""


class DeviceLink(Link):
    """A link to a GPU, on which copies run beside the computing stream."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device)
        self.streams = streams
        self._registered: list[Tensor] = []
        words = self.host_empty((5 * LINE,), torch.int32).zero_()
        lines = (Timeline(words, place * LINE) for place in range(5))
        self.host, self._computed, self._came_down, self._went_up, self._beside = lines
        self._carried = self._computed.now()
        self._beside_before: Point | None = None  # all that ran beside computation up to the last call
        self._now_beside = False  # what is enqueued runs there
        self._down_ring, self._up_ring = Ring(device), Ring(device)
        self._stream: Stream | None = None  # that computed last
        self._handle: int | None = None  # its
        self._several = False  # another one has computed before

    def device_guard(self) -> AbstractContextManager[object]:
        return self.streams.device_guard()

    def follow(self) -> int:
        self._computing()
        assert self._handle is not None
        return self._handle

    def hold(self, tensors: Sequence[Tensor | None], shared: bool) -> None:
        if self._several or shared:
            stream = self._computing()
            for tensor in tensors:
                if tensor is not None:
                    self.streams.hold(tensor, stream)

    @property
    def piece_bytes(self) -> int:
        return piece_bytes()

    def stages_whole(self, nbytes: int) -> bool:
        return nbytes <= self._down_ring.size

    def reserve(self, blocks: Sequence[Block]) -> None:
        self.streams.synchronize()  # when parameters join, the memory of what is under way is replaced
        for ring, size in zip((self._down_ring, self._up_ring), ring_bytes(blocks), strict=True):
            if ring.size < size:
                ring.grow(size)
        self.staging_nbytes = self._down_ring.size + self._up_ring.size

    def host_memory(self, nbytes: int) -> Tensor:
        """Registered, because pinned allocation is slower and rounds sizes up. No two registrations share a page."""
        memory = host_memory(nbytes)
        if nbytes:
            self.streams.register(memory)
            self._registered.append(memory)
        return memory

    def send(self, source: Tensor) -> Tensor:
        self._count(up=source.nbytes)
        return source.to(self.device)

    @contextmanager
    def staging(self, target: Tensor, after: Sequence[Point] = ()) -> Iterator[Tensor]:
        stream = self.streams.beside if self._now_beside else self._computing()

        def wait(point: Point) -> None:
            if self._now_beside:
                self._wait(stream, point)
            else:
                self._stall(stream, point, self.crowding)

        share = self._down_ring.take(target.nbytes, wait)
        try:
            yield share.rows(target.dtype)
        finally:
            share.used = self._came_down.now()

    def down(self, source: Tensor, target: Tensor, after: Sequence[Point] = ()) -> None:
        self._count(down=source.nbytes)
        streams, copies = self.streams, self.streams.to_host
        if self._now_beside:
            stream, written = streams.beside, self._beside.next()
        else:
            stream, written = self._computing(), self._computed.next()
        streams.enqueue(
            *[streams.wait_for(copies, point) for point in after if not point.passed],
            streams.raise_to(stream, written),
            streams.wait_for(copies, written),
            streams.copy(target, source, copies),
            streams.raise_to(copies, self._came_down.next()),
        )

    @contextmanager
    def beside(self, tensors: Sequence[Tensor | None]) -> Iterator[None]:
        streams = self.streams
        streams.wait(streams.beside, streams.record(self._computing()))
        for tensor in tensors:
            if tensor is not None:
                streams.hold(tensor, streams.beside)
        self._now_beside = True
        try:
            with streams.on(streams.beside):
                yield
        finally:
            self._now_beside = False

    def rejoin(self, at_once: bool) -> None:
        if self._beside_before is not None:
            self._wait(self._computing(), self._beside_before)
        self._beside_before = self._beside.now()
        if at_once:
            self._wait(self._computing(), self._beside_before)

    def carried(self, nbytes: int) -> None:
        super().carried(nbytes)
        self._carried = self._raise(self._computing(), self._computed)

    def sent(self) -> Point:
        return self._came_down.now()

    def gates(self, sent: Point | None = None) -> tuple[Gate, ...]:
        points = (sent or self.sent(), self._carried)
        return tuple(Gate(point.timeline.address, point.value) for point in points)

    def hold_gates(self, until: Sequence[Point]) -> None:
        for point in until:
            self._wait(self.streams.to_host, point)
        if until:
            self._raise(self.streams.to_host, self._came_down)

    def lead(self) -> int:
        return self._computed.ahead

    def wait_down(self) -> None:
        self._wait(self.streams.to_host, self._carried)
        self.streams.synchronize(self.streams.to_host)

    def begin_up(self, source: Tensor, work: Point | None) -> Arrival | None:
        if not self._up_ring.has_room(source.nbytes):
            return None
        copies = self.streams.to_device
        share = self._up_ring.take(source.nbytes, lambda point: self._wait(copies, point))
        return Arrival(share, self._copy_up(share.rows(source.dtype), source, work))

    @contextmanager
    def up(self, source: Tensor, work: Point | None, arrival: Arrival | None = None) -> Iterator[Tensor]:
        assert arrival is not None, "the staging memory is full of copies that nobody has used"
        stream = self._computing()
        self._stall(stream, arrival.point, self.stalls)
        try:
            yield arrival.share.rows(source.dtype)
        finally:
            arrival.share.used = self._raise(stream, self._computed)

    def begin_return(self, target: Tensor, source: Tensor, work: Point | None) -> Point:
        return self._copy_up(target, source, work)

    def _copy_up(self, target: Tensor, source: Tensor, work: Point | None) -> Point:
        """Once host work is done."""
        self._count(up=source.nbytes)
        streams, copies, point = self.streams, self.streams.to_device, self._went_up.next()
        streams.enqueue(
            *([] if work is None or work.passed else [streams.wait_for(copies, work)]),
            streams.copy(target, source, copies),
            streams.raise_to(copies, point),
        )
        return point

    def take_back(self, target: Tensor, source: Tensor, work: Point | None, arrival: Point | None = None) -> None:
        arrival = arrival or self.begin_return(target, source, work)
        self._stall(self._computing(), arrival, self.stalls)

    def _computing(self) -> Stream:
        """The stream that computes now, ordered behind the one that did before: there is one timeline for both."""
        handle = self.streams.current_handle()
        if handle != self._handle:
            stream = self.streams.current()
            if self._handle is not None:
                self.streams.wait(stream, self.streams.record(self._stream))
                self._several = True
            self._stream, self._handle = stream, handle
        return self._stream

    def _raise(self, stream: Stream, timeline: Timeline) -> Point:
        point = timeline.next()
        self.streams.enqueue(self.streams.raise_to(stream, point))
        return point

    def _wait(self, stream: Stream, point: Point) -> None:
        if not point.passed:
            self.streams.enqueue(self.streams.wait_for(stream, point))

    def _stall(self, stream: Stream, point: Point, stalls: Stalls) -> None:
        """The same for the computing stream, whose time this costs."""
        if not point.passed:
            begin = self.streams.record(stream)
            self.streams.enqueue(self.streams.wait_for(stream, point))
            stalls.add_pair(begin, self.streams.record(stream))

    def close(self) -> None:
        if not self._registered:
            return
        self.host.release()
        self.streams.synchronize()
        while self._registered:
            self.streams.unregister(self._registered.pop())
        for ring in (self._down_ring, self._up_ring):
            ring.grow(0)


def link_to(device: torch.device) -> Link:
    return DeviceLink(device, Streams(device)) if device.type == "cuda" else Link(device)
