"""Measures calls and host work, and lets `update_interval="auto"` follow them: the only place where timing influences a result.

Every change is logged and recorded; `interval_schedule` repeats a record without measuring anything.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from stallfree.engine.blocks import shares_by_phase
from stallfree.engine.calls import CALLS, Mark, Recorder, unpaused
from stallfree.engine.interval import (
    Choice,
    HostCost,
    IntervalChange,
    UpdateBytes,
    UpdateTime,
    choose,
    staleness_limit,
)
from stallfree.engine.schedule import loads

if TYPE_CHECKING:
    from stallfree.config import ZenFlowConfig
    from stallfree.engine.pipeline import Engine
    from stallfree.engine.schedule import Clock

APART = 64  # calls between two decisions at least
CHANGED = 0.15  # by how much a time has to change to be decided upon again
TOGETHER = 16  # calls after which several ranks compare what they want: each time waits for the device
LEAD = 0.4  # of a call: a device with less still to do than that waits for the launching thread

logger = logging.getLogger("stallfree")


class Measured(NamedTuple):
    """Seconds: of a call without stalls, of a call's stalls, and of a full host update."""

    step: float
    stall: float
    update: UpdateTime
    launch_bound: bool = False  # the device is soon done with what it is given


class IntervalTuner:
    """Sets the clock's S after a call. Looks at the device once per decision, never otherwise."""

    def __init__(self, config: ZenFlowConfig) -> None:
        self.config = config
        self.schedule = dict(config.interval_schedule or {})
        self.by_user = False  # somebody has called set_update_interval
        self.history: list[IntervalChange] = []
        self.now = time.perf_counter
        self.shares = shares_by_phase
        self._recorder = Recorder()
        self._from = 0  # the first call that may be measured
        self._next = 0  # the first call that may decide again
        self._basis: Measured | None = None  # of the last decision, if it changed nothing
        self._noticed = False  # that times have changed, and are measured anew
        self._earlier: UpdateTime | None = None  # of the S before
        self._advised = False
        self._wanted: int | None = None  # the S of the last decision, where ranks change it together

    @property
    def deciding(self) -> bool:
        return self.config.update_interval == "auto" and self.config.interval_schedule is None and not self.by_user

    def measures(self, clock: Clock) -> bool:
        """Whether a decision is near, for which the host has to show how fast it can be."""
        near = clock.call + CALLS + clock.interval >= self._next  # what was begun more slowly is done by then
        return self.deciding and near and (self._basis is None or self._noticed)

    def after_call(self, engine: Engine) -> None:
        clock = engine.clock
        if clock.call in self.schedule and not self.by_user:
            self._change(clock, IntervalChange(clock.call, self.schedule[clock.call], clock.interval))
        if not self.deciding or not engine.blocks:
            return
        self._follow(engine)
        if engine.agreement.several and clock.call % TOGETHER == 0:
            self._agree(engine)

    def _follow(self, engine: Engine) -> None:
        """Take a measurement, and decide if there is something new."""
        clock = engine.clock
        if clock.warming:
            self._measure_anew(clock, clock.interval)
        if clock.call < self._from:
            return
        stats = engine.worker.queue.stats()
        stalled = engine.link.stalls.so_far()
        self._recorder.add(Mark(self.now(), stats.busy_seconds, stalled, stats.elements, engine.link.lead()))
        if clock.call < self._next or (measured := self._measure(engine)) is None:
            return
        noticed, self._noticed = self._noticed, False
        if self._basis is None or (noticed and self._differs(measured, self._basis)):
            self._decide(engine, measured)
        elif noticed:
            self._next = clock.call + APART
        elif self._differs(measured, self._basis, paced=engine.worker.pace.threads < engine.worker.pace.most):
            self._noticed = True
            self._recorder.clear()  # of some calls from before

    def set_by_user(self, clock: Clock, interval: int) -> None:
        """From now on S is what the user says."""
        if self.deciding:
            logger.info('update_interval="auto" is off: S was set to %d', interval)
        elif not self.by_user and any(call > clock.call for call in self.schedule):
            logger.info("interval_schedule is over: update_interval (S) was set to %d", interval)
        self.by_user = True
        self._change(clock, IntervalChange(clock.call, interval, clock.interval))

    def _measure_anew(self, clock: Clock, before: int) -> None:
        """Once no window of another S is under way."""
        self._recorder.clear()
        self._noticed = False
        self._from = clock.call + max(before, clock.interval) + self.config.lag

    def _measure(self, engine: Engine) -> Measured | None:
        calls = self._recorder.read()
        replayed = sum(call.elements for call in calls)
        if not replayed:
            return None
        step = statistics.median(max(0.0, call.seconds - call.stalled) for call in calls)
        stall = statistics.fmean(call.stalled for call in unpaused(calls))
        rate = sum(call.busy for call in calls) / replayed  # of a gradient
        elements = sum(block.block.deferred_numel for block in engine.blocks)
        interval = engine.clock.interval
        leads = [call.lead for call in calls if call.lead is not None]
        launch_bound = bool(leads) and statistics.median(leads) < LEAD
        return Measured(step, stall, UpdateTime(interval, rate * interval * elements), launch_bound)

    def _differs(self, measured: Measured, basis: Measured, paced: bool = False) -> bool:
        """Whether it is worth a decision. paced: the host is slow because it may be."""
        pairs = [(measured.step, basis.step), (measured.step + measured.stall, basis.step + basis.stall)]
        if not paced:
            pairs.append((measured.update.seconds, basis.update.seconds))
        return any(abs(now - then) > CHANGED * then for now, then in pairs)

    def _decide(self, engine: Engine, measured: Measured) -> None:
        clock, config = engine.clock, self.config
        rho, _ = engine.meter.rho()  # waits for the device
        limit = staleness_limit(rho, config.staleness_budget, config.max_update_interval)
        dtype = engine.blocks[0].block.dtype
        moments = 4 if config.moments_dtype == "float32" else 2
        traffic = UpdateBytes(state=2 * (4 + 2 * moments) + dtype.itemsize, slot=dtype.itemsize)
        cost = HostCost.of(measured.update, traffic, self._earlier)
        shares = self.shares([block.block for block in engine.blocks])
        by_interval = {s: loads(shares, s, config.lag) for s in range(1, config.max_update_interval + 1)}
        choice = choose(
            clock.interval, limit, measured.step, cost, measured.stall, measured.launch_bound, by_interval.__getitem__
        )
        before, after = (max(by_interval[s]) * cost.per_call(s) * 1e3 for s in (clock.interval, choice.interval))
        change = IntervalChange(
            clock.call,
            choice.interval,
            clock.interval,
            step_ms=measured.step * 1e3,
            stall_ms=measured.stall * 1e3,
            host_ms_before=before,
            host_ms=after,
            rho=rho,
            limit=limit,
            launch_bound=measured.launch_bound,
        )
        first = self._next == 0
        self._next, self._basis = clock.call + APART, measured
        if engine.agreement.several:
            self._wanted = choice.interval
            logger.info("this rank asks for: %s", change.sentence())
        elif choice.interval != clock.interval:
            self._earlier, self._basis = measured.update, None
            self._change(clock, change)
        elif first:
            logger.info("%s", change.sentence())
        if not choice.hides:
            self._advise(choice, change)

    def _agree(self, engine: Engine) -> None:
        """Once every rank has decided: the largest S that one asks for, so that the slowest host hides too."""
        unknown = self.config.max_update_interval + 1
        largest = -engine.agreement.least(-(self._wanted or unknown), engine.device)
        if largest not in (unknown, engine.clock.interval):
            self._earlier, self._basis = None if self._basis is None else self._basis.update, None
            self._change(engine.clock, IntervalChange(engine.clock.call, largest, engine.clock.interval))

    def _change(self, clock: Clock, change: IntervalChange) -> None:
        self.history.append(change)
        clock.interval = change.interval
        logger.info("%s", change.sentence())
        self._measure_anew(clock, change.before)

    def _advise(self, choice: Choice, change: IntervalChange) -> None:
        if self._advised:
            return
        self._advised = True
        ways = ["a larger batch", "a larger topk_ratio", "more host threads"]
        if self.config.moments_dtype == "float32":
            ways.insert(0, 'moments_dtype="bfloat16"')
        if change.limit is not None and change.limit < self.config.max_update_interval:
            ways.append("a larger staleness_budget")
        logger.warning(
            "no update_interval (S) up to %d hides the host's work: it needs up to %.3g ms per call at S=%d, and a call takes "
            "%.3g ms, with %.3g ms of stalls at S=%d. What would help: %s",
            change.limit, change.host_ms, choice.interval, change.step_ms, change.stall_ms, change.before, ", ".join(ways),
        )  # fmt: skip

    # Saving and loading

    def state(self) -> dict[str, Any]:
        """Records are text, one value each: torch sets a full state only if its lists are as long as those that are here."""
        return {"by_user": self.by_user, "schedule": self._entries, "history": json.dumps(self.history)}

    @property
    def _entries(self) -> str:
        return json.dumps(sorted(self.schedule.items()))

    def load(self, clock: Clock, saved: dict[str, Any], same: bool) -> None:
        """Take over the record and, if the saved run's settings of S are this one's, what its user set. Or follow the schedule.

        same: `update_interval` is the same.
        """
        history = saved.get("history", "[]")
        changes = json.loads(history) if isinstance(history, str) else history  # earlier states have lists
        self.history = [IntervalChange(*change) for change in changes]
        if same and (not self.schedule or self._entries == saved.get("schedule")):
            self.by_user = saved.get("by_user", False)
        so_far = [interval for call, interval in sorted(self.schedule.items()) if call <= clock.call]
        if so_far and not self.by_user and so_far[-1] != clock.interval:
            self._change(clock, IntervalChange(clock.call, so_far[-1], clock.interval))
        self._next, self._basis, self._earlier, self._wanted = 0, None, None, None
        self._measure_anew(clock, clock.interval)
