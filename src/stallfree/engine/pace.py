"""How many of the host's threads work: as few as keep up, because all of them at once slow training down.

The launching thread takes up to a third longer beside a host that works with all threads (docs/pipeline.md). So after some
calls the host gets fewer threads if it was idle for long, and more if it was not, or if the device waited. What is left over
from another S, or from a warm-up, says nothing of that and is not looked at. No result depends on it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

CALLS = 8  # that a measurement is made of
AIM, MOST = 0.7, 0.85  # of the calls' time for host work: what is aimed at, and what is too much
STALLED = 0.01  # of the calls' time: what waits more needs more threads
PAUSE = 3  # times the usual time of a call: something else went on in between, an evaluation, say
CHANGED = 0.2  # by how much calls have to take longer for threads to be given away that were needed
REMEMBERED = 32  # measurements for which that holds


class Mark(NamedTuple):
    """What clocks and counters say after a call, in seconds."""

    now: float
    busy: float
    stalled: float


@dataclass
class Pace:
    """The number of threads for the host's work, from 1 to `most`."""

    most: int
    threads: int = 0
    _interval: int = 0
    _marks: list[Mark] = field(default_factory=list)
    _pending: int = 0  # calls until the first mark
    _needed: tuple[int, float] = (1, 0.0)  # threads, when calls took that long
    _age: int = 0  # measurements since that was learned

    def __post_init__(self) -> None:
        self.threads = self.most

    def after_call(self, mark: Mark, interval: int, held: bool = False) -> int:
        """The threads to work with from now on. held: all of them, because somebody measures how fast they are."""
        if held or interval != self._interval:
            self.threads, self._needed = self.most, (1, 0.0)
            self._marks.clear()
            self._pending, self._interval = max(self._interval, interval), interval
        if self._pending:
            self._pending -= 1
            return self.threads
        self._marks.append(mark)
        if len(self._marks) > CALLS:
            self.threads = self._choose()
            self._marks = [mark]
        return self.threads

    def _choose(self) -> int:
        calls = [Mark(*(after - before for before, after in zip(*pair, strict=True))) for pair in pairwise(self._marks)]
        usual = statistics.median(call.now for call in calls)
        time, busy, stalled = (sum(part) for part in zip(*(c for c in calls if c.now <= PAUSE * usual), strict=True))
        if busy > MOST * time or stalled > STALLED * time:
            if self.threads < self.most:  # else nothing is known of fewer
                self._needed, self._age = (self.threads + 1, usual), 0
            return min(self.most, self.threads + max(1, self.threads // 2))
        threads, step = self._needed
        self._age += 1
        if usual > (1 + CHANGED) * step or self._age > REMEMBERED:
            threads = 1
        # With fewer threads the same work takes longer by less than their number says.
        return min(self.threads, max(threads, -int(-self.threads * busy / time // AIM)))
