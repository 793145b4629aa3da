"""The model of a step on many GPUs: it keeps within its own bounds and gives what is known of one GPU."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.scaling import report
from benchmarks.scaling.cases import HIDDEN, KERNELS_S, MEASURED, MODELS, NODE, TOKENS, Case, Host
from benchmarks.scaling.simulation import paced, simulate, window_s

SMALL, LARGE = MODELS[0], MODELS[1]


@pytest.mark.parametrize("world, shard", [(1, None), (2, None), (8, None), (64, None), (64, 8)])
@pytest.mark.parametrize("interval", [0, 1, 4])
def test_no_step_is_shorter_than_what_any_resource_has_to_do(world, shard, interval):
    case = Case(model=LARGE, world=world, shard=shard, interval=interval)
    step = simulate(case)
    kernels = sum(op.work for op in step.ops if op.stream == "compute" and op.call == 0)
    assert kernels >= LARGE.compute_s - 1e-9
    for stream, busy in step.busy.items():
        assert busy <= step.seconds * (1 + 1e-6), stream


def test_an_op_begins_after_what_it_waits_for_and_after_its_stream():
    last = {}
    for op in simulate(Case(model=SMALL, world=8)).ops:
        assert op.begin >= max([before.end for before in op.after], default=0.0)
        assert op.begin >= last.get(op.stream, 0.0)
        last[op.stream] = op.end


def test_one_gpu_without_host_work_is_the_measured_floor():
    assert simulate(Case(model=SMALL, world=1, interval=0)).seconds == pytest.approx(SMALL.measured_s)


def test_one_gpu_is_the_measured_case():
    """1.5B, 8 x 1024, S=4: 210 ms, no stall, 1.8 bytes down and 0.45 up per parameter."""
    case = Case(model=SMALL, world=1)
    step = simulate(case)
    assert step.seconds == pytest.approx(SMALL.measured_s + KERNELS_S * SMALL.parameters, rel=2e-3)
    assert step.seconds == pytest.approx(0.2101, rel=0.03)
    down = sum(op.work for op in step.ops if op.stream == "down" and op.call == 0)
    up = sum(op.work for op in step.ops if op.stream == "up" and 6 <= op.call < 10)
    assert down / SMALL.parameters == pytest.approx(1.8, rel=0.002)
    assert up / 4 / SMALL.parameters == pytest.approx(0.45, rel=0.002)


@pytest.mark.parametrize("threads, nanoseconds", [(14, 0.235), (12, 0.243), (8, 0.287), (4, 0.509)])
def test_replay_takes_what_was_measured(threads, nanoseconds):
    assert window_s(4, threads, MEASURED.dram) * 1e9 == pytest.approx(nanoseconds, rel=0.01)


def test_a_host_that_cannot_keep_up_sets_the_pace():
    slow: Host = replace(MEASURED, dram=20e9)
    step = simulate(Case(model=SMALL, world=1, host=slow))
    assert step.busy["host"] > SMALL.compute_s
    assert step.seconds == pytest.approx(step.busy["host"], rel=0.02)


def test_the_host_works_with_the_threads_that_it_needs():
    """Measured with S=4: 5 and 6 threads on one GPU, 3 on each of two. A host that is hardly fast enough keeps all."""
    assert paced(Case(model=SMALL, world=1)).at.threads in (5, 6, 7)
    assert paced(Case(model=SMALL, world=2)).at.threads == 3
    busy = Case(model=SMALL, world=1, tokens=TOKENS // 2)
    assert simulate(busy).busy["host"] > 0.8 * busy.compute_s
    assert paced(busy).at.threads == MEASURED.threads


def test_two_gpus_are_slower_than_the_model_says_and_so_is_their_host():
    """What docs/fsdp.md says of it: late launches are not in the step, and the host, with as many threads, is slower."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.check().splitlines()]
    rows = rows[[row[0] for row in rows].index("1.5B, two GPUs") + 2 :]
    assert [row[:2] for row in rows] == [
        *(["first", "4"], ["pace", "4"], ["s8", "4"], ["s8", "8"]),
        *(["evening", "4"], ["evening", "4, no host work"], ["evening", "8"], ["night", "4"], ["night", "4, no host work"]),
    ]
    night = rows[[row[:2] for row in rows].index(["night", "4"])]
    measured = [night[place] for place in (2, 5, 8, 10)]
    assert measured == ["225", "1.050", "3", "130"]
    assert [float(night[place]) for place in (3, 6, 9, 11)] == pytest.approx([201, 1.008, 3, 117], rel=0.01)
    errors = [[int(row[place].rstrip("%")) for row in rows if row[place] != "–"] for place in (4, 7, 12)]
    for found, stated in zip(errors, [(-24, -11), (-15, -3), (-28, -9)], strict=True):
        assert (min(found), max(found)) == pytest.approx(stated, abs=1)


def test_a_rank_has_its_share_of_the_work():
    one, eight = (simulate(Case(model=LARGE, world=world, host=NODE)).busy for world in (8, 64))
    for stream in ("down", "up", "host"):
        assert one[stream] == pytest.approx(8 * eight[stream], rel=0.1)  # copies slow the host by more, where there are more


def test_what_goes_over_the_wire_in_step():
    """Input channels of every matrix but tables, and two sums for each weight."""
    columns = 28 * (5 * 3584 + 3584 + 18944)
    assert Case(model=LARGE, world=8).flat_bytes == 4 * (columns + 2 * (28 * 7 + 2) + 1)


def test_hidden_means_no_longer_than_with_a_host_that_takes_no_time():
    case = Case(model=SMALL, world=8)
    found = report.row(case)
    assert found.smallest == 1
    assert found.step.seconds <= HIDDEN * simulate(replace(case, free=True)).seconds
    assert found.fewest_tokens < TOKENS
