"""What closes, selects and is due at call t: pure arithmetic on integers, the same on every machine and at any speed.

Calls of `step()` are counted from 1, skipped ones included, because the launching thread cannot know what the device decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stallfree.config import ZenFlowConfig

MIN_WARM_UP = 4  # calls, for full_warm_up_rounds="auto"


@dataclass
class Clock:
    """The calls so far and the length of the warm-up."""

    interval: int  # S, which a block adopts at its next close
    warm_up: int | None  # the last call of the warm-up; None: the learning rate still rises
    call: int = 0
    last_lr: float = float("-inf")

    @classmethod
    def of(cls, config: ZenFlowConfig) -> Clock:
        interval = (config.interval_schedule or {}).get(0, config.initial_interval)
        return cls(interval, None if config.full_warm_up_rounds == "auto" else config.full_warm_up_rounds)

    def tick(self, lr: float) -> None:
        """Begin the next call, whose largest learning rate is lr."""
        self.call += 1
        if self.warm_up is None:
            if self.call >= MIN_WARM_UP and lr <= self.last_lr:
                self.warm_up = self.call
            self.last_lr = lr

    @property
    def warming(self) -> bool:
        """Whether this call has S=1 and lag 0."""
        return self.warm_up is None or self.call <= self.warm_up

    @property
    def warming_next(self) -> bool:
        return self.warm_up is None or self.call < self.warm_up


@dataclass
class BlockSchedule:
    """Where one block stands in its window."""

    phase: int
    interval: int = 1  # the window that is open
    last_selection: int = 0  # the call of the last selection; 0: none yet

    def closes(self, clock: Clock) -> bool:
        return clock.warming or clock.call % self.interval == self.phase % self.interval

    def close(self, clock: Clock, lag: int) -> int:
        """Close the window after this call and adopt S; returns the call in which it is due."""
        self.interval = 1 if clock.warming_next else clock.interval
        return clock.call + (0 if clock.warming else lag)

    def wants_selection(self, clock: Clock, select_interval: int) -> bool:
        """Whether a new selection takes effect at this close."""
        if clock.warming_next:
            return False
        return not self.last_selection or clock.call - self.last_selection >= select_interval


def loads(shares: Sequence[float], interval: int, lag: int) -> list[float]:
    """What the host has to do for each call in turn, 1 on average: what closes in `lag` calls, in which it has to be done.

    shares: of all elements, by phase. An S that does not divide their number has calls in which more phases close.
    """
    closing = [sum(shares[first::interval]) for first in range(interval)]
    calls = min(max(lag, 1), interval)
    return [sum((closing + closing)[first : first + calls]) * interval / calls for first in range(interval)]


def slots_needed(config: ZenFlowConfig) -> int:
    """Slots of a block: those of a window, and those collected until it is published."""
    return config.max_update_interval + config.lag
