"""What the last calls took, for those who decide by it how the host works: `pace.py` its threads, `tuner.py` its windows."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

CALLS = 8  # that a measurement is made of
PAUSE = 3  # times the usual time of a call: something else went on in between, an evaluation, say


class Mark(NamedTuple):
    """What clocks and counters say after a call; or, of one call, how far they have come since the mark before."""

    seconds: float
    busy: float  # seconds of host work
    stalled: float  # seconds
    elements: int = 0  # gradients replayed
    lead: float | None = None  # calls that the device has still to work on then; None: there is no device

    def since(self, before: Mark) -> Mark:
        seconds, busy, stalled = self.seconds - before.seconds, self.busy - before.busy, self.stalled - before.stalled
        return Mark(seconds, busy, stalled, self.elements - before.elements, self.lead)


class Recorder:
    """Keeps the marks of the last calls."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque(maxlen=CALLS + 1)

    def add(self, mark: Mark) -> None:
        self._marks.append(mark)

    def clear(self) -> None:
        self._marks.clear()

    def read(self) -> list[Mark]:
        """The last `CALLS` calls, or none while there are fewer."""
        return [after.since(before) for before, after in pairwise(self._marks)] if len(self._marks) > CALLS else []


def usual_seconds(calls: Sequence[Mark]) -> float:
    return statistics.median(call.seconds for call in calls)


def unpaused(calls: Sequence[Mark]) -> list[Mark]:
    longest = PAUSE * usual_seconds(calls)
    return [call for call in calls if call.seconds <= longest]
