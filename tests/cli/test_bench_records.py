"""The numbers of a row follow from the times and counts of its rounds."""

import pytest

from stallfree.cli.bench.records import MIB, Footprint, Result, Round, mean_ms, percentile, row
from stallfree.cli.bench.table import show_table
from stallfree.limits import GIB


def timed(*step_ms, gap=0.0, **other):
    """A round of steps that take this long; `gap`: ms of the round that no step's event shows."""
    defaults = dict(counted={}, chosen={}, host_bytes=0, device_peak_bytes=None, device_bytes=None)
    return Round(seconds=(sum(step_ms) + gap) / 1e3, step_ms=list(step_ms), **defaults | other)


def footprint(**other):
    return Footprint(**dict(parameters=1000, host_bytes=0, machine_bytes=0, device_peak_bytes=None) | other)


def test_mean_is_over_whole_rounds():
    assert mean_ms([timed(10, 10), timed(40, 20, 30, 30)]) == pytest.approx(140 / 6)
    assert mean_ms([timed(10, 10, gap=4)]) == pytest.approx(12)


def test_percentiles_are_measured_values():
    values = list(range(1, 201))
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [100, 198, 200]
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([5, 1, 9], 0.5) == 5


def test_ratio_is_to_the_floor_beside():
    result = Result("x", footprint(), rounds=[timed(20, 40), timed(30, 30)], beside=[timed(10, 10), timed(20, 20), timed(15)])
    numbers = row(result, None)
    assert numbers["mean_ms"] == pytest.approx(30)
    assert numbers["floor_ms"] == pytest.approx(15)
    assert numbers["ratio"] == pytest.approx(2)
    assert numbers["round_ms"] == pytest.approx([30, 30])
    assert numbers["floor_round_ms"] == pytest.approx([10, 20, 15])
    assert (numbers["steps"], numbers["median_ms"], numbers["p99_ms"], numbers["max_ms"]) == (4, 30, 40, 40)
    assert numbers["p99_to_mean"] == pytest.approx(40 / 30)


def test_counts_are_per_measured_step():
    counted = [
        dict(stall_ms_total=6.0, bytes_down_total=4000.0, bytes_up_total=1000.0, reselections_total=total) for total in (1, 2)
    ]
    result = Result("x", footprint(), rounds=[timed(1, 1, counted=counted[0]), timed(1, 1, counted=counted[1])])
    numbers = row(result, None)
    assert (numbers["stall_ms"], numbers["reselections"]) == (3, 3)
    assert (numbers["down_bytes_per_parameter"], numbers["up_bytes_per_parameter"]) == (2, 0.5)
    assert numbers["ratio"] is None


def test_what_the_optimizer_chose_is_told_by_round():
    rounds = [timed(1.0, chosen=dict(interval=interval, host_threads=9)) for interval in (2, 5)]
    numbers = row(Result("mode", rounds=rounds), None)
    assert numbers["round_interval"] == [2, 5]
    assert numbers["round_host_threads"] == [9, 9]


def test_memory_is_beyond_the_floor_s():
    own = footprint(host_bytes=21_000, machine_bytes=30_000, device_peak_bytes=2 * GIB)
    floor = footprint(host_bytes=1_000, machine_bytes=2_000, device_peak_bytes=GIB)
    rounds = [
        timed(1, host_bytes=MIB, device_peak_bytes=3 * GIB, device_bytes=2 * MIB),
        timed(1, host_bytes=0, device_peak_bytes=GIB, device_bytes=0),
    ]
    numbers = row(Result("x", own, rounds), floor)
    assert numbers["host_bytes_per_parameter"] == 20
    assert numbers["machine_bytes_per_parameter"] == 28
    assert numbers["device_peak_GiB"] == 3
    assert (numbers["host_growth_MiB"], numbers["device_growth_MiB"]) == (1, 2)


def test_a_mode_that_failed_has_a_row():
    assert row(Result("x", error="failed: why"), footprint()) == {"mode": "x", "error": "failed: why"}


@pytest.mark.parametrize("width", [40, 100, 160])
def test_a_narrow_terminal_cuts_no_number(width, capsys):
    long = "stallfree:update_interval=4,topk_ratio=0.2"
    rounds = [timed(1234.5, 2345.6, counted=dict(stall_ms_total=3.25, bytes_down_total=1800.0, bytes_up_total=450.0))]
    show_table([row(Result(long, footprint(), rounds=rounds, beside=[timed(1000.0)]), None)], width)
    shown = capsys.readouterr().out
    assert "…" not in shown
    for number in ("1790.0", "1.790", "1790.0–1790.0", "1234.5", "2345.6", "1.31", "0.90, 0.23"):
        assert number in shown
    first = [line[:20].strip() for line in shown.splitlines()]
    assert "".join(first).replace("mode", "").startswith(long[:20])
