"""The number of host threads follows the host's load, and nothing else does."""

import pytest
import torch

from stallfree import ZenFlowAdamW
from stallfree.engine.calls import CALLS, Mark
from stallfree.engine.pace import AIM, MOST, REMEMBERED, Pace


class Machine:
    """A host whose work takes so long on one thread, up to a number of threads that saturate its memory; calls take `step`."""

    def __init__(self, work: float, step: float, saturates: int, most: int = 14) -> None:
        self.work, self.step, self.saturates = work, step, saturates
        self.pace, self.now, self.busy, self.stalled = Pace(most), 0.0, 0.0, 0.0
        self.interval = 4
        self.uneven = 1.0  # how much more than in the others there is to do in one of eight calls

    def run(self, calls: int, held: bool = False) -> list[int]:
        threads = []
        for call in range(calls):
            much = self.uneven if call % CALLS == 0 else 1.0
            took = much * self.work / min(self.pace.threads, self.saturates)
            self.now += max(took, self.step)
            self.busy += took
            self.stalled += max(0.0, took - self.step)
            threads.append(self.pace.after_call(Mark(self.now, self.busy, self.stalled), self.interval, held))
        return threads

    @property
    def load(self) -> float:
        return self.work / min(self.pace.threads, self.saturates) / self.step


@pytest.mark.parametrize("work", [0.2, 0.3, 0.5])
def test_an_idle_host_gives_threads_away_until_it_is_busy_enough(work):
    machine = Machine(work, step=0.1, saturates=9)
    machine.run(20 * CALLS)
    assert machine.pace.threads < 14
    assert machine.load <= MOST
    fewer = work / (machine.pace.threads - 1) / 0.1
    assert fewer > AIM, "one thread less would do"
    assert len(set(machine.run(10 * CALLS))) == 1, "it settles"
    assert machine.stalled == 0


def test_a_host_that_cannot_keep_up_has_all_threads():
    machine = Machine(1.2, step=0.1, saturates=9)
    assert set(machine.run(10 * CALLS)) == {14}


def test_shorter_calls_get_the_threads_back():
    machine = Machine(0.3, step=0.1, saturates=9)
    machine.run(20 * CALLS)
    few = machine.pace.threads
    machine.step = 0.05
    machine.run(20 * CALLS)
    assert few < machine.pace.threads < 14
    assert machine.load <= 1


def test_an_evaluation_between_calls_is_no_idle_host():
    machine = Machine(0.5, step=0.1, saturates=9)
    machine.run(20 * CALLS)
    few = machine.pace.threads
    for _ in range(10):
        machine.now += 10.0
        assert set(machine.run(CALLS - 1)) == {few}
    assert machine.stalled == 0


def test_threads_that_were_needed_are_kept_until_calls_take_longer():
    """A load that is low on average may still keep the device waiting at times."""
    machine = Machine(0.3, step=0.1, saturates=9)
    machine.run(20 * CALLS)
    few = machine.pace.threads
    machine.stalled, machine.uneven = machine.stalled + 0.1, 1.6
    machine.run(CALLS)
    machine.uneven = 1.0
    assert machine.pace.threads > few
    assert min(machine.run(20 * CALLS)) == few + 1
    machine.step = 0.2
    machine.run(20 * CALLS)
    assert machine.pace.threads < few


def test_a_need_is_forgotten_in_the_end():
    machine = Machine(0.3, step=0.1, saturates=9)
    machine.run(20 * CALLS)
    few = machine.pace.threads
    machine.stalled, machine.uneven = machine.stalled + 0.1, 1.6
    machine.run(CALLS)
    machine.uneven = 1.0
    assert machine.pace.threads > few
    machine.run((REMEMBERED + 3) * CALLS)
    assert machine.pace.threads == few


@pytest.mark.parametrize("uneven", [1.2, 1.5, 2.0])
def test_there_are_enough_threads_for_the_busiest_call(uneven):
    machine = Machine(0.3, step=0.1, saturates=9)
    machine.uneven = uneven
    machine.run(20 * CALLS)
    assert machine.load * uneven <= 1
    assert machine.pace.threads < 14
    assert machine.stalled == 0


def test_a_burst_teaches_at_once_how_many_threads_it_takes():
    machine = Machine(0.4, step=0.1, saturates=12)
    machine.run(20 * CALLS)
    few = machine.pace.threads
    machine.uneven = 1.9
    machine.run(CALLS)
    assert machine.stalled > 0
    machine.uneven, machine.stalled = 1.0, 0.0
    machine.run(4 * CALLS)
    assert machine.pace.threads > few + 1
    machine.uneven = 1.9
    machine.run(CALLS)
    assert machine.stalled == 0


def test_a_device_that_waits_for_copies_needs_no_threads():
    """The host was done long before."""
    machine = Machine(0.3, step=0.1, saturates=9)
    machine.work = 0.21
    machine.run(20 * CALLS)
    few, machine.stalled = machine.pace.threads, machine.stalled + 0.1
    assert set(machine.run(4 * CALLS)) == {few}


def test_the_busiest_call_counts_even_if_a_pause_follows():
    machine = Machine(0.3, step=0.1, saturates=9)
    machine.uneven = 2.0
    for _ in range(20):
        machine.now += 10.0
        machine.run(CALLS)
    assert machine.load * machine.uneven <= 1


@pytest.mark.parametrize("held", [True, False])
def test_what_a_warm_up_or_another_interval_has_left_to_do_needs_no_threads(held):
    """Every window closes in every call of a warm-up: the host is behind, and works that off in the first calls after it."""
    machine = Machine(1.2, step=0.1, saturates=9)
    machine.run(20, held=held)
    machine.interval = 8
    machine.run(8)
    machine.work = 0.3
    machine.run(5 * CALLS)
    assert machine.pace.threads < 14


def test_another_interval_begins_with_all_threads():
    machine = Machine(0.3, step=0.1, saturates=9)
    machine.run(20 * CALLS)
    machine.interval = 2
    assert set(machine.run(3)) == {14}


def test_held_it_has_all_threads():
    machine = Machine(0.3, step=0.1, saturates=9)
    machine.run(20 * CALLS)
    assert set(machine.run(3, held=True)) == {14}


def test_an_optimizer_limits_its_kernel_after_the_warm_up():
    weight = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = ZenFlowAdamW([weight], update_interval=2, full_warm_up_rounds=2, min_numel=0, host_threads=4)
    worker, limits = optimizer.engine.worker, []
    limit, worker.kernel.limit = worker.kernel.limit, lambda threads: (limits.append(threads), limit(threads))
    optimizer.engine.delay = lambda where: 2e-3 if where == "copy" else 0.0  # calls are long, and the host has little to do
    for _ in range(4 * CALLS):
        weight.grad = torch.randn(64, 64)
        optimizer.step()
    assert limits
    assert limits[-1] < 4
    optimizer.close()
