"""What the kernels refuse, and the native kernel's threads."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from replay_jobs import assert_same_bits, copy_of, done, make_job

from stallfree.kernels import native
from stallfree.kernels.native import NativeReplay
from stallfree.kernels.replay import HostKernel, ReplayJob, SlotGradient


def wrong(**changes) -> Callable[[ReplayJob], ReplayJob]:
    return lambda job: dataclasses.replace(job, **{name: change(job) for name, change in changes.items()})


def with_slot(index: int, **changes) -> Callable[[ReplayJob], tuple[SlotGradient, ...]]:
    def change(job: ReplayJob) -> tuple[SlotGradient, ...]:
        slots = list(job.slots)
        slots[index] = dataclasses.replace(slots[index], **{name: f(slots[index]) for name, f in changes.items()})
        return tuple(slots)

    return change


@pytest.mark.parametrize(
    "break_job, message",
    [
        (wrong(master=lambda j: j.master.double()), "master must be torch.float32"),
        (wrong(master=lambda j: j.master[0]), "master must be"),
        (wrong(master=lambda j: j.master.t().contiguous().t()), "master must be contiguous"),
        (wrong(exp_avg=lambda j: j.exp_avg.half()), "exp_avg must be torch.float32 or torch.bfloat16"),
        (wrong(exp_avg_sq=lambda j: j.exp_avg_sq.bfloat16()), "exp_avg_sq must be torch.float32"),
        (wrong(exp_avg_sq=lambda j: j.exp_avg_sq[:, 1:]), "exp_avg_sq must be of shape"),
        (wrong(steps=lambda j: j.steps.long()), "steps must be torch.int32"),
        (wrong(rows=lambda j: j.rows.int()), "rows must be torch.int64"),
        (wrong(rows=lambda j: j.rows[:-1]), "grad must be of shape"),
        (wrong(rows=lambda j: j.rows - 1), "strictly ascending"),
        (wrong(rows=lambda j: j.rows + 2), "strictly ascending"),
        (wrong(rows=lambda j: j.rows.flip(0)), "strictly ascending"),
        (wrong(rows=lambda j: j.rows.clamp(max=3)), "strictly ascending"),
        (wrong(slots=with_slot(0, grad=lambda s: s.grad.double())), r"slots\[0\].grad must be"),
        (wrong(slots=with_slot(1, grad=lambda s: s.grad.float())), r"slots\[1\].grad must be torch.bfloat16"),
        (wrong(slots=with_slot(1, grad=lambda s: s.grad[1:])), r"slots\[1\].grad must be of shape"),
        (wrong(slots=with_slot(0, beta1=lambda s: 1.0)), "betas"),
        (wrong(slots=with_slot(0, beta2=lambda s: float("nan"))), "betas"),
        (wrong(slots=with_slot(0, eps=lambda s: -1e-8)), "eps"),
        (wrong(rule=lambda j: "median"), "rule must be"),
        (wrong(out=lambda j: j.out.double()), "out must be"),
        (wrong(out=lambda j: j.out[:, 1:]), "out must be of shape"),
        (wrong(out=lambda j: j.slots[1].grad), "out may share memory"),
    ],
)
def test_a_wrong_job_changes_nothing(kernel, break_job, message):
    job = make_job(channels=6, rows=[0, 2, 3, 4, 5])
    broken = break_job(job)
    before = copy_of(broken)
    with pytest.raises(ValueError, match=message):
        kernel.replay(broken)
    assert_same_bits(broken, before)


def test_out_shifted_against_the_first_gradient_is_refused(kernel):
    job = make_job(channels=2, length=8)
    memory = torch.zeros(18, dtype=torch.bfloat16)
    slots = (dataclasses.replace(job.slots[0], grad=memory[:16].view(2, 8)), *job.slots[1:])
    with pytest.raises(ValueError, match="out may share memory"):
        kernel.replay(dataclasses.replace(job, slots=slots, out=memory[2:].view(2, 8)))


def test_step_counts_do_not_wrap(natives):
    job = make_job(channels=1, slots=2, rows=[0])
    job = dataclasses.replace(job, steps=torch.tensor([2**31 - 2], dtype=torch.int32))
    for kernel in natives:
        with pytest.raises(ValueError, match="step count"):
            kernel.replay(job)


def test_empty_jobs(kernel):
    no_rows = make_job(rows=[])
    assert_same_bits(done(kernel, no_rows), no_rows)
    no_length = make_job(length=0)
    kernel.replay(no_length)


def test_many_pools_and_callers_at_once(natives):
    """Four Python threads, two per pool; each has its own job, replayed again and again."""
    job = make_job(channels=40, length=1000, slots=2)
    expected = copy_of(job)
    repeats = 30
    for _ in range(repeats):
        natives[-1].replay(expected)
    pools = [NativeReplay(threads, isa=natives[-1].name.removeprefix("native-")) for threads in (2, 3)]
    results = [copy_of(job) for _ in range(4)]

    def work(kernel: HostKernel, job: ReplayJob) -> None:
        for _ in range(repeats):
            kernel.replay(job)

    threads = [threading.Thread(target=work, args=(pools[i % 2], result)) for i, result in enumerate(results)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kernel in pools:
        kernel.close()
    for result in results:
        assert_same_bits(result, expected)


def threads_of_this_process() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def assert_soon_only(threads: set[int]) -> None:
    """A joined thread may stay in /proc for a moment."""
    deadline = time.monotonic() + 10
    while threads_of_this_process() - threads and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not threads_of_this_process() - threads


def test_close_ends_the_threads():
    before = threads_of_this_process()
    kernel = NativeReplay(3)
    assert len(threads_of_this_process() - before) == 2
    kernel.close()
    kernel.close()
    assert_soon_only(before)
    with pytest.raises(RuntimeError, match="closed"):
        kernel.replay(make_job())
    kernel = NativeReplay(2)
    del kernel
    assert_soon_only(before)


@pytest.mark.parametrize("pin", [True, False])
def test_cores_bind_the_kernels_own_threads(pin):
    mine = os.sched_getaffinity(0)
    cores = sorted(mine)[:2] if len(mine) > 1 else sorted(mine) * 2
    before = threads_of_this_process()
    kernel = NativeReplay(2, cores=cores, pin=pin)
    own = threads_of_this_process() - before
    bound = sorted(sorted(os.sched_getaffinity(thread)) for thread in own)
    assert bound == ([[core] for core in cores] if pin else [sorted(set(cores))] * 2)
    assert os.sched_getaffinity(0) == mine
    job = make_job(channels=50, length=1000)
    assert_same_bits(done(kernel, job), done(NativeReplay(1), job))
    kernel.close()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(threads=0), "at least 1"),
        (dict(threads=2, cores=[0], pin=True), "as many cores"),
        (dict(threads=2, cores=[]), "some cores"),
        (dict(threads=1, cores=[100_000]), "bind a thread"),
        (dict(threads=1, isa="sse9"), "must be one of"),
    ],
)
def test_wrong_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        NativeReplay(**arguments)


def test_environment_chooses_the_instruction_path(monkeypatch):
    monkeypatch.setenv("STALLFREE_ISA", "portable")
    assert NativeReplay(1).name == "native-portable"
    assert NativeReplay(1, isa=native.best_isa()).name == f"native-{native.best_isa()}"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_ends_normally():
    kernel = NativeReplay(2)
    child = os.fork()
    if child == 0:
        try:
            kernel.replay(make_job())
        except RuntimeError as error:
            kernel.close()
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kernel.replay(make_job())
    kernel.close()


def test_a_missing_library_says_what_to_do(monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", Path("/nonexistent/_replay.so"))
    native.load_library.cache_clear()
    with pytest.raises(RuntimeError, match="pip install"):
        NativeReplay(1)


def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    native.load_library.cache_clear()
    with pytest.raises(RuntimeError, match="pip install"):
        NativeReplay(1)
