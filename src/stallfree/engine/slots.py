"""Host memory for deferred gradients in flight, shared by all blocks.

A slot is taken when a block's gradient is staged and given back when the window it belongs to has been published. Who gets
which piece follows from the order of these calls alone, never from timing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import Block
from stallfree.engine.memory import PAGE
from stallfree.engine.schedule import MIN_WARM_UP, BlockSchedule, Clock
from stallfree.engine.streams import Point


@dataclass(eq=False, slots=True)
class Slot:
    """A piece of the pool. Holds the deferred gradients of one block's call, and later the weights to publish."""

    start: int  # of the piece, in bytes of the whole pool
    size: int
    memory: Tensor  # uint8
    after: Point | None  # it may be written once this moment has passed

    def rows(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Its content, flat."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


@dataclass(slots=True)
class _Gap:
    start: int
    size: int
    after: Point | None  # it may be written once this moment has passed

    def __lt__(self, other: _Gap) -> bool:
        return self.start < other.start


class Room:
    """First-fit allocation of pieces, by numbers alone."""

    def __init__(self) -> None:
        self.size = 0
        self._gaps: list[_Gap] = []  # by start, never adjacent unless a chunk of memory ends between them
        self._ends: list[int] = []  # of the chunks of memory, which no piece crosses

    def add(self, size: int) -> None:
        """More room at the end, not joined to what is there."""
        self._gaps.append(_Gap(self.size, size, None))
        self.size += size
        self._ends.append(self.size)

    def take(self, size: int) -> tuple[int, Point | None] | None:
        """Where a piece begins, and when it may be written; None if there is no room."""
        for place, gap in enumerate(self._gaps):
            if gap.size >= size:
                start, after = gap.start, gap.after
                if gap.size == size:
                    del self._gaps[place]
                else:
                    gap.start, gap.size = start + size, gap.size - size
                return start, after
        return None

    def give(self, start: int, size: int, after: Point | None) -> None:
        """Give a piece back; it may be written after a moment. Pieces that join have the later moment of theirs."""
        gap = _Gap(start, size, after)
        insort(self._gaps, gap)
        place = self._gaps.index(gap)
        for first in (place, place - 1):
            if 0 <= first < len(self._gaps) - 1:
                left, right = self._gaps[first], self._gaps[first + 1]
                if left.start + left.size == right.start and right.start not in self._ends:
                    left.size += right.size
                    left.after = later(left.after, right.after)
                    del self._gaps[first + 1]


def later(one: Point | None, other: Point | None) -> Point | None:
    """Of two moments on one timeline."""
    if one is None or other is None:
        return one or other
    return one if (one.value - other.value) & 0xFFFFFFFF < 1 << 31 else other


class SlotPool:
    """Slots in memory that the device reaches."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate  # bytes -> uint8, beginning at a page
        self._room = Room()
        self._chunks: list[tuple[int, memoryview]] = []  # where each begins in the pool

    def reserve(self, size: int) -> None:
        """Let the pool have this many bytes at least."""
        if size > self.nbytes:
            self._grow(size - self.nbytes)

    def _grow(self, size: int) -> None:
        size = pages(size)
        self._chunks.append((self._room.size, self._allocate(size).numpy().data))
        self._room.add(size)

    def take(self, nbytes: int) -> Slot:
        """A slot; the pool grows if it has none, which a pool that was reserved by `slot_bytes` hardly ever has to."""
        size = pages(max(nbytes, 1))
        found = self._room.take(size)
        if found is None:
            self._grow(size)
            found = self._room.take(size)
            assert found is not None
        start, after = found
        begin, chunk = next(pair for pair in reversed(self._chunks) if pair[0] <= start)
        piece = chunk[start - begin : start - begin + size]
        # Storage of its own, so that whoever saves a slot saves nothing else.
        return Slot(start, size, torch.frombuffer(piece, dtype=torch.uint8), after)

    def give(self, slots: Iterable[Slot], after: Point | None) -> None:
        """They may be written again once a moment has passed."""
        for slot in slots:
            self._room.give(slot.start, slot.size, later(slot.after, after))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is in here."""
        begins = ((torch.frombuffer(chunk, dtype=torch.uint8).data_ptr(), len(chunk)) for _, chunk in self._chunks)
        return any(begin <= tensor.data_ptr() < begin + size for begin, size in begins)

    @property
    def nbytes(self) -> int:
        return self._room.size


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def slot_bytes(blocks: Sequence[Block], config: ZenFlowConfig) -> int:
    """How large a pool has to be for these blocks: worked out by playing calls at the largest S, a selection at each close."""
    room, most = Room(), 0
    room.add(1 << 62)

    def take(size: int) -> list[tuple[int, int]]:
        nonlocal most
        if not size:
            return []
        found = room.take(pages(size))
        assert found is not None
        most = max(most, found[0] + pages(size))
        return [(found[0], pages(size))]

    warm_up = min(MIN_WARM_UP if config.full_warm_up_rounds == "auto" else config.full_warm_up_rounds, 2)
    clock = Clock(config.max_update_interval, warm_up)
    schedules = [BlockSchedule(block.phase) for block in blocks]
    open_: list[list[tuple[int, int]]] = [[] for _ in blocks]
    queues: list[list[tuple[int, list[tuple[int, int]]]]] = [[] for _ in blocks]
    selected = [False] * len(blocks)
    for _ in range(warm_up + 3 * (config.max_update_interval + config.lag)):
        clock.tick(0.0)
        for place, block in reversed(list(enumerate(blocks))):
            open_[place] += take((block.deferred_numel if selected[place] else block.numel) * block.dtype.itemsize)
        for after_close in (False, True):
            for place, (block, schedule) in enumerate(zip(blocks, schedules, strict=True)):
                if after_close and schedule.closes(clock):
                    due, exchange = schedule.close(clock, config.lag), []
                    if schedule.wants_selection(clock, 1):
                        selected[place], due, exchange = True, min(due, clock.call + 1), take(block.exchange_bytes)
                    queues[place].append((due, open_[place] + exchange))
                    open_[place] = []
                published = [window for window in queues[place] if window[0] <= clock.call]
                queues[place] = queues[place][len(published) :]
                for _, pieces in published:
                    for start, size in pieces:
                        room.give(start, size, None)
    return most
