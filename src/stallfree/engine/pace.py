"""How many of the host's threads work: as few as keep up, because all of them at once slow training down.

The launching thread takes up to a third longer beside a host that works with all threads (docs/pipeline.md). So after some
calls the host gets fewer threads if it was idle for long, and more if it was not, or if the device waited. What is left over
from another S, or from a warm-up, says nothing of that and is not looked at. No result depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stallfree.engine.calls import Mark, Recorder, unpaused, usual_seconds

AIM, MOST = 0.7, 0.85  # of the calls' time for host work: what is aimed at, and what is too much
PEAK = 0.9  # of a call's time for the host work of the busiest one, with a large block or a selection: likewise
STALLED = 0.01  # of the calls' time: if the device waits more and the busiest call has too much to do, it waits for the host
CHANGED = 0.2  # by how much calls have to take longer for threads to be given away that were needed
REMEMBERED = 32  # measurements for which that holds


@dataclass
class Pace:
    """The number of threads for the host's work, from 1 to `most`."""

    most: int
    threads: int = 0
    _interval: int = 0
    _recorder: Recorder = field(default_factory=Recorder)
    _pending: int = 0  # calls until the first mark
    _needed: tuple[int, float] = (1, 0.0)  # threads, when calls took that long
    _age: int = 0  # measurements since that was learned

    def __post_init__(self) -> None:
        self.threads = self.most

    def after_call(self, mark: Mark, interval: int, held: bool = False) -> int:
        """The threads to work with from now on. held: all of them, because somebody measures how fast they are."""
        if held or interval != self._interval:
            self.threads, self._needed = self.most, (1, 0.0)
            self._recorder.clear()
            self._pending, self._interval = max(self._interval, interval), interval
        if self._pending:
            self._pending -= 1
            return self.threads
        self._recorder.add(mark)
        if calls := self._recorder.read():
            self.threads = self._choose(calls)
            self._recorder.clear()
            self._recorder.add(mark)
        return self.threads

    def _choose(self, calls: Sequence[Mark]) -> int:
        usual, counted = usual_seconds(calls), unpaused(calls)
        time, busy, stalled = (sum(float(getattr(call, name)) for call in counted) for name in ("seconds", "busy", "stalled"))
        peak = max(call.busy for call in calls) / usual
        # With fewer threads the same work takes longer by less than their number says.
        enough = math.ceil(self.threads * max(busy / time / AIM, peak / PEAK))
        if busy > MOST * time or (stalled > STALLED * time and peak > PEAK):
            if self.threads < self.most:  # else nothing is known of fewer
                self._needed, self._age = (min(self.most, max(self.threads + 1, enough)), usual), 0
            return min(self.most, max(enough, self.threads + max(1, self.threads // 2)))
        threads, step = self._needed
        self._age += 1
        if usual > (1 + CHANGED) * step or self._age > REMEMBERED:
            threads = 1
        return min(self.threads, max(threads, enough))
