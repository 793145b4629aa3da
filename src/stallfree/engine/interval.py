"""Which S `update_interval="auto"` takes: arithmetic on measured times, without a clock and without tensors.

The host needs `state + slot * S` seconds for a full update of its channels: the state passes through memory once per window,
each slot adds its gradients and its AdamW step. S hides if that fits the time of S calls. Measuring is done in tuner.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

HEADROOM = 0.7  # of the calls' time may be host work: copies share the memory bus, and calls differ
CALM = 0.35  # of it where training is launch-bound: the host at work slows the launching thread
SPARE = 1.25  # a smaller S has to fit with this much to spare, so that S does not go back and forth
STALLED = 0.05  # of a call's time: what stalls more needs a larger S, whatever the host's own time says


class UpdateBytes(NamedTuple):
    """Host memory traffic of an element and window, in bytes: for its state and publish, and for each slot."""

    state: int
    slot: int


class UpdateTime(NamedTuple):
    """Host seconds of a full update with this S."""

    interval: int
    seconds: float


@dataclass(frozen=True)
class HostCost:
    """Host seconds of a full update: for the state, and for each slot."""

    state: float
    slot: float

    @classmethod
    def of(cls, now: UpdateTime, traffic: UpdateBytes, earlier: UpdateTime | None = None) -> HostCost:
        """From one measurement, as if memory were the limit; from two with different S, as they say.

        A slot costs its share of the bytes at least (memory is the limit) and an equal share of all at most (arithmetic is).
        """
        least = now.seconds * traffic.slot / (traffic.state + traffic.slot * now.interval)
        slot = least
        if earlier is not None and earlier.interval != now.interval:
            measured = (now.seconds - earlier.seconds) / (now.interval - earlier.interval)
            slot = min(max(measured, least), now.seconds / now.interval)
        return cls(now.seconds - slot * now.interval, slot)

    def per_call(self, interval: int) -> float:
        return self.state / interval + self.slot


@dataclass(frozen=True)
class Choice:
    """An S, and whether it hides the host's work."""

    interval: int
    hides: bool


def staleness_limit(rho: float | None, budget: float, largest: int) -> int:
    """The largest S, at least 1, with `rho * (S + 1) / 2 <= budget`. rho None: not known, no limit."""
    if not rho:
        return largest
    return max(1, min(largest, math.floor(2 * budget / rho - 1 + 1e-9)))


def choose(
    current: int,
    largest: int,
    step_seconds: float,
    cost: HostCost,
    stall_seconds: float = 0.0,
    launch_bound: bool = False,
    loads_of: Callable[[int], Sequence[float]] = lambda interval: [1.0],
) -> Choice:
    """The smallest S up to `largest` that hides; one below the current S only if it does so with `SPARE`.

    If none does, the one with which least is left over, or the current S if that is not clearly more. Calls that stall all the
    same get a larger S whose busiest call has less to do, if there is one.

    step_seconds, stall_seconds: of a call; the first is the time without stalls. loads_of: by S, see `schedule.loads`.
    """
    every, current = range(1, largest + 1), min(current, largest)
    most, room = HEADROOM * step_seconds, (CALM if launch_bound else HEADROOM) * step_seconds

    def excess(interval: int, room: float) -> float:
        """How much does not fit, in seconds per call."""
        return statistics.fmean(max(0.0, cost.per_call(interval) * load - room) for load in loads_of(interval))

    def lightest(some: Sequence[int]) -> int:
        best = min(some, key=lambda s: excess(s, room))
        near = current in some and excess(current, room) - excess(best, room) <= STALLED * step_seconds
        return current if near else best

    def busiest(interval: int) -> float:
        return cost.per_call(interval) * max(loads_of(interval))

    hiding = [s for s in every if not excess(s, most)]
    calm = [s for s in hiding if not excess(s, room)]
    if calm:
        spare = [s for s in calm if s < current and not excess(s, room / SPARE)]
        stays = [s for s in calm if s >= current]
        wanted = (spare or stays or calm)[0]
    else:
        wanted = lightest(hiding or every)
    if stall_seconds > STALLED * step_seconds:
        lighter = [s for s in every if s > current and busiest(s) < busiest(current)]
        wanted = max(wanted, lighter[0] if lighter else current)
        return Choice(wanted, hides=wanted in hiding and wanted > current)
    return Choice(wanted, hides=wanted in hiding)


class IntervalChange(NamedTuple):
    """A new S, in force from the closes of the next call on, and why. Numbers are None where nothing was measured."""

    call: int
    interval: int
    before: int
    step_ms: float | None = None  # of a call, without stalls
    stall_ms: float | None = None  # of a call
    host_ms_before: float | None = None  # in the busiest call, by what was measured
    host_ms: float | None = None  # the same, expected
    rho: float | None = None
    limit: int | None = None  # the largest S that room and staleness budget allow
    launch_bound: bool = False

    def sentence(self) -> str:
        """For the log."""
        before, after = self.before, self.interval
        move = f"stays {before}" if after == before else f"{before} -> {after}"
        head = f"update_interval (S) {move} at call {self.call}"
        if self.step_ms is None:
            return f"{head}: as given, or as the ranks agreed"
        needs, takes = _ms(self.host_ms_before), _ms(self.step_ms)
        text = f"{head}: the host needs up to {needs} per call at S={before} and a call takes {takes}"
        if self.stall_ms and self.stall_ms > STALLED * self.step_ms:
            text += f" and {_ms(self.stall_ms)} of stalls"
        if self.launch_bound:
            text += ", bound by the launching thread, which the host at work slows"
        if after != before:
            text += f"; at S={after} it needs up to {_ms(self.host_ms)}"
        if after == self.limit and self.rho is not None:
            text += f"; max_update_interval and rho {self.rho:.2f} allow no larger S"
        return text


def _ms(value: float | None) -> str:
    assert value is not None
    return f"{value:.0f} ms" if value >= 9.5 else f"{value:.2g} ms"
