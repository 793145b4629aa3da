"""bf16 moments: fp32 within a window, rounded stochastically at its end, the same in every kernel."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_jobs import assert_within, copy_of, done, exact, jobs, make_job

from stallfree.kernels.replay import ReplayJob, SlotGradient, TorchReplay


def quiet(**changes) -> ReplayJob:
    """Zero gradients: the moments only decay, one rounding each, so that all kernels have the same fp32 values to round."""
    job = make_job(moment_dtype=torch.bfloat16, **changes)
    return dataclasses.replace(job, slots=tuple(dataclasses.replace(s, grad=torch.zeros_like(s.grad)) for s in job.slots))


@given(
    seed=st.integers(0, 2**31),
    key=st.integers(-(2**63), 2**64 - 1),
    slots=st.integers(1, 5),
    length=st.sampled_from([1, 45, 300]),
)
def test_stochastic_rounding_is_the_same_everywhere(natives, seed, key, slots, length):
    job = quiet(seed=seed, key=key, slots=slots, length=length, rows=[0, 1, 3, 5])
    expected = done(TorchReplay(), job)
    for kernel in natives:
        result = done(kernel, job)
        assert torch.equal(result.exp_avg, expected.exp_avg)
        assert torch.equal(result.exp_avg_sq, expected.exp_avg_sq)


@given(jobs(moment_dtype=torch.bfloat16))
def test_bf16_moments_stay_in_fp32_within_a_window(kernel, job):
    expected, result = exact(job), done(kernel, job)
    assert_within(result.master[job.rows], expected.master, expected.master_bound)
    ulp = torch.finfo(torch.bfloat16).eps  # stochastic rounding goes to one of the two neighbours
    assert_within(
        result.exp_avg[job.rows], expected.exp_avg, expected.exp_avg_bound * (1 + ulp) + ulp * expected.exp_avg.abs() + 1e-38
    )
    assert_within(
        result.exp_avg_sq[job.rows], expected.exp_avg_sq, expected.exp_avg_sq_bound + ulp * expected.exp_avg_sq + 1e-38
    )


def test_stochastic_rounding_is_unbiased(kernel):
    """exp_avg and exp_avg_sq of value a third of the way between two bf16 numbers end on the upper one a third of the time."""
    hyper = dict(lr=0.0, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1e-8, factor=1.0)
    third = 1 + 2.0**-7 / 3
    count = 1 << 16
    job = make_job(channels=4, length=count // 4, hypers=[hyper], grad_dtype=torch.float32, moment_dtype=torch.bfloat16)
    slots = (dataclasses.replace(job.slots[0], grad=torch.full((4, count // 4), third**0.5)),)
    result = done(kernel, job, slots=slots)
    tolerance = 5 * (2 / 9 / count) ** 0.5  # five standard deviations
    upper = (result.exp_avg_sq == 1 + 2.0**-7).double().mean().item()
    assert upper == pytest.approx(1 / 3, abs=tolerance)
    assert set(result.exp_avg_sq.float().unique().tolist()) == {1.0, 1 + 2.0**-7}
    below = 1.0
    share = (third**0.5 - below) / 2.0**-7
    upper_avg = result.exp_avg > below
    assert upper_avg.double().mean().item() == pytest.approx(share, abs=tolerance)
    # The two moments of an element use independent bits.
    both = (upper_avg & (result.exp_avg_sq > 1)).double().mean().item()
    assert both == pytest.approx(share / 3, abs=tolerance)


def test_stochastic_rounding_depends_on_key_element_and_step(kernel):
    job = quiet(channels=4, length=512, slots=1)
    same = dict(exp_avg=torch.full_like(job.exp_avg, 1.0), exp_avg_sq=torch.full_like(job.exp_avg_sq, 1.0))
    steps = torch.tensor([0, 0, 7, 8], dtype=torch.int32)
    result = done(kernel, job, **same, steps=steps)
    rows = result.exp_avg.float()
    assert len({tuple(row.tolist()) for row in rows}) == 4
    assert not torch.equal(rows, done(kernel, job, **same, steps=steps, key=job.key + 1).exp_avg.float())
    assert not torch.equal(rows[0], done(kernel, job, **same, steps=steps + 1).exp_avg.float()[0])
    assert torch.equal(rows, done(kernel, job, **same, steps=steps).exp_avg.float())


def test_exp_avg_sq_in_bf16_does_not_stick(kernel):
    """Rounded to nearest it would never move: beta2 = 0.999 changes it by less than half an ulp per step."""
    hyper = dict(lr=0.0, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8, factor=1.0)
    job = make_job(channels=1, length=4096, hypers=[hyper] * 4, moment_dtype=torch.bfloat16)
    slots = tuple(dataclasses.replace(s, grad=torch.zeros_like(s.grad)) for s in job.slots)
    job = dataclasses.replace(copy_of(job, exp_avg_sq=torch.ones_like(job.exp_avg_sq)), slots=slots)
    for _ in range(25):
        kernel.replay(job)
    assert job.exp_avg_sq.float().mean().item() == pytest.approx(0.999**100, rel=2e-3)


def test_elements_beyond_32_bits(kernel):
    """A row that begins below element 2^32 and ends above it: memory is reserved, and only a few rows of it are touched."""
    length = 5 << 20
    channels = 2**32 // length + 3
    row = 2**32 // length
    assert row * length < 2**32 < (row + 1) * length
    try:
        reserved = torch.empty(channels, length, dtype=torch.bfloat16), torch.empty(channels, length, dtype=torch.bfloat16)
        master = torch.empty(channels, length)
    except RuntimeError:
        pytest.skip("this machine does not reserve 35 GB of address space")
    for moment in reserved:
        moment[row] = 1
    master[row] = 1
    hyper = dict(lr=1e-3, weight_decay=0.0, beta1=0.9, beta2=0.99, eps=1e-8, factor=1.0)
    job = ReplayJob(
        master=master,
        exp_avg=reserved[0],
        exp_avg_sq=reserved[1],
        steps=torch.zeros(channels, dtype=torch.int32),
        rows=torch.tensor([row]),
        slots=(SlotGradient(torch.zeros(1, length, dtype=torch.bfloat16), **hyper),),
        rule="replay",
        lookahead=0.0,
        out=None,
        commit=True,
        key=5,
    )
    kernel.replay(job)
    before = 2**32 - row * length
    around = job.exp_avg[row, before - 64 : before + 64].clone()
    job.exp_avg[row] = 1
    job.exp_avg_sq[row] = 1
    job.steps.zero_()
    TorchReplay().replay(job)
    assert torch.equal(around, job.exp_avg[row, before - 64 : before + 64])
