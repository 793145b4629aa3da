"""Device memory for copies under way: a bounded ring, handed out in pieces that are reused once the device is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stallfree.engine.blocks import Block
from stallfree.engine.streams import Point

VIEWS = 256  # of the ring's memory that are kept
STAGING_BYTES = 384 << 20  # device memory for copies under way to the host, whatever the size of a block; up a third more


def piece_bytes() -> int:
    """Larger copies are made in pieces: of two, one is under way while the other is written or read."""
    return STAGING_BYTES // 3


def ring_bytes(blocks: Sequence[Block]) -> tuple[int, int]:
    """Of staging memory, down and up. Up comes a fraction of what goes down, but what waits there for its turn in backward, and
    finds no room, comes when backward is over, and computation waits for it.

    More than that only if one row takes more than half of `STAGING_BYTES`.
    """
    sizes = [block.numel * block.dtype.itemsize for block in blocks]
    rows = [block.row_numel * block.dtype.itemsize for block in blocks]
    largest = max((min(size, max(piece_bytes(), row) + row) for size, row in zip(sizes, rows, strict=True)), default=0)
    down, up = (max(largest, min(most, sum(sizes))) for most in (STAGING_BYTES, STAGING_BYTES * 4 // 3))
    return down, up


@dataclass(eq=False, slots=True)
class Share:
    """A piece of the ring."""

    start: int
    end: int
    views: dict[torch.dtype, Tensor]  # of its memory
    used: Point | None = None  # when whoever reads it is done; None: nobody has been told to yet

    def rows(self, dtype: torch.dtype) -> Tensor:
        """Its memory, as a flat tensor."""
        if dtype not in self.views:
            self.views[dtype] = self.views[torch.uint8].view(dtype)
        return self.views[dtype]


class Ring:
    """Device memory that is handed out in turn."""

    ALIGNMENT = 256  # bytes

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: list[Share] = []  # no two overlap
        self._next = 0
        self._views: dict[tuple[int, int], dict[torch.dtype, Tensor]] = {}  # shares lie in the same places again and again
        self.grow(0)

    def grow(self, nbytes: int) -> None:
        """Take other memory. The device must be idle; what is held keeps the old one."""
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.size = nbytes
        self._held.clear()
        self._views.clear()
        self._next = 0

    def left(self) -> int:
        """How many bytes there are before the next share begins anew at the front. If nobody needs any of them still, it does
        now, and there are all.

        So it depends on time in how many pieces a block goes, and nothing else does.
        """
        if self._next and all(share.used is not None and share.used.passed for share in reversed(self._held)):
            self._held.clear()
            self._next = 0
        return max(0, self.size - self._next)

    def _start(self, nbytes: int) -> int:
        """Where the next share begins."""
        return 0 if self._next + nbytes > self.size else self._next

    def _covered(self, start: int, nbytes: int) -> list[Share]:
        return [share for share in self._held if share.start < start + nbytes and start < share.end]

    def has_room(self, nbytes: int) -> bool:
        """Whether nothing is in the way whose last use is not known yet."""
        return nbytes <= self.size and all(share.used is not None for share in self._covered(self._start(nbytes), nbytes))

    def take(self, nbytes: int, wait: Callable[[Point], None]) -> Share:
        """Memory for a stream to write. wait: lets that stream wait, for those that use this memory still.

        What is left of theirs is remembered: whoever takes that may be on another stream, which has not waited.
        """
        assert nbytes <= self.size
        start = self._start(nbytes)
        last: dict[int, Point] = {}  # by timeline: of shares that were read part by part
        for share in self._covered(start, nbytes):
            used = share.used
            assert used is not None, "the staging memory is too small for what is in use at once"
            line, other = used.timeline, last.get(used.timeline.address)
            if other is None or line.since(used) < line.since(other):
                last[line.address] = used
            self._held.remove(share)
            rest = [(share.start, min(share.end, start)), (max(share.start, start + nbytes), share.end)]
            self._held += [Share(low, high, {}, share.used) for low, high in rest if low < high]
        for used in last.values():
            wait(used)
        end = start + nbytes
        self._next = -(-end // self.ALIGNMENT) * self.ALIGNMENT
        if (start, end) not in self._views:
            if len(self._views) >= VIEWS:
                self._views.clear()
            self._views[start, end] = {torch.uint8: self._memory[start:end]}
        share = Share(start, end, self._views[start, end])
        if nbytes:
            self._held.append(share)
        return share

    def leave(self, share: Share, parts: Sequence[tuple[int, Point]]) -> None:
        """A share is read from its front. parts: how many of its bytes have been read, and when; at last, all that will be."""
        self._held.remove(share)
        ends = [share.start + nbytes for nbytes, _ in parts[:-1]] + [share.end]
        for start, end, (_, used) in zip([share.start, *ends], ends, parts, strict=False):
            self._held.append(Share(start, end, {}, used))
