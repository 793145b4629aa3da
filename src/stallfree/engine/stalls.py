"""Time in which the device waits, between two events on its stream that are read when they have happened."""

from __future__ import annotations

import threading
from collections import deque

from stallfree.engine.streams import Event

PAIRS = 4096  # stalls whose times are not read yet


class Stalls:
    """Time in which the device had nothing to run because it waited for host work or a copy: in all, and in the last call."""

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0, 0.0]  # all, last call, call under way
        self._call = 0
        self._lock = threading.Lock()  # training adds, and another thread may read metrics
        self._pairs: deque[tuple[int, Event, Event]] = deque(maxlen=PAIRS)  # call, begin and end on the device

    def add(self, seconds: float) -> None:
        with self._lock:
            self._seconds[0] += seconds
            self._seconds[2] += seconds

    def add_pair(self, begin: Event, end: Event) -> None:
        """Read later. The oldest are forgotten if nobody reads them and the device is far behind."""
        self._pairs.append((self._call, begin, end))
        if len(self._pairs) >= PAIRS // 2:
            self._read_oldest()

    def finish_call(self) -> None:
        with self._lock:
            self._seconds[1:] = self._seconds[2], 0.0
            self._call += 1

    def so_far(self) -> float:
        """Seconds in all, as far as they are known without waiting."""
        while self._read_oldest():
            pass
        return self._seconds[0]

    def read(self) -> tuple[float, float]:
        """Seconds in all, and in the last call. Waits for the device."""
        for _, _, end in list(self._pairs):
            end.synchronize()
        self.so_far()
        return self._seconds[0], self._seconds[1]

    def _read_oldest(self) -> bool:
        """Read the oldest pair, if there is one and it has happened."""
        with self._lock:
            if not self._pairs or not self._pairs[0][2].query():
                return False
            call, begin, end = self._pairs.popleft()
            seconds = begin.elapsed_time(end) / 1e3
            self._seconds[0] += seconds
            if self._call - call < 2:
                self._seconds[1 if call < self._call else 2] += seconds
        return True
