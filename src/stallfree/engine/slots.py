"""Host memory for deferred gradients in flight, shared by all blocks.

A slot is taken when a block's gradient is staged. When the window it belongs to closes, it is given back, to be written again
once the host has replayed the window; only the first one, in which the host leaves what is published, is kept until the
publish. The pool is divided into cells of a few sizes. Of those that fit, the one that has been free longest is taken; during
the warm-up, when a gradient takes several that are adjacent, the first that are free. So who gets which follows from the order
of these calls alone, never from timing, and waiting for the host comes last.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import Block
from stallfree.engine.memory import PAGE
from stallfree.engine.schedule import MIN_WARM_UP, BlockSchedule, Clock
from stallfree.engine.streams import Point

ALIKE = 1 / 32  # blocks share cells that are larger than what one of them needs by up to this part


class Until(NamedTuple):
    """Until a moment, somebody reads a slot's first bytes, up to here.

    Several for one slot are moments of the host's: it orders its own writes behind its own reads, so that only copies need to
    wait, each for those in its place. A moment of any other kind holds for a slot as a whole.
    """

    nbytes: int
    point: Point


class Claim(NamedTuple):
    """Until a moment, somebody needs what is between two addresses."""

    begin: int
    end: int
    point: Point


@dataclass(eq=False, slots=True)
class Cell:
    """A part of the pool."""

    chunk: memoryview  # the memory that was allocated with it
    start: int  # in the chunk, bytes
    size: int
    free: bool = True
    after: Sequence[Until] = ()  # its parts, in order, may be written once these moments have passed
    views: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict)  # of its memory, as it is used again and again

    def precedes(self, other: Cell) -> bool:
        return self.chunk is other.chunk and self.start + self.size == other.start


@dataclass(eq=False, slots=True)
class Slot:
    """Adjacent cells, mostly one. Holds the deferred gradients of one block's call, and later the weights to publish."""

    cells: Sequence[Cell]
    memory: Tensor  # uint8

    @property
    def after(self) -> tuple[Claim, ...]:
        """Its parts may be written once these moments have passed."""
        claims, begin = [], self.memory.data_ptr()
        for cell in self.cells:
            low = begin
            for nbytes, point in cell.after:
                claims.append(Claim(low, begin + nbytes, point))
                low = begin + nbytes
            begin += cell.size
        return tuple(claims)

    def rows(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Its content, flat."""
        views = self.cells[0].views if len(self.cells) == 1 else {}
        rows = views.get((dtype, numel))
        if rows is None:
            rows = views[dtype, numel] = self.memory[: numel * dtype.itemsize].view(dtype)
        return rows


class SlotPool:
    """Slots in memory that the device reaches."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate  # bytes -> uint8, beginning at a page
        self._chunks: list[memoryview] = []
        self._cells: defaultdict[int, list[Cell]] = defaultdict(list)  # by size, in the order of memory
        self._free: defaultdict[int, deque[Cell]] = defaultdict(deque)  # by size, the longest free first
        self._sizes: Mapping[Block, tuple[int, int]] = {}

    def follow(self, plan: SlotPlan) -> None:
        """Serve these blocks, with as many cells as they need at least."""
        self._sizes = plan.sizes
        self._grow({size: count - len(self._cells[size]) for size, count in sorted(plan.counts.items())})

    def _grow(self, counts: Mapping[int, int]) -> None:
        """Add cells of some sizes, in one piece of memory."""
        counts = {size: count for size, count in counts.items() if count > 0}
        if not counts:
            return
        chunk, start = self._allocate(sum(size * count for size, count in counts.items())).numpy().data, 0
        self._chunks.append(chunk)
        for size, count in counts.items():
            cells = [Cell(chunk, start + size * place, size) for place in range(count)]
            self._cells[size] += cells
            self._free[size] += cells
            start += size * count

    def take(self, block: Block, nbytes: int) -> Slot:
        """A slot; the pool grows if it has none, which a pool that follows a plan hardly ever has to."""
        return self._take(self._sizes[block][0], nbytes)

    def take_handover(self, block: Block) -> Slot:
        """The same for channels that change hands."""
        return self._take(self._sizes[block][1], block.exchange_bytes)

    def _take(self, size: int, nbytes: int) -> Slot:
        count, free = cells_of(nbytes, size), self._free[size]
        if count == 1:
            if not free:
                self._grow({size: 1})
            cells: Sequence[Cell] = (free.popleft(),)
        else:
            if not (cells := self._run(size, count)):
                self._grow({size: count})
                cells = self._cells[size][-count:]
            for cell in cells:
                free.remove(cell)
        for cell in cells:
            cell.free = False
        return Slot(cells, _memory(cells))

    def _run(self, size: int, count: int) -> list[Cell]:
        """The first free cells that are adjacent; none if there are not so many."""
        run: list[Cell] = []
        for cell in self._cells[size]:
            if not cell.free or (run and not run[-1].precedes(cell)):
                run = []
            if cell.free:
                run.append(cell)
            if len(run) == count:
                return run
        return []

    def give(self, slots: Iterable[Slot], after: Point | Sequence[Until] | None) -> None:
        """They may be written again once a moment has passed; or each of them part by part, as the host is done with it.

        None, or nothing: nobody has begun to read them.
        """
        for slot in slots:
            for cell in slot.cells:
                assert not cell.free, "a slot is given back once"
                cell.free = True
                if isinstance(after, Point):
                    cell.after = (Until(cell.size, after),)
                elif after:  # of a slot of several cells, the last moment holds for all
                    *first, last = after if len(slot.cells) == 1 else after[-1:]
                    cell.after = (*first, Until(cell.size, last.point))
                self._free[cell.size].append(cell)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is in here."""
        begins = ((torch.frombuffer(chunk, dtype=torch.uint8).data_ptr(), len(chunk)) for chunk in self._chunks)
        return any(begin <= tensor.data_ptr() < begin + size for begin, size in begins)

    @property
    def nbytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)


def _memory(cells: Sequence[Cell]) -> Tensor:
    """With storage of its own, so that whoever saves a slot saves nothing else."""
    first, size = cells[0], sum(cell.size for cell in cells)
    views, whole = first.views, (torch.uint8, size)
    if whole not in views:
        views[whole] = torch.frombuffer(first.chunk[first.start : first.start + size], dtype=torch.uint8)
    return views[whole]


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def cells_of(nbytes: int, size: int) -> int:
    """How many cells hold so many bytes."""
    return max(1, -(-nbytes // size))


# How many


@dataclass(frozen=True)
class SlotPlan:
    """The cells that some blocks need."""

    sizes: Mapping[Block, tuple[int, int]]  # bytes of a cell for gradients, and for a hand-over
    counts: Mapping[int, int]  # by size

    @property
    def nbytes(self) -> int:
        return sum(size * count for size, count in self.counts.items())


def gives_at_close(config: ZenFlowConfig) -> bool:
    """Whether a window's slots may be written again after its replay, or only after its publish.

    With a longer lag the host may take longer than a call, and a copy that waited for it would let the device wait.
    """
    return config.lag <= 1


def plan_slots(blocks: Sequence[Block], config: ZenFlowConfig) -> SlotPlan:
    """Worked out by playing calls at each S up to the largest, with a hand-over after each close.

    No call needs more cells, in whatever order gradients come, and wherever in the call weights are published; except after a
    resume on other ranks, when blocks collect whole gradients until they close, and when blocks join later, which do the same.
    Just after a change of S blocks close in another order, and now and then need a few cells more.
    """
    cells = _cell_sizes(blocks)
    most: Counter[tuple[int, str]] = Counter()
    for interval in range(1, config.max_update_interval + 1):  # the largest decides, but for whole gradients of tiny blocks
        most |= _play(blocks, cells, config, interval)
    counts: Counter[int] = Counter()
    handovers: dict[int, int] = {}
    for cell in set(cells.values()):
        handover = max(pages(block.exchange_bytes) for block in blocks if cells[block] == cell)
        apart = {cell: most[cell, "gradients"], handover: most[cell, "handovers"]}
        together = {cell: most[cell, "both"]}
        cheaper = _bytes(apart) < _bytes(together)  # as for a block like no other: no cell of its size for hand-overs alone
        handovers[cell] = handover if handover > cell or cheaper else cell
        counts.update(together if handovers[cell] == cell else apart)
    return SlotPlan({block: (cells[block], handovers[cells[block]]) for block in blocks}, +counts)


def _bytes(counts: Mapping[int, int]) -> int:
    return sum(size * count for size, count in counts.items())


def _cell_sizes(blocks: Sequence[Block]) -> dict[Block, int]:
    """Of gradients once channels are selected. Until then a gradient takes more than one cell, and is alone in its window.

    Two blocks that nobody else is like share none: they are mostly a model's ends, a table and an output layer. The one that is
    first in backward would have to wait until the host is done with the other's window, the last one of a call.
    """
    groups: list[list[Block]] = []
    for block in sorted(blocks, key=lambda block: -_deferred_bytes(block)):
        if groups and _deferred_bytes(groups[-1][0]) <= _deferred_bytes(block) * (1 + ALIKE):
            groups[-1].append(block)
        else:
            groups.append([block])
    sizes: dict[Block, int] = {}
    for group in groups:
        size, alone = pages(_deferred_bytes(group[0])), len(group) == 2 < len(blocks)
        for block in group:
            while alone and size in sizes.values():  # sizes are what tells cells apart
                size += PAGE
            sizes[block] = size
    return sizes


def _deferred_bytes(block: Block) -> int:
    return block.deferred_numel * block.dtype.itemsize


def _play(
    blocks: Sequence[Block], cells: Mapping[Block, int], config: ZenFlowConfig, interval: int
) -> Counter[tuple[int, str]]:
    """The most cells of each size that gradients, hand-overs and both hold at once.

    With a lag above 1 a selection hurries what its block has queued, if it moves anybody. None may have for as long as the
    lag, and then all of it is there beside the hand-over. So here none hurries it but the first, which always moves all.
    """
    held: Counter[tuple[int, str]] = Counter()
    most: Counter[tuple[int, str]] = Counter()

    def hold(block: Block, what: str, count: int) -> None:
        for key in ((cells[block], what), (cells[block], "both")):
            held[key] += count
            most[key] = max(most[key], held[key])

    warm_up = min(MIN_WARM_UP if config.full_warm_up_rounds == "auto" else config.full_warm_up_rounds, 2)
    clock = Clock(interval, warm_up)
    schedules = {block: BlockSchedule(block.phase) for block in blocks}
    open_: dict[Block, list[int]] = {block: [] for block in blocks}  # cells of each call
    queues: dict[Block, list[tuple[int, str, int]]] = {block: [] for block in blocks}  # until which call; what; cells

    def publish() -> None:
        for block, queue in queues.items():
            for due, what, count in queue:
                if due <= clock.call:
                    hold(block, what, -count)
            queues[block] = [kept for kept in queue if kept[0] > clock.call]

    for _ in range(warm_up + 3 * (interval + config.lag)):
        clock.tick(0.0)
        for block, schedule in schedules.items():
            numel = block.deferred_numel if schedule.last_selection else block.numel
            open_[block].append(cells_of(numel * block.dtype.itemsize, cells[block]))
            hold(block, "gradients", open_[block][-1])
        publish()
        read: list[tuple[Block, int]] = []
        for block, schedule in schedules.items():
            if schedule.closes(clock):
                window, open_[block] = open_[block], []
                selects = block.exchange_bytes > 0 and schedule.wants_selection(clock, 1)
                due = schedule.close(clock, config.lag)
                if selects:
                    arrives = min(due, clock.call + 1)
                    hold(block, "handovers", 1)
                    queues[block].append((arrives, "handovers", 1))
                    if not schedule.last_selection:
                        due = arrives
                    schedule.last_selection = clock.call
                kept = window[:1] if gives_at_close(config) else window
                read.append((block, sum(window) - sum(kept)))
                queues[block].append((due, "gradients", sum(kept)))
        for block, count in read:
            hold(block, "gradients", -count)
        publish()
    return most
