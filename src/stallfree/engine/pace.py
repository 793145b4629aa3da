"""How many of the host's threads work: as few as keep up, because all of them at once slow training down.

A machine's memory saturates with about half of its cores, and the launching thread, which waits for memory all the time, then
takes up to a third longer. So after some calls the host gets fewer threads if it was idle for long, and more if it was not, or
if the device waited. No result depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

CALLS = 8  # that a measurement is made of
AIM, MOST = 0.7, 0.85  # of the calls' time for host work: what is aimed at, and what is too much
STALLED = 0.01  # of the calls' time: what waits more needs more threads


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
    _since: Mark | None = None
    _calls: int = 0

    def __post_init__(self) -> None:
        self.threads = self.most

    def after_call(self, mark: Mark, held: bool = False) -> int:
        """The threads to work with from now on. held: all of them, because somebody measures how fast they are."""
        if held:
            self.threads, self._since = self.most, None
        elif self._since is None:
            self._since, self._calls = mark, 0
        else:
            self._calls += 1
            if self._calls == CALLS:
                self.threads = self._choose(self._since, mark)
                self._since, self._calls = mark, 0
        return self.threads

    def _choose(self, first: Mark, last: Mark) -> int:
        time = last.now - first.now
        load = (last.busy - first.busy) / time
        if load > MOST or last.stalled - first.stalled > STALLED * time:
            return min(self.most, self.threads + max(1, self.threads // 4))
        # With fewer threads the same work takes longer by less than their number says.
        return min(self.threads, max(1, -int(-self.threads * load // AIM)))
