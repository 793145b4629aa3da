"""Every host kernel against exact arithmetic, torch.optim.AdamW and each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_jobs import ISAS, assert_same_bits, assert_within, copy_of, done, exact, jobs, make_job, make_kernel
from torch import Tensor

from stallfree.kernels.native import NativeReplay
from stallfree.kernels.replay import GRADIENT_DTYPES, ReplayJob, SlotGradient


@given(jobs())
def test_within_the_rounding_bound_of_exact_arithmetic(kernel, job):
    expected, result = exact(job), done(kernel, job)
    assert_within(result.master[job.rows], expected.master, expected.master_bound)
    assert_within(result.exp_avg[job.rows], expected.exp_avg, expected.exp_avg_bound)
    assert_within(result.exp_avg_sq[job.rows], expected.exp_avg_sq, expected.exp_avg_sq_bound)
    largest = torch.finfo(job.out.dtype).max
    half_ulp = expected.published.abs() * torch.finfo(job.out.dtype).eps / 2 + 2.0**-25  # fp16 is subnormal below 2^-14
    fits = expected.published.abs() < largest
    assert_within(result.out[fits], expected.published[fits], (expected.published_bound + half_ulp)[fits])
    steps = job.steps.clone()
    steps[job.rows] += 1 if job.rule == "mean" else len(job.slots)
    assert torch.equal(result.steps, steps)
    others = torch.ones(len(job.master), dtype=torch.bool).index_fill(0, job.rows, False)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(result, name)[others], getattr(job, name)[others])


@given(seed=st.integers(0, 2**31), windows=st.lists(st.integers(1, 17), min_size=1, max_size=4))
def test_equals_torch_adamw_up_to_rounding(kernel, seed, windows):
    rnd = torch.Generator().manual_seed(seed)
    shape = (3, 21)
    weight = torch.randn(shape, generator=rnd)
    param = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([param])
    grads = [torch.randn(shape, generator=rnd) for _ in range(sum(windows))]
    settings = [dict(lr=1e-2 * (0.9**t), weight_decay=0.1, eps=1e-8) for t in range(len(grads))]
    for grad, setting in zip(grads, settings, strict=True):
        optimizer.param_groups[0].update(setting, betas=(0.9, 0.999))
        param.grad = grad
        optimizer.step()
    ours = dict(
        master=weight.clone(),
        exp_avg=torch.zeros(shape),
        exp_avg_sq=torch.zeros(shape),
        steps=torch.zeros(3, dtype=torch.int32),
    )
    whole = dict(rows=torch.arange(3), rule="replay", lookahead=0.0, out=None, commit=True, key=0)
    slots = [SlotGradient(g, beta1=0.9, beta2=0.999, factor=1.0, **s) for g, s in zip(grads, settings, strict=True)]
    one_window = exact(copy_of(ReplayJob(**ours, **whole, slots=tuple(slots))))
    for window in windows:
        kernel.replay(ReplayJob(**ours, **whole, slots=tuple(slots[:window])))
        del slots[:window]
    state = optimizer.state[param]
    assert_within(ours["master"], param.detach().double(), 2 * one_window.master_bound)
    assert_within(ours["exp_avg"], state["exp_avg"].double(), 2 * one_window.exp_avg_bound)
    assert_within(ours["exp_avg_sq"], state["exp_avg_sq"].double(), 2 * one_window.exp_avg_sq_bound)
    assert ours["steps"].tolist() == [len(grads)] * 3


@given(jobs(), st.integers(1, 17))
def test_cutting_a_window_changes_no_bit(kernel, job, cut):
    job = dataclasses.replace(job, rule="replay")
    whole, parts = done(kernel, job), copy_of(job)
    for slots in (parts.slots[:cut], parts.slots[cut:]):
        kernel.replay(dataclasses.replace(parts, slots=slots))
    if len(job.slots) <= cut:  # the second window was empty: it published without look-ahead
        whole.out.copy_(whole.master[job.rows])
    assert_same_bits(whole, parts)


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_result_does_not_depend_on_threads_or_alignment(isa, moment_dtype):
    """Enough elements for several chunks; shifted by one element, every vector and every tail falls elsewhere."""
    job = make_job(channels=11, length=9001, moment_dtype=moment_dtype, slots=3)
    expected = done(make_kernel(f"{isa}-1"), job)

    def shifted(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    for threads in (2, 3, 5):
        kernel = make_kernel(f"{isa}-{threads}")
        assert_same_bits(expected, done(kernel, job))
        moved = copy_of(job)
        slots = tuple(dataclasses.replace(s, grad=shifted(s.grad)) for s in moved.slots)
        arrays = {name: shifted(getattr(moved, name)) for name in ("master", "exp_avg", "exp_avg_sq", "out")}
        moved = dataclasses.replace(moved, slots=slots, **arrays)
        kernel.replay(moved)
        assert_same_bits(expected, moved)
        kernel.close()


@given(jobs(moment_dtype=torch.bfloat16))
def test_avx2_and_avx512_give_the_same_bits(natives, job):
    by_isa = {kernel.name: done(kernel, job) for kernel in natives}
    if "native-avx512" in by_isa:
        assert_same_bits(by_isa["native-avx2"], by_isa["native-avx512"])


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_result_does_not_depend_on_neighbours(kernel, moment_dtype):
    """One channel alone, in the tail, equals the same channel amid others."""
    job = make_job(channels=9, length=45, moment_dtype=moment_dtype)
    expected = done(kernel, job)
    for row in range(9):
        alone = copy_of(job, rows=torch.tensor([row]), out=job.out[row : row + 1].clone())
        slots = tuple(dataclasses.replace(s, grad=s.grad[row : row + 1]) for s in alone.slots)
        alone = dataclasses.replace(alone, slots=slots)
        kernel.replay(alone)
        for name in ("master", "exp_avg", "exp_avg_sq", "steps"):
            assert torch.equal(getattr(alone, name)[row], getattr(expected, name)[row])
        assert torch.equal(alone.out[0], expected.out[row])


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [0, 1, 5])
@pytest.mark.parametrize("rule", ["replay", "mean"])
def test_without_commit_only_out_is_written(kernel, rule, slots, moment_dtype):
    job = make_job(rows=[0, 2, 3], slots=slots, moment_dtype=moment_dtype, rule=rule)
    expected = done(kernel, job)
    result = done(kernel, job, commit=False)
    assert torch.equal(result.out, expected.out)
    assert_same_bits(result, copy_of(job, out=expected.out))


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("rule", ["replay", "mean"])
def test_out_may_replace_the_first_gradient(kernel, rule, slots, dtype):
    job = make_job(length=555, slots=slots, grad_dtype=dtype, out_dtype=dtype, rule=rule)
    expected = done(kernel, job)
    in_place = copy_of(job)
    in_place = dataclasses.replace(in_place, out=in_place.slots[0].grad)
    kernel.replay(in_place)
    assert_same_bits(expected, in_place)


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_without_slots_the_master_is_published(kernel, moment_dtype):
    job = make_job(slots=0, rows=[1, 4], moment_dtype=moment_dtype)
    result = done(kernel, job)
    assert_same_bits(result, copy_of(job, out=job.master[[1, 4]].bfloat16()))
    assert_same_bits(done(kernel, job, out=None), copy_of(job, out=None))


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
def test_out_is_rounded_to_nearest_even(kernel, dtype):
    """Ties, subnormals, the largest values, infinities, NaN and -0, beside random bit patterns."""
    bits = torch.randint(-(2**31), 2**31, (4000,)).int()
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65519.9, 65520.0, 3.4e38, 1e-45, 6e-8, 2.9e-8, 1e-40]
    )
    halves = torch.arange(0x38000000, 0x38000000 + 2000 * 0x800, 0x800).int().view(torch.float32)  # fp16's and bf16's ties
    master = torch.cat([bits.view(torch.float32), special, halves])[None]
    job = make_job(channels=1, length=master.shape[1], slots=0, out_dtype=dtype)
    result = done(kernel, job, master=master)
    expected = master.to(dtype)
    assert torch.equal(result.out.isnan(), expected.isnan())
    same = ~expected.isnan()
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(result.out[same].view(integer), expected[same].view(integer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_gradient_is_read_exactly(kernel, dtype):
    grad = torch.arange(-(2**15), 2**15).short().view(dtype)[None]
    hyper = dict(lr=0.0, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1e-8, factor=1.0)  # beta1 0: exp_avg becomes the gradient
    job = make_job(channels=1, length=2**16, hypers=[hyper], grad_dtype=dtype)
    job = dataclasses.replace(job, slots=(SlotGradient(grad, **hyper),))
    exp_avg = done(kernel, job).exp_avg
    assert torch.equal(exp_avg.nan_to_num(nan=1.5), grad.float().nan_to_num(nan=1.5))


def test_non_finite_gradients_spread_as_in_torch(kernel):
    """inf and NaN ruin their own weight; a gradient whose square overflows moves nothing, as v is infinite for good."""
    grad = torch.tensor([[1.0, float("nan"), float("inf"), -float("inf"), 1e25, 1e-25, 0.0] * 5])
    weight = torch.ones_like(grad)
    param = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([param], lr=0.1)
    hyper = dict(lr=0.1, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, factor=1.0)
    job = make_job(channels=1, length=35, hypers=[hyper] * 2, out_dtype=torch.float32, lookahead=0.0)
    slots = tuple(dataclasses.replace(s, grad=grad) for s in job.slots)
    zero = torch.zeros_like(weight)
    result = done(
        kernel, job, master=weight, exp_avg=zero, exp_avg_sq=zero, slots=slots, steps=torch.zeros(1, dtype=torch.int32)
    )
    for _ in range(2):
        param.grad = grad
        optimizer.step()
    torch.testing.assert_close(result.master, param.detach(), equal_nan=True)
    torch.testing.assert_close(result.out, param.detach(), equal_nan=True)
    assert result.exp_avg_sq[0, 4].isinf()


def test_zero_gradients_leave_fresh_weights_alone(kernel):
    hyper = dict(lr=0.1, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8, factor=1.0)
    job = make_job(hypers=[hyper] * 3, out_dtype=torch.float32)
    zero = torch.zeros_like(job.master)
    slots = tuple(dataclasses.replace(s, grad=torch.zeros_like(s.grad)) for s in job.slots)
    result = done(kernel, job, exp_avg=zero, exp_avg_sq=zero, slots=slots)
    assert torch.equal(result.master, job.master)
    assert torch.equal(result.out, job.master)


def test_callers_denormal_mode_does_not_matter():
    kernel = NativeReplay(1)
    job = make_job(scale=1e-38, grad_dtype=torch.float32)
    expected = done(kernel, job)
    assert (expected.exp_avg.abs().lt(torch.finfo(torch.float32).tiny) & expected.exp_avg.ne(0)).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = done(kernel, job)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(expected, flushed)


def test_mean_is_one_step_on_the_mean(kernel):
    job = make_job(rule="mean", slots=4, grad_dtype=torch.float32)
    mean = torch.stack([s.factor * s.grad for s in job.slots]).mean(0)
    one = copy_of(job, rule="replay", slots=(dataclasses.replace(job.slots[-1], grad=mean, factor=1.0),))
    kernel.replay(one)
    many = done(kernel, job)
    assert torch.equal(many.steps, one.steps)
    for name in ("master", "exp_avg", "exp_avg_sq", "out"):
        torch.testing.assert_close(getattr(many, name), getattr(one, name), rtol=1e-2 if name == "out" else 1e-5, atol=1e-6)
