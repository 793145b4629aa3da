"""A host that has nothing to do: what is left of a step's time is what launching, kernels and copies cost."""

from __future__ import annotations

from collections.abc import Sequence

from stallfree import ZenFlowAdamW
from stallfree.kernels.queue import HostQueue, QueueStats, WindowTimes
from stallfree.kernels.windows import WindowWork


class IdleQueue(HostQueue):
    """Takes every window as done when it is submitted."""

    error = None

    def stats(self) -> QueueStats:
        return QueueStats(0, 0, 0.0, 0.0)

    def history(self) -> list[WindowTimes]:
        return []

    def _start(self, windows: Sequence[WindowWork], tickets: Sequence[int]) -> None:
        if tickets:
            self._last = self._word.value = tickets[-1]

    def _completed(self) -> int:
        return self._last

    def _settled(self, ticket: int, seconds: float) -> bool:
        return True

    def _stop(self) -> None:
        pass


def take_host_away(optimizer: ZenFlowAdamW) -> None:
    """From now on nothing is replayed, and what is published is whatever slots hold: the weights mean nothing any more."""
    worker = optimizer.engine.worker
    worker.queue.drain()
    worker.queue.close()
    worker.queue = IdleQueue(worker.timeline.memory)
