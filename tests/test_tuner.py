"""update_interval="auto" in an optimizer, on a clock and a host that are made up."""

import copy
import json
import logging
import math

import pytest
import torch
from histories import assert_identical, backward
from torch import nn

import stallfree.limits
import stallfree.planner
from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine.calls import CALLS
from stallfree.engine.stalls import Stalls
from stallfree.engine.tuner import APART
from stallfree.kernels.queue import QueueStats

SETTINGS = dict(topk_ratio=0.25, full_warm_up_rounds=3, select_interval=10, min_numel=0, block_numel=1, staleness_budget=50.0)
FIRST = 3 + 2 + 1 + 8  # the warm-up, windows of S=2 in order, eight calls


class Run:
    """Two weights; a call takes `step` seconds, an update on the host `host * (1 + S / 7)`, and what does not fit stalls."""

    def __init__(self, *, made_up: bool = True, config: ZenFlowConfig | None = None, **settings) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((12, 8), (8, 12))]
        config = config or ZenFlowConfig(**SETTINGS | settings)
        self.optimizer = ZenFlowAdamW([("a", self.params[0]), ("b", self.params[1])], lr=1e-2, config=config)
        self.step, self.host = 0.1, 0.1  # host: of the state; a slot takes a seventh of it, as its bytes do
        self.seconds = self.stalled = self.busy = 0.0
        self.elements = self.looks = 0
        self.seen: list[list[torch.Tensor]] = []
        if made_up:
            engine = self.optimizer.engine
            engine.tuner.now = lambda: self.seconds
            engine.tuner.shares = lambda blocks: [1 / 840] * 840  # every call has as much to do as others, at any S
            engine.link.stalls.so_far = lambda: self.stalled
            engine.worker.queue.stats = lambda: QueueStats(0, self.elements, self.busy, 0.0)
            rho = engine.meter.rho

            def look():
                self.looks += 1
                return rho()

            engine.meter.rho = look

    @property
    def interval(self) -> int:
        return self.optimizer.engine.clock.interval

    @property
    def changes(self) -> list[tuple[int, int, int]]:
        return [(change.call, change.before, change.interval) for change in self.optimizer.interval_history]

    def play(self, calls: int) -> None:
        for _ in range(calls):
            clock = self.optimizer.engine.clock
            generator = torch.Generator().manual_seed(clock.call)
            backward(self.params, [torch.randn(p.shape, generator=generator) for p in self.params])
            host = self.host * (1 / clock.interval + 1 / 7)
            stall = max(0.0, host - self.step)
            self.seconds, self.stalled = self.seconds + self.step + stall, self.stalled + stall
            self.busy += host
            self.elements += sum(block.block.deferred_numel for block in self.optimizer.engine.blocks)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seen.append([p.detach().clone() for p in self.params])

    def finish(self) -> list[list[torch.Tensor]]:
        self.optimizer.flush()
        self.seen.append([p.detach().clone() for p in self.params])
        self.optimizer.close()
        return self.seen


@pytest.mark.parametrize("lead, interval", [(0.1, 5), (0.9, 2)])
def test_a_device_that_is_soon_done_waits_for_the_launching_thread(lead, interval):
    """The host needs 64 ms of 100 at S=2: that hides, and is too much where the launching thread is the limit."""
    run = Run()
    run.optimizer.engine.link.lead = lambda: lead
    run.play(20)
    assert run.interval == interval
    assert run.optimizer.interval_history == () or run.optimizer.interval_history[0].launch_bound
    run.finish()


def test_the_first_decision_comes_after_the_warm_up_and_eight_calls():
    run = Run()
    run.host = 0.2  # 128.6 ms per call at S=2, 78.6 at S=4, 68.6 at S=5
    run.play(FIRST - 1)
    assert (run.interval, run.changes, run.looks) == (2, [], 0)
    run.play(1)
    assert run.changes == [(FIRST, 2, 5)]
    change = run.optimizer.interval_history[0]
    assert (change.step_ms, change.stall_ms) == (pytest.approx(100), pytest.approx(28.6, abs=0.1))
    assert (change.host_ms_before, change.host_ms) == (pytest.approx(128.6, abs=0.1), pytest.approx(68.6, abs=0.1))
    assert 0 < change.rho < 1
    assert (run.optimizer.metrics()["interval"], run.optimizer.metrics()["interval_changes"]) == (5, 1)
    run.play(80)
    assert (run.changes[1:], run.looks) == ([], 4)  # two are metrics()'s own, one judges the choice
    run.optimizer.close()


def test_it_follows_the_times_and_looks_at_the_device_only_to_decide(caplog, monkeypatch):
    run = Run()
    monkeypatch.setattr(run.optimizer.engine.link.stalls, "read", lambda: pytest.fail("waits for the device"))
    with caplog.at_level(logging.INFO, "stallfree"):
        run.play(FIRST)  # 64 of 100 ms
        run.play(100)  # nothing new
        assert (run.changes, run.looks) == ([], 1)
        run.step = 0.04  # at S=8 27 of 40 ms
        run.play(13)  # four until it is noticed, nine marks
        assert (run.changes, run.looks) == ([(FIRST + 113, 2, 8)], 2)
        run.step = 0.25  # at S=1 114 of 250 ms
        run.play(63)
        assert run.looks == 2
        run.play(64)
        assert [(before, after) for _, before, after in run.changes] == [(2, 8), (8, 1)]
    assert run.looks == 3
    assert [record.getMessage() for record in caplog.records if "->" in record.getMessage()] == [
        change.sentence() for change in run.optimizer.interval_history
    ]
    run.optimizer.close()


def test_pauses_and_small_changes_are_not_followed():
    run = Run()
    run.play(FIRST)
    for t in range(200):
        run.step = 0.1 * (1 + 0.1 * math.sin(t))
        run.seconds += 30 * (t % 20 == 0)  # an evaluation
        run.stalled += 5 * (t % 20 == 0)
        run.play(1)
    assert (run.changes, run.looks) == ([], 1)
    run.optimizer.close()


def test_what_hides_nowhere_is_said_once_with_what_helps(caplog):
    run = Run()
    run.step = 0.02
    with caplog.at_level(logging.INFO, "stallfree"):
        run.play(300)
    assert run.changes == [(FIRST, 2, 8)]
    (warned,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for way in ("no update_interval (S) up to 8", "bfloat16", "larger batch", "larger topk_ratio", "host threads"):
        assert way in warned
    run.optimizer.close()


def test_the_staleness_budget_holds():
    run = Run(staleness_budget=1e-6)
    run.host = 1.0
    run.play(FIRST)
    assert run.changes == [(FIRST, 2, 1)]
    run.optimizer.close()


def test_it_stays_one_while_the_learning_rate_rises():
    run = Run(full_warm_up_rounds="auto")
    for t in range(40):
        run.optimizer.param_groups[0]["lr"] = 1e-4 * (t + 1)
        run.play(1)
    assert (run.changes, run.looks) == ([], 0)
    assert all(block.schedule.interval == 1 for block in run.optimizer.engine.blocks)
    run.play(30)
    assert run.looks == 1
    run.optimizer.close()


def test_stalls_are_counted_without_waiting_for_those_under_way():
    class Moment:
        def __init__(self, happened: bool) -> None:
            self.happened = happened

        def query(self) -> bool:
            return self.happened

        def synchronize(self) -> None:
            pytest.fail("waits for the device")

        def elapsed_time(self, end: "Moment") -> float:
            return 40.0  # ms

    stalls = Stalls()
    stalls.add(0.5)
    for happened in (True, True, False, True):
        stalls.add_pair(Moment(True), Moment(happened))
    assert stalls.so_far() == pytest.approx(0.58)
    assert stalls.so_far() == pytest.approx(0.58)


# Records


def changing(run: Run) -> Run:
    """Plays calls whose S becomes 6, then 1, and is then set by the user."""
    run.play(FIRST)
    run.step = 0.04
    run.play(90)
    run.step = 0.25
    run.play(90)
    assert [after for _, _, after in run.changes] == [8, 1]
    run.optimizer.set_update_interval(3)
    run.play(10)
    return run


def repeating(run: Run) -> ZenFlowConfig:
    record = {change.call: change.interval for change in run.optimizer.interval_history}
    return ZenFlowConfig.from_json(run.optimizer.config.replace(interval_schedule=record).to_json())


def test_a_recorded_run_is_repeated_bit_for_bit():
    first = changing(Run())
    again = Run(made_up=False, config=repeating(first))
    again.play(len(first.seen))
    assert again.changes == first.changes
    assert_identical(again.finish(), first.finish(), "the schedule of the first run")


def test_an_interval_set_before_the_first_call_is_repeated_too():
    runs = [Run(made_up=False)]
    runs[0].optimizer.set_update_interval(5)
    runs[0].play(20)
    runs.append(Run(made_up=False, config=repeating(runs[0])))
    runs[1].play(20)
    assert_identical(runs[1].finish(), runs[0].finish(), "S from the start")


def test_a_resumed_run_keeps_its_record_and_goes_on():
    first = Run()
    first.play(FIRST)
    first.step = 0.04
    first.play(90)
    state = copy.deepcopy(first.optimizer.state_dict())
    cut = len(first.seen)
    first.step = 0.25
    first.play(90)
    assert [after for _, _, after in first.changes] == [8, 1]

    resumed = Run(made_up=False, config=repeating(first))
    earlier = copy.deepcopy(state)
    tuner = earlier["state"][0]["clock"]["tuner"]  # shared by all entries
    tuner["history"] = json.loads(tuner["history"])
    for saved in (earlier, state):  # the record was a list of lists once
        resumed.optimizer.load_state_dict(saved)
        assert resumed.optimizer.interval_history == first.optimizer.interval_history[:1]
    resumed.play(90)
    assert resumed.changes == first.changes

    free = Run()
    free.optimizer.load_state_dict(state)
    assert free.interval == 8
    free.step = 0.25
    free.play(90)
    assert [after for _, _, after in free.changes] == [8, 1]
    free.optimizer.close()
    assert_identical(resumed.finish(), first.finish()[cut:], "resumed")


def test_what_the_user_sets_stays_also_after_resuming(caplog):
    run = Run()
    with caplog.at_level(logging.INFO, "stallfree"):
        run.optimizer.set_update_interval(3)
    assert 'update_interval="auto" is off' in caplog.text
    run.play(5)
    resumed = Run()
    resumed.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for each in (run, resumed):
        each.host = 1.0
        each.play(40)
        assert (each.interval, each.changes, each.looks) == (3, [(0, 2, 3)], 0)
        each.optimizer.close()


@pytest.mark.parametrize(
    "schedule, interval", [({0: 2, 10: 4}, 4), ({20: 4}, 4), ({0: 4, 10: 5, 21: 2}, 5), ({0: 2}, 2), ({21: 4}, 3)]
)
def test_a_loaded_state_is_where_the_schedule_is(schedule, interval, caplog):
    """At its last entry so far; before the first one S is what it was."""
    saved = Run(made_up=False, update_interval=3, max_update_interval=5)
    saved.play(20)
    resumed = Run(made_up=False, update_interval=3, max_update_interval=5, interval_schedule=schedule)
    with caplog.at_level(logging.INFO, "stallfree"):
        resumed.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
    assert resumed.interval == interval
    assert resumed.changes == ([] if interval == 3 else [(20, 3, interval)])
    assert ("update_interval" in caplog.text) == (interval != 3)
    resumed.play(1)
    assert resumed.interval == schedule.get(21, interval)
    for run in (saved, resumed):
        run.optimizer.close()


def test_what_the_user_sets_ends_the_schedule(caplog):
    settings = dict(made_up=False, interval_schedule={0: 2, 10: 5, 30: 6})
    run = Run(**settings)
    run.play(3)
    with caplog.at_level(logging.INFO, "stallfree"):
        run.optimizer.set_update_interval(4)
        run.optimizer.set_update_interval(3)
    assert caplog.text.count("interval_schedule is over") == 1
    run.play(17)
    assert run.changes == [(3, 2, 4), (3, 4, 3)]
    resumed, other = Run(**settings), Run(made_up=False, interval_schedule={0: 2, 10: 5})
    for each in (resumed, other):
        each.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        each.play(20)
        each.optimizer.close()
    assert resumed.interval == 3, "of the same schedule"
    assert other.interval == 5, "another schedule is a new setting"
    run.optimizer.close()


def test_a_setting_at_the_end_of_the_schedule_ends_nothing(caplog):
    run = Run(made_up=False, interval_schedule={0: 2, 3: 4})
    run.play(3)
    with caplog.at_level(logging.INFO, "stallfree"):
        run.optimizer.set_update_interval(3)
    assert "is over" not in caplog.text
    run.optimizer.close()


# Room


def available(monkeypatch, room: int, share: float = 1 / 0.9) -> None:
    """Memory for a max_update_interval and little more."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((12, 8), (8, 12))]
    named = list(zip("ab", params, strict=True))
    plan = stallfree.planner.plan(named, ZenFlowConfig(**SETTINGS, max_update_interval=room))
    needed = plan.host_beside(params[0].device)
    monkeypatch.setattr(stallfree.limits, "available_host_bytes", lambda: math.ceil(share * needed))


@pytest.mark.parametrize("room", [2, 4, 8])
def test_room_is_what_memory_allows(monkeypatch, room):
    available(monkeypatch, room)
    run = Run()
    assert run.optimizer.config.max_update_interval == room
    run.optimizer.close()
    with_room = Run(max_update_interval=2)
    assert with_room.optimizer.config.max_update_interval == 2
    with_room.optimizer.close()


def test_without_a_tenth_to_spare_it_is_two_and_without_memory_an_error(monkeypatch):
    available(monkeypatch, 2, 1.0)
    run = Run()
    assert run.optimizer.config.max_update_interval == 2
    run.optimizer.close()
    available(monkeypatch, 2, 0.99)
    with pytest.raises(MemoryError, match="in flight"):
        Run()


def test_a_resumed_run_keeps_the_room_it_began_with(monkeypatch):
    first = Run()
    first.play(FIRST)
    state = copy.deepcopy(first.optimizer.state_dict())
    available(monkeypatch, 4)
    resumed = Run()
    assert resumed.optimizer.config.max_update_interval == 4
    monkeypatch.undo()
    resumed.optimizer.load_state_dict(state)
    assert resumed.optimizer.config.max_update_interval == 8
    first.play(10)
    resumed.play(10)
    assert_identical(resumed.finish(), first.finish()[FIRST:], "resumed")

    given = Run(max_update_interval=4)
    with pytest.raises(ValueError, match="max_update_interval=8"):
        given.optimizer.load_state_dict(state)
    given.optimizer.close()


def test_the_host_has_all_threads_only_while_it_is_measured():
    run = Run()
    run.host = 0.2
    held, worker = [], run.optimizer.engine.worker
    keep_pace, worker.keep_pace = worker.keep_pace, lambda *how: (held.append(how[-1]), keep_pace(*how))
    run.play(FIRST)
    assert all(held[:-1]), "until the first decision"
    assert run.changes == [(FIRST, 2, 5)]
    held.clear()
    run.play(100)
    first = held.index(True)
    assert APART - 2 * CALLS < first < APART - CALLS, "which is judged once more"
    assert sum(held) <= CALLS + 5 + 1
    run.optimizer.close()
