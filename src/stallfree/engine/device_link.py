"""A link to a GPU, on which copies run beside the computing stream: in backward and `step()` the launching thread never waits.

Each direction has a stream; gradients pass through a bounded ring of device memory on their way down, weights on their way up,
both in pieces where a block is large. The device itself waits for host work, and host work for the device, on timelines.
Everything that a wait depends on is enqueued before it, so that no two waits can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from stallfree.engine.blocks import Block
from stallfree.engine.memory import host_memory
from stallfree.engine.ring import Ring, piece_bytes, ring_bytes
from stallfree.engine.slots import Claim
from stallfree.engine.stalls import Stalls
from stallfree.engine.streams import Point, Stream, Streams, Timeline
from stallfree.engine.transfer import Arrival, Link
from stallfree.kernels.windows import Gate

LINE = 16  # int32 words of a cache line: each timeline has one of its own


class DeviceLink(Link):
    """A link to a GPU, on which copies run beside the computing stream."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device)
        self.streams = streams
        self._registered: list[Tensor] = []
        words = self.host_empty((6 * LINE,), torch.int32).zero_()
        lines = (Timeline(words, place * LINE) for place in range(6))
        self.host, self._computed, self._came_down, self._went_up, self._beside, self._shown = lines
        self._joined = self._shown.now()  # computation has waited until then
        self._carried = self._called = self._computed.now()
        self._per_call = 1  # by how much a call raises that count
        self._beside_before: Point | None = None  # all that ran beside computation up to the last call
        self._now_beside = False  # what is enqueued runs there
        self._down_ring, self._up_ring = Ring(device), Ring(device)
        self._stream: Stream | None = None  # that computed last
        self._handle: int | None = None  # its
        self._several = False  # another one has computed before
        self._staged: Tensor | None = None  # what is being written, to be sent down
        self._sent: list[tuple[int, Point]] = []  # of that: how many bytes, and when they are down
        self._calling = streams.current()  # the stream that calls step()

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

    def take(self, nbytes: int) -> Tensor:
        """From what the stream that calls `step()` has: forward and backward run there, and leave memory to each other.

        Whoever writes it first may be another stream, as with fully_shard: that one waits for all that the calling stream has
        been told up to here, which may use the memory as it was before. Computing streams wait for each other in turn
        (`_computing`), so the one that holds it at last is behind all of its uses. If that is the stream it comes from, as
        mostly, it can be given away at once; else when that one is done.
        """
        stream = self._computing()
        with self.streams.on(self._calling):
            memory = super().take(nbytes)
        if stream != self._calling:
            self.streams.wait(stream, self.streams.record(self._calling))
        return memory

    @property
    def piece_bytes(self) -> int:
        return piece_bytes()

    def stages_whole(self, nbytes: int) -> bool:
        return nbytes <= self._down_ring.size

    def room_left(self) -> int:
        return self._down_ring.left()

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

    def to_device(self, source: Tensor) -> Tensor:
        self._count(up=source.nbytes)
        return source.to(self.device)

    @contextmanager
    def staging(self, target: Tensor, after: Sequence[Claim] = ()) -> Iterator[Tensor]:
        stream = self.streams.beside if self._now_beside else self._computing()

        def wait(point: Point) -> None:
            if self._now_beside:
                self._wait(stream, point)
            else:
                self._stall(stream, point, self.crowding)

        share = self._down_ring.take(target.nbytes, wait)
        self._staged, self._sent = share.rows(target.dtype), []
        try:
            yield self._staged
        finally:
            self._staged, share.used = None, self._came_down.now()
            if len(self._sent) > 1:
                self._down_ring.leave(share, self._sent)

    def down(self, source: Tensor, target: Tensor, after: Sequence[Claim] = ()) -> None:
        self._count(down=source.nbytes)
        streams, copies = self.streams, self.streams.to_host
        if self._now_beside:
            stream, written = streams.beside, self._beside.next()
        else:
            stream, written = self._computing(), self._computed.next()
        tasks = [streams.raise_to(stream, written), streams.wait_for(copies, written)]
        claims = [claim for claim in after if not claim.point.passed]
        for ours, theirs in _parts(source, target):
            if claims:
                begin = theirs.data_ptr()
                mine = [claim for claim in claims if claim.begin < begin + theirs.nbytes and begin < claim.end]
                tasks += [streams.wait_for(copies, claim.point) for claim in mine]
            tasks += [streams.copy(theirs, ours, copies), streams.raise_to(copies, self._came_down.next())]
            if self._staged is not None and ours.nbytes:  # what has no bytes is nowhere
                self._sent.append((ours.data_ptr() + ours.nbytes - self._staged.data_ptr(), self._came_down.now()))
        streams.enqueue(*tasks)

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

    def begin_call(self, at_once: bool) -> None:
        self._calling = self._computing()
        self._per_call = max(1, self._computed.since(self._called))
        self._called = self._computed.now()
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

    def lead(self) -> float:
        waits = not self._joined.passed  # at the end of backward, for the host: a whole call is still to come
        return max(self._computed.ahead / self._per_call, float(waits))

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

    @contextmanager
    def up_showing(self, source: Tensor, work: Point | None, arrival: Arrival | None) -> Iterator[Tensor]:
        assert arrival is not None, "only what is on its way up is used beside computation"
        streams, stream, rows = self.streams, self.streams.showing, arrival.share.rows(source.dtype)
        for point in (self._computed.now(), arrival.point):
            self._wait(stream, point)
        streams.hold(rows, stream)  # when parameters join, the ring may have taken other memory since
        try:
            with streams.on(stream):
                yield rows
        finally:
            arrival.share.used = self._raise(stream, self._shown)

    def join_showing(self) -> None:
        if not self._shown.now().passed:
            with self.device_guard():
                if self._joined != self._shown.now():  # the stream of a backward pass that failed need not be the current one
                    self._joined = self._shown.now()
                    self._stall(self._stream, self._joined, self.stalls)
                self._computing()  # waits behind it

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

    def take_back(self, target: Tensor, source: Tensor, work: Point | None, returned: Point | None) -> None:
        assert returned is not None
        self._stall(self._computing(), returned, self.stalls)

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


def _parts(source: Tensor, target: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """In which a large copy is made: memory can be written again as soon as its part is down."""
    count = -(-source.nbytes // max(1, piece_bytes()))
    return ((source, target),) if count <= 1 else zip(source.chunk(count), target.chunk(count), strict=True)


def link_to(device: torch.device) -> Link:
    return DeviceLink(device, Streams(device)) if device.type == "cuda" else Link(device)
