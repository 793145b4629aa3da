"""Decisions of update_interval="auto" as tables: numbers in, S out."""

import pytest

from stallfree.engine.interval import (
    HEADROOM,
    Choice,
    HostCost,
    IntervalChange,
    UpdateBytes,
    UpdateTime,
    choose,
    staleness_limit,
)
from stallfree.engine.schedule import loads

FP32, BF16 = UpdateBytes(state=26, slot=2), UpdateBytes(state=18, slot=2)  # bf16 weights; type of the moments
H200 = UpdateTime(4, 1.39e9 * 0.235e-9)  # 1.39e9 deferred parameters, measured at S=4


def by_bytes(now: UpdateTime, interval: int, traffic: UpdateBytes = FP32) -> UpdateTime:
    """What that host would measure at another S if memory is its limit."""
    ratio = (traffic.state + traffic.slot * interval) / (traffic.state + traffic.slot * now.interval)
    return UpdateTime(interval, now.seconds * ratio)


@pytest.mark.parametrize(
    "traffic, per_call_ms", [(FP32, {1: 269, 2: 144, 3: 102, 4: 82, 8: 50}), (BF16, {2: 138, 4: 82, 8: 53})]
)
def test_one_measurement_is_scaled_by_bytes(traffic, per_call_ms):
    cost = HostCost.of(H200, traffic)
    assert {s: round(cost.per_call(s) * 1e3) for s in per_call_ms} == per_call_ms


@pytest.mark.parametrize(
    "earlier, now, state, slot",
    [
        ((2, 0.30), (4, 0.40), 0.20, 0.05),  # as measured
        ((2, 0.20), (4, 0.40), 0.0, 0.1),  # arithmetic is the limit
        ((2, 0.10), (4, 0.40), 0.0, 0.1),  # not more than that
        ((2, 0.50), (4, 0.34), 0.26, 0.02),  # less than the bytes is noise
        ((4, 0.50), (4, 0.34), 0.26, 0.02),  # the same S says nothing
    ],
)
def test_two_measurements_say_what_a_slot_costs(earlier, now, state, slot):
    cost = HostCost.of(UpdateTime(*now), FP32, UpdateTime(*earlier))
    assert (cost.state, cost.slot) == (pytest.approx(state), pytest.approx(slot))


@pytest.mark.parametrize(
    "now, traffic, current, step_ms, stall_ms, interval, hides",
    [
        # One H200, 16 cores
        (by_bytes(H200, 2), FP32, 2, 105, 39, 5, True),  # the first decision, at S=2
        (by_bytes(H200, 2), FP32, 2, 220, 0, 2, True),
        (by_bytes(H200, 5), FP32, 5, 105, 0, 5, True),  # the next: what was expected holds
        (H200, FP32, 4, 220, 0, 3, True),  # S=2 would fit, but not with a quarter to spare
        (H200, FP32, 4, 500, 0, 1, True),
        (H200, BF16, 4, 120, 0, 4, True),
        (by_bytes(H200, 2), FP32, 2, 40, 104, 8, False),  # nothing hides it
        # A small model and an idle host
        (UpdateTime(2, 0.001), FP32, 2, 50, 0, 1, True),
        # A slow host, at the edges
        (UpdateTime(2, 0.300), FP32, 2, 100, 50, 6, True),
        (UpdateTime(2, 0.300), FP32, 2, 90, 60, 7, True),
        # It would fit, but calls stall all the same
        (UpdateTime(2, 0.100), FP32, 2, 100, 10, 3, True),
        (UpdateTime(8, 0.100), FP32, 8, 100, 10, 8, False),
    ],
)
def test_the_smallest_interval_that_hides(now, traffic, current, step_ms, stall_ms, interval, hides):
    cost = HostCost.of(now, traffic)
    assert choose(current, 8, step_ms / 1e3, cost, stall_ms / 1e3) == Choice(interval, hides)


@pytest.mark.parametrize(
    "step_ms, interval, hides",
    [
        (145, 8, True),  # 35% of the call's time is 51 ms: S=8 needs 50
        (200, 5, True),
        (75, 8, True),  # no S leaves 65% of it, but S=8 hides
        (55, 8, False),
    ],
)
def test_launch_bound_training_gets_a_calmer_memory(step_ms, interval, hides):
    cost = HostCost.of(by_bytes(H200, 2), FP32)
    assert choose(2, 8, step_ms / 1e3, cost, launch_bound=True) == Choice(interval, hides)


@pytest.mark.parametrize(
    "shares, interval, lag, expected",
    [
        ([1 / 8] * 8, 4, 1, [1] * 4),
        ([1 / 8] * 8, 3, 1, [9 / 8, 9 / 8, 6 / 8]),
        ([1 / 8] * 8, 6, 1, [12 / 8, 12 / 8, 6 / 8, 6 / 8, 6 / 8, 6 / 8]),
        ([0.3] + [0.1] * 7, 8, 1, [2.4] + [0.8] * 7),  # one large block
        ([1.0], 4, 1, [4, 0, 0, 0]),  # all blocks close together: no stagger
        ([1.0], 4, 4, [1] * 4),  # and have as many calls for it
        ([0.5, 0.5], 1, 0, [1]),
    ],
)
def test_loads_of_calls(shares, interval, lag, expected):
    assert loads(shares, interval, lag) == pytest.approx(expected)


@pytest.mark.parametrize(
    "shares, step_ms, interval, hides",
    [
        ([1 / 8] * 8, 75, 8, True),  # S=7 would need 54 ms on average, and 95 where two phases close
        ([1 / 8] * 8, 170, 3, True),
        ([1 / 8] * 8, 160, 4, True),  # S=3: 115 where three phases close
        ([0.3] + [0.1] * 7, 105, 8, False),  # S=4 needs 82 on average and 131 with the large block; more than 74 at any S
        ([0.3] + [0.1] * 7, 190, 4, True),
    ],
)
def test_what_closes_in_the_busiest_call_has_to_hide(shares, step_ms, interval, hides):
    cost = HostCost.of(by_bytes(H200, 2), FP32)
    chosen = choose(2, 8, step_ms / 1e3, cost, loads_of=lambda interval: loads(shares, interval, 1))
    assert chosen == Choice(interval, hides)


EVEN, LARGE = [1 / 8] * 8, [0.3] + [0.1] * 7


@pytest.mark.parametrize("shares", [EVEN, LARGE])
@pytest.mark.parametrize("launch_bound", [False, True])
def test_what_is_said_to_hide_does(shares, launch_bound):
    for state, slot in ((1.0, 0.077), (1.0, 0.2), (0.3, 0.3)):
        cost = HostCost(state, slot)
        for step in (0.02 * n for n in range(3, 80)):
            fitting = [s for s in range(1, 9) if max(loads(shares, s, 1)) * cost.per_call(s) <= HEADROOM * step]
            for current in range(1, 9):
                for stall in (0.0, 0.1 * step):
                    chosen = choose(current, 8, step, cost, stall, launch_bound, lambda s: loads(shares, s, 1))
                    if stall:
                        assert chosen.interval >= current
                    else:
                        assert chosen.hides is (chosen.interval in fitting) is bool(fitting)


def test_stalls_ask_for_a_larger_interval_only_if_its_busiest_call_has_less_to_do():
    """S of 5 to 7 have calls in which two of eight phases close."""
    cost = HostCost(1.0, 0.077)
    assert choose(4, 8, 1.0, cost, 0.1, loads_of=lambda s: loads(EVEN, s, 1)) == Choice(8, hides=True)
    assert choose(8, 8, 1.0, cost, 0.1, loads_of=lambda s: loads(EVEN, s, 1)) == Choice(8, hides=False)


def test_where_nothing_hides_a_tenth_more_or_less_changes_nothing():
    cost, current = HostCost(1.0, 0.2), 2
    seen = []
    for step in (0.78, 0.70, 0.78, 0.85, 0.78, 0.70):
        current = choose(current, 8, step, cost, loads_of=lambda s: loads(LARGE, s, 1)).interval
        seen.append(current)
    assert len(set(seen)) == 1


def test_no_interval_above_the_limit():
    cost = HostCost.of(by_bytes(H200, 2), FP32)
    assert choose(2, 3, 0.105, cost) == Choice(3, hides=False)
    assert choose(8, 3, 1.0, cost) == Choice(1, hides=True)
    assert choose(2, 1, 0.105, cost) == Choice(1, hides=False)


@pytest.mark.parametrize("noise", [0.9, 0.95, 1.05, 1.1])
@pytest.mark.parametrize("step_ms", range(40, 400, 7))
def test_a_tenth_of_noise_does_not_bring_an_interval_back(step_ms, noise):
    """What was chosen at one measurement is not given up for a smaller S at the next."""
    chosen = choose(2, 8, step_ms / 1e3, HostCost.of(by_bytes(H200, 2), FP32)).interval
    again = UpdateTime(chosen, by_bytes(H200, chosen).seconds * noise)
    if chosen > 2:
        assert choose(chosen, 8, step_ms / 1e3, HostCost.of(again, FP32)).interval >= chosen


@pytest.mark.parametrize(
    "rho, budget, limit", [(None, 1.0, 8), (0.0, 1.0, 8), (0.15, 1.0, 8), (0.25, 1.0, 7), (0.4, 1.0, 4), (0.72, 1.0, 1),
                           (1.0, 1.0, 1), (1.0, 0.1, 1), (0.4, 0.5, 1), (0.2, 0.5, 4), (0.72, 3.0, 7)],
)  # fmt: skip
def test_the_staleness_budget_bounds_the_mean_delay(rho, budget, limit):
    assert staleness_limit(rho, budget, 8) == limit
    if rho and limit > 1:
        assert rho * (limit + 1) / 2 <= budget + 1e-9


def test_a_change_reads_as_a_sentence():
    change = IntervalChange(24, 4, 2, step_ms=52, stall_ms=9, host_ms_before=61, host_ms=38.2, rho=0.4, limit=4)
    assert change.sentence() == (
        "update_interval (S) 2 -> 4 at call 24: the host needs up to 61 ms per call at S=2 and a call takes 52 ms and 9 ms of "
        "stalls; at S=4 it needs up to 38 ms; max_update_interval and rho 0.40 allow no larger S"
    )
    calm = change._replace(stall_ms=0, limit=8, launch_bound=True)
    assert calm.sentence() == (
        "update_interval (S) 2 -> 4 at call 24: the host needs up to 61 ms per call at S=2 and a call takes 52 ms, bound by "
        "the launching thread, which the host at work slows; at S=4 it needs up to 38 ms"
    )
    assert IntervalChange(7, 3, 2).sentence() == "update_interval (S) 2 -> 3 at call 7: as given, or as the ranks agreed"
    assert IntervalChange(7, 3, 3).sentence().startswith("update_interval (S) stays 3 at call 7: ")
