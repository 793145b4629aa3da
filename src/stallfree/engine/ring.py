"""Device memory for copies under way: a bounded ring, handed out in pieces that are reused once the device is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stallfree.engine.streams import Event, Stream, Streams

# Device memory for copies under way: for each direction, if the largest copy fits in; and for what is sent ahead.
STAGING_BYTES, AHEAD_BYTES = 128 << 20, 1 << 30


def ring_bytes(sizes: Sequence[int], calls: int) -> tuple[int, int, int]:
    """Of staging memory down, up and ahead, when copies have these sizes and a call brings up one part in so many of them.

    calls 0: nothing is sent ahead.
    """
    largest = max(sizes, default=0)
    staging = max(largest, min(STAGING_BYTES, sum(sizes)))
    return staging, staging, min(AHEAD_BYTES, largest + sum(sizes) // calls) if calls else 0


@dataclass(slots=True)
class Share:
    """A piece of the ring."""

    start: int
    end: int
    memory: Tensor
    used: Event | None = None  # when whoever reads it is done


@dataclass(frozen=True, slots=True)
class Arrival:
    """A copy on its way up."""

    share: Share
    event: Event

    def forget(self) -> None:
        """Nobody will use it."""
        self.share.used = self.event


class Ring:
    """Device memory that is handed out in turn to one stream, which waits until it is free again."""

    ALIGNMENT = 256  # bytes

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device, self._streams = device, streams
        self._held: deque[Share] = deque()  # oldest first
        self._next = 0
        self._stream: Stream | None = None
        self.grow(0)

    def grow(self, nbytes: int) -> None:
        """Take other memory. The device must be idle; what is held keeps the old one."""
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.size = nbytes
        self._held.clear()
        self._next = 0

    def _place(self, nbytes: int) -> tuple[int, list[Share]]:
        """Where the next share begins, and which older ones have to go: those it covers, and at the end those behind it."""
        wraps = self._next + nbytes > self.size
        start = 0 if wraps else self._next
        gone: list[Share] = []
        for share in self._held:
            covered = share.start < start + nbytes and start < share.end
            if not covered and not (wraps and share.start >= self._next):
                break
            gone.append(share)
        return start, gone

    def has_room(self, nbytes: int) -> bool:
        """Whether nothing is in the way whose last use has not been enqueued yet."""
        return nbytes <= self.size and all(share.used is not None for share in self._place(nbytes)[1])

    def take(self, nbytes: int, stream: Stream) -> Share:
        """Memory that the stream may write from now on."""
        assert nbytes <= self.size
        if self._stream is not None and stream != self._stream:  # what the last one has waited for counts
            self._streams.wait(stream, self._streams.record(self._stream))
        self._stream = stream
        start, gone = self._place(nbytes)
        for share in gone:
            assert share.used is not None, "the staging memory is too small for what is in use at once"
            self._streams.wait(stream, share.used)
            self._held.popleft()
        end = start + nbytes
        self._next = -(-end // self.ALIGNMENT) * self.ALIGNMENT
        share = Share(start, end, self._memory[start:end])
        if nbytes:
            self._held.append(share)
        return share
