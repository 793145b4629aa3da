"""Slots in host memory, and the copies between them and the device.

`Link` is the plain one: a copy is a copy, and waiting for the host is waiting. `DeviceLink` (`async_transfers`) never lets the
launching thread wait.
Each direction has a stream; gradients pass through a bounded ring of device memory on their way down, weights on their way up.
The device itself waits for host work: for a word in host memory that the worker raises when a window is replayed. Everything
that a wait depends on is enqueued before it, so that no two waits can wait for each other.
"""

from __future__ import annotations

import ctypes
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import Block
from stallfree.engine.ring import Arrival, Ring, ring_bytes
from stallfree.engine.schedule import slot_index, slots_needed
from stallfree.engine.streams import Event, Streams
from stallfree.kernels.block import BlockLayout

Ready = Callable[[], object]  # blocks the calling thread until a copy has arrived

RELEASED = 0x7FFFFFFF  # a flag that nobody waits for any more
PAGE = 4096  # bytes
FLAGS = 1024  # words that are registered together
PAIRS = 4096  # stalls of the device whose times are not read yet


def _arrived() -> None:
    """A copy that is done when it returns."""


class Flag:
    """A word in host memory that streams wait for. It only rises."""

    def __init__(self, memory: Tensor, place: int) -> None:
        self._memory = memory  # int32
        self.address = memory.data_ptr() + 4 * place
        self._word = ctypes.c_uint32.from_address(self.address)
        self.value = 0  # what the last window waits for

    def next(self) -> int:
        self.value += 1
        return self.value

    def release(self, value: int) -> None:
        """Let everything go on that waits for this value or a lower one: a plain store."""
        self._word.value = value


@dataclass(slots=True)
class HostWork:
    """Host work that an upward copy needs: waited for by the launching thread, or through the flag by the device."""

    done: list[Future[None]] = field(default_factory=list)
    flag: Flag | None = None
    value: int = 0

    def wait(self) -> None:
        for job in self.done:
            job.result()


class Stalls:
    """Time in which the device had nothing to run because it waited for host work or a copy: in all, and in the last call."""

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0, 0.0]  # all, last call, call under way
        self._call = 0
        self._pairs: deque[tuple[int, Event, Event]] = deque(maxlen=PAIRS)  # call, begin and end on the device

    def add(self, seconds: float) -> None:
        self._seconds[0] += seconds
        self._seconds[2] += seconds

    def add_pair(self, begin: Event, end: Event) -> None:
        """Read later. The oldest are forgotten if nobody reads them and the device is far behind."""
        self._pairs.append((self._call, begin, end))
        if len(self._pairs) >= PAIRS // 2 and self._pairs[0][2].query():
            self._read_oldest()

    def finish_call(self) -> None:
        self._seconds[1:] = self._seconds[2], 0.0
        self._call += 1

    def read(self) -> tuple[float, float]:
        """Seconds in all, and in the last call. Waits for the device."""
        while self._pairs:
            self._pairs[0][2].synchronize()
            self._read_oldest()
        return self._seconds[0], self._seconds[1]

    def _read_oldest(self) -> None:
        call, begin, end = self._pairs.popleft()
        seconds = begin.elapsed_time(end) / 1e3
        self._seconds[0] += seconds
        if self._call - call < 2:
            self._seconds[1 if call < self._call else 2] += seconds


class Link:
    """Moves rows down to the host and up to the device, and counts the bytes where the copies are issued.

    This one lets the launching thread wait, for every copy and for host work. On the CPU there is nothing to copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_down = self.bytes_up = 0
        self.delay: Callable[[str], None] | None = None
        self.stalls = Stalls()

    def device_guard(self) -> AbstractContextManager[object]:
        """Whatever enqueues copies does so inside."""
        return nullcontext() if self.device.type == "cpu" else torch.cuda.device(self.device)

    def reserve(self, sizes: Sequence[int], calls: int) -> None:
        """Make room for copies of so many bytes, of which each call brings its share up."""

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can reach."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def flag(self) -> Flag | None:
        """What the device waits for, if it is the device that waits."""
        return None

    def send(self, source: Tensor) -> Tensor:
        """A device copy of a host tensor that need not live on; waits for it."""
        self.bytes_up += source.nbytes
        return source.to(self.device)

    @contextmanager
    def staging(self, target: Tensor) -> Iterator[Tensor]:
        """Where the device writes what `down` then copies to `target`. On the CPU, the target itself."""
        yield target if self.device.type == "cpu" else torch.empty_like(target, device=self.device)

    def down(self, source: Tensor, target: Tensor, after: Event | None = None) -> Ready:
        """Copy a device tensor into host memory, after an event; call the result before reading it there.

        The source must be memory that lives on: the copy may be made much later.
        """
        self._count(down=source.nbytes)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        return _arrived

    def send_ahead(self, source: Tensor, work: HostWork) -> Arrival | None:
        """Begin an `up` early, if there is room: the copy is made as soon as the host work is done."""
        return None

    @contextmanager
    def up(
        self, source: Tensor, work: HostWork | None = None, ahead: Arrival | None = None
    ) -> Iterator[tuple[Tensor, Event | None]]:
        """A device copy of host memory once host work is done, unless it was sent ahead; and the event of the copy."""
        if work is not None:
            self.wait(work)
        self._count(up=source.nbytes)
        yield source.to(self.device), None

    def wait(self, work: HostWork) -> None:
        """Let the launching thread wait for host work."""
        start = time.perf_counter()
        work.wait()
        self.stalls.add(time.perf_counter() - start)

    def _count(self, down: int = 0, up: int = 0) -> None:
        self.bytes_down += down
        self.bytes_up += up
        if self.delay:
            self.delay("copy")

    def enter_thread(self) -> None:
        """To be called by a thread before it waits for copies."""

    def release_all(self) -> None:
        """Let nothing on the device wait for the host any more."""

    def close(self) -> None:
        """Give the memory back. Idempotent."""


class DeviceLink(Link):
    """A link on which copies run beside the computing stream."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device)
        self.streams = streams
        self._registered: list[Tensor] = []
        self._flags: list[Flag] = []
        self._words: Tensor | None = None
        self._rings = tuple(Ring(device, streams) for _ in range(3))  # what goes down, up, and up ahead of time
        self._last: Event | None = None  # of the last copy down

    def device_guard(self) -> AbstractContextManager[object]:
        return self.streams.device_guard()

    def reserve(self, sizes: Sequence[int], calls: int) -> None:
        self.streams.synchronize()  # when parameters join, the memory of what is under way is replaced
        for ring, needed in zip(self._rings, ring_bytes(sizes, calls), strict=True):
            if ring.size < needed:
                ring.grow(needed)

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Registered, because pinned allocation is slower and rounds sizes up. No two registrations share a page."""
        numel = math.prod(shape)
        nbytes = -(-numel * dtype.itemsize // PAGE) * PAGE
        memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
        pages = memory[-memory.data_ptr() % PAGE :][:nbytes]
        if nbytes:
            self.streams.register(pages)
            self._registered.append(pages)
        return pages[: numel * dtype.itemsize].view(dtype).view(shape)

    def flag(self) -> Flag:
        place = len(self._flags) % FLAGS
        if not place:
            self._words = self.host_empty((FLAGS,), torch.int32).zero_()
        assert self._words is not None
        self._flags.append(Flag(self._words, place))
        return self._flags[-1]

    @contextmanager
    def staging(self, target: Tensor) -> Iterator[Tensor]:
        share = self._rings[0].take(target.nbytes, self.streams.current())
        try:
            yield share.memory.view(target.dtype)
        finally:
            share.used = self._last or self.streams.record(self.streams.current())

    def down(self, source: Tensor, target: Tensor, after: Event | None = None) -> Ready:
        self._count(down=source.nbytes)
        streams = self.streams
        if after is not None:
            streams.wait(streams.to_host, after)
        streams.wait(streams.to_host, streams.record(streams.current()))
        streams.copy(target, source, streams.to_host)
        self._last = streams.record(streams.to_host, sleeps=True)
        return self._last.synchronize

    def send_ahead(self, source: Tensor, work: HostWork) -> Arrival | None:
        ahead = self._rings[2]
        return self._up(source, work, ahead) if ahead.has_room(source.nbytes) else None

    def _up(self, source: Tensor, work: HostWork | None, ring: Ring) -> Arrival:
        self._count(up=source.nbytes)
        streams = self.streams
        if work is not None and work.flag is not None:
            streams.wait_value(streams.to_device, work.flag.address, work.value)
        share = ring.take(source.nbytes, streams.to_device)
        streams.copy(share.memory, source, streams.to_device)
        return Arrival(share, streams.record(streams.to_device))

    @contextmanager
    def up(
        self, source: Tensor, work: HostWork | None = None, ahead: Arrival | None = None
    ) -> Iterator[tuple[Tensor, Event | None]]:
        streams, current = self.streams, self.streams.current()
        arrival = ahead or self._up(source, work, self._rings[1])
        if work is None:
            streams.wait(current, arrival.event)
        else:
            begin = streams.record(current, timing=True)
            streams.wait(current, arrival.event)
            self.stalls.add_pair(begin, streams.record(current, timing=True))
        yield arrival.share.memory.view(source.dtype), arrival.event
        arrival.share.used = streams.record(current)

    def enter_thread(self) -> None:
        self.streams.enter_thread()

    def release_all(self) -> None:
        for flag in self._flags:
            flag.release(RELEASED)

    def close(self) -> None:
        self.release_all()
        if self._registered:
            self.streams.synchronize()
        while self._registered:
            self.streams.unregister(self._registered.pop())
        for ring in self._rings:
            ring.grow(0)


def link_to(device: torch.device, config: ZenFlowConfig) -> Link:
    if config.async_transfers and device.type != "cuda":
        warnings.warn(
            f"async_transfers is ignored: the parameters are on {device}, where there is nothing to copy", stacklevel=2
        )
    return DeviceLink(device, Streams(device)) if device.type == "cuda" and config.async_transfers else Link(device)


class Slots:
    """One block's ring of slots. A slot holds the deferred gradients of a call, and later the weights to publish."""

    def __init__(self, block: Block, link: Link, config: ZenFlowConfig) -> None:
        self.config, self.link = config, link
        self.memory = link.host_empty((slots_needed(config), block.numel), block.dtype)
        self.ready: list[Ready] = [_arrived] * len(self.memory)
        self._free: list[Event | None] = [None] * len(self.memory)  # when the device has read what was published from it

    def flat(self, call: int, layout: BlockLayout) -> Tensor:
        """All deferred rows of a call, or of the window that began with it."""
        return self.memory[slot_index(call, self.config), : layout.deferred_numel]

    def rows(self, call: int, layout: BlockLayout, place: int) -> Tensor:
        """The deferred rows of one weight: `[channels, length]`."""
        return layout.deferred_rows(self.flat(call, layout), place)

    def fill(self, call: int, layout: BlockLayout, places: Sequence[int], split: Callable[[Tensor], None]) -> None:
        """Let `split` write the deferred rows of some weights, and bring them down: in one copy, if they are all there are."""
        slot, target = slot_index(call, self.config), self.flat(call, layout)
        after = self._free[slot]
        with self.link.staging(target) as staged:
            split(staged)
            if len(places) == len(layout.segments):
                self.ready[slot] = self.link.down(staged, target, after)
            else:
                for place in places:
                    source = layout.deferred_rows(staged, place)
                    self.ready[slot] = self.link.down(source, self.rows(call, layout, place), after)

    def arrival(self, call: int) -> Ready:
        """Waits until what was last brought down for this call is there."""
        return self.ready[slot_index(call, self.config)]

    def free(self, calls: Sequence[int], after: Event | None) -> None:
        """The slots of these calls may be filled again once the event has happened."""
        for call in calls:
            self._free[slot_index(call, self.config)] = after

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes
