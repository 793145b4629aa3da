"""`HostKernel.run`: windows in order, begun by flags, announced by flags, with skips and factors that are learned late."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from stallfree.kernels.native import NativeReplay
from stallfree.kernels.replay import Flag, Late, ReplayJob, SlotGradient, TorchReplay, WindowJobs


@pytest.fixture(params=["torch", "native", "native-2"])
def kernel(request):
    kernel = TorchReplay() if request.param == "torch" else NativeReplay(2 if request.param == "native-2" else 1)
    yield kernel
    kernel.close()


def make_job(seed, slots=3):
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(4, 5, generator=generator) for _ in range(slots)]
    return ReplayJob(
        master=torch.randn(6, 5, generator=generator),
        exp_avg=torch.zeros(6, 5),
        exp_avg_sq=torch.zeros(6, 5),
        steps=torch.zeros(6, dtype=torch.int32),
        rows=torch.tensor([0, 2, 3, 5]),
        slots=tuple(SlotGradient(grad, 1e-2, 0.9, 0.99, 1e-8, 0.1, 1.0) for grad in grads),
        rule="replay",
        lookahead=1.0,
        out=torch.empty(4, 5),
        commit=True,
        key=seed,
    )


def record(skip, factor):
    return Late(torch.tensor([float(skip), 7.0, factor]), 2)


def flags(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_skips_and_factors_are_read_when_the_window_runs(kernel):
    job, expected = make_job(0), make_job(0)
    known = (record(False, 0.5), record(True, 3.0), record(False, 0.25))
    memory = flags(0)
    kernel.run([WindowJobs((job,), (known,), (), Flag(memory, 0, 5))], flags(0))
    slots = (replace(expected.slots[0], factor=0.5), replace(expected.slots[2], factor=0.25))
    kernel.replay(replace(expected, slots=slots))
    assert memory.tolist() == [5]
    for name in ("master", "exp_avg", "exp_avg_sq", "steps", "out"):
        assert torch.equal(getattr(job, name), getattr(expected, name)), name


def test_a_window_waits_for_all_its_gates_and_windows_run_in_order(kernel):
    memory = flags(0, 0, 0, 0)
    jobs = make_job(0), make_job(1)
    known = tuple(record(False, 1.0) for _ in range(3))
    windows = [
        WindowJobs((jobs[0],), (known,), (Flag(memory, 0, 3), Flag(memory, 1, 1)), Flag(memory, 2, 1)),
        WindowJobs((jobs[1],), (known,), (), Flag(memory, 3, 1)),
    ]
    thread = threading.Thread(target=kernel.run, args=(windows, flags(0)))
    thread.start()
    memory[0] = 4  # past its value: open
    time.sleep(0.02)
    assert memory.tolist() == [4, 0, 0, 0]
    assert jobs[0].steps.tolist() == jobs[1].steps.tolist() == [0] * 6
    memory[1] = 1
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert memory.tolist() == [4, 1, 1, 1]
    assert jobs[0].steps.tolist() == jobs[1].steps.tolist() == [3, 0, 3, 3, 0, 3]


def test_gates_count_modulo_two_to_the_32(kernel):
    memory = flags(-(2**31) + 1, 0)  # two steps past 2^31 - 1
    job = make_job(0, slots=1)
    kernel.run([WindowJobs((job,), ((record(False, 1.0),),), (Flag(memory, 0, 2**31 - 1),), Flag(memory, 1, 1))], flags(0))
    assert memory[1] == 1
    assert job.steps.tolist() == [1, 0, 1, 1, 0, 1]


def test_a_wait_can_be_given_up(kernel):
    stop, memory, job, errors = flags(0), flags(0, 0), make_job(0), []

    def run():
        try:
            known = tuple(record(False, 1.0) for _ in range(3))
            kernel.run([WindowJobs((job,), (known,), (Flag(memory, 0, 1),), Flag(memory, 1, 1))], stop)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    stop[0] = 1
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert "given up" in str(errors[0])
    assert errors[0].number == 0
    assert memory.tolist() == [0, 0]
    assert job.steps.tolist() == [0] * 6


def test_a_failing_window_is_named_and_ends_the_run(kernel):
    good, bad, after = make_job(0), make_job(1), make_job(2)
    bad.rows[0] = 3  # no longer ascending
    known, memory = tuple(record(False, 1.0) for _ in range(3)), flags(0, 0, 0)
    windows = [WindowJobs((job,), (known,), (), Flag(memory, place, 1)) for place, job in enumerate((good, bad, after))]
    with pytest.raises(ValueError, match="ascending") as caught:
        kernel.run(windows, flags(0))
    assert caught.value.number == 1
    assert memory.tolist() == [1, 0, 0]
    assert after.steps.tolist() == [0] * 6
