"""Replay jobs with random contents, and their results in exact arithmetic.

`exact` replays a job in float64 and bounds what fp32 may lose. With u = 2^-24, M the running mean of |g| where exp_avg is that
of g, and D_k = (M_k / (1 - beta1^n)) / (sqrt(v_k / (1 - beta2^n)) + eps), to first order in u after K steps:

    exp_avg      4 K u M                 two roundings and a rounded constant per term and step; |m| may cancel, M does not
    exp_avg_sq   (4 K + 2) u v           relative: all terms are positive
    master       sum over k of u (3 |x_k| + (6 k + 10) lr_k D_k)
                                         decay: constant, product, sum; D_k: 4k from exp_avg, 2k + 1 from the root of
                                         exp_avg_sq, 4 in the denominator, 1 for the division, 2 for lr's constant and product

The square root by an estimate and a Newton step, and two roundings instead of an FMA, are inside these constants.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from stallfree.kernels.native import NativeReplay
from stallfree.kernels.replay import GRADIENT_DTYPES, HostKernel, ReplayJob, SlotGradient, TorchReplay

U = 2.0**-24
ISAS = ("portable", "avx2", "avx512", "avx512-rsqrt")


def make_kernel(name: str) -> HostKernel:
    """ "torch", or an instruction path and a number of threads: "avx2-3"."""
    if name == "torch":
        return TorchReplay()
    isa, threads = name.rsplit("-", 1)
    try:
        return NativeReplay(int(threads), isa=isa)
    except ValueError as error:
        pytest.skip(str(error))


def make_job(
    *,
    channels: int = 6,
    length: int = 37,
    rows: list[int] | None = None,
    slots: int = 4,
    grad_dtype: torch.dtype = torch.bfloat16,
    moment_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = torch.bfloat16,
    rule: str = "replay",
    lookahead: float = 2.0,
    commit: bool = True,
    hypers: list[dict] | None = None,
    scale: float = 1.0,
    seed: int = 0,
    key: int = 0x123456789ABCDEF,
) -> ReplayJob:
    """A job with random contents: some elements have no history, some gradients are zero, channels differ in their steps."""
    rnd = torch.Generator().manual_seed(seed)
    rows = list(range(channels)) if rows is None else rows
    shape, window = (channels, length), (len(rows), length)
    fresh = torch.rand(shape, generator=rnd) < 0.2
    exp_avg = torch.randn(shape, generator=rnd).mul(scale).masked_fill(fresh, 0)
    exp_avg_sq = torch.rand(shape, generator=rnd).mul(scale**2).masked_fill(fresh, 0)
    hypers = hypers or [
        dict(lr=1e-2 / (k + 1), weight_decay=0.1, beta1=0.9, beta2=0.99, eps=1e-8, factor=0.7) for k in range(slots)
    ]
    gradients = []
    for hyper in hypers:
        grad = torch.randn(window, generator=rnd).mul(scale).masked_fill(torch.rand(window, generator=rnd) < 0.1, 0)
        if rule == "mean":
            grad = grad.abs()  # a mean that cancels has no relative bound
        gradients.append(SlotGradient(grad=grad.to(grad_dtype), **hyper))
    return ReplayJob(
        master=torch.randn(shape, generator=rnd),
        exp_avg=exp_avg.to(moment_dtype),
        exp_avg_sq=exp_avg_sq.to(moment_dtype),
        steps=torch.randint(0, 4, (channels,), generator=rnd, dtype=torch.int32),
        rows=torch.tensor(rows, dtype=torch.int64),
        slots=tuple(gradients),
        rule=rule,
        lookahead=lookahead,
        out=None if out_dtype is None else torch.full(window, 7.0, dtype=out_dtype),
        commit=commit,
        key=key,
    )


def copy_of(job: ReplayJob, **changes) -> ReplayJob:
    """The same job, but for the changes, on memory of its own."""
    job = dataclasses.replace(job, **changes)
    tensors = {f.name: value.clone() for f in dataclasses.fields(job) if isinstance(value := getattr(job, f.name), Tensor)}
    slots = tuple(dataclasses.replace(slot, grad=slot.grad.clone()) for slot in job.slots)
    return dataclasses.replace(job, **tensors, slots=slots)


def done(kernel: HostKernel, job: ReplayJob, **changes) -> ReplayJob:
    """A copy of the job after the kernel ran it."""
    job = copy_of(job, **changes)
    kernel.replay(job)
    return job


def assert_same_bits(a: ReplayJob, b: ReplayJob) -> None:
    for name in ("master", "exp_avg", "exp_avg_sq", "steps", "out"):
        x, y = getattr(a, name), getattr(b, name)
        if x is not None:
            assert x.dtype == y.dtype
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), name


@dataclasses.dataclass
class Exact:
    """A job's result in float64, for its rows, and the bounds above."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    published: Tensor
    master_bound: Tensor
    exp_avg_bound: Tensor
    exp_avg_sq_bound: Tensor
    published_bound: Tensor


def exact(job: ReplayJob) -> Exact:
    x, m, v = (t[job.rows].double() for t in (job.master, job.exp_avg, job.exp_avg_sq))
    n = job.steps[job.rows].double()[:, None]
    magnitude, bound, published, ahead_bound = m.abs(), torch.zeros_like(x), x, torch.zeros_like(x)
    slots = [(s, s.factor * s.grad.double()) for s in job.slots]
    spent = 0  # roundings that a step's gradient brings along: those of a mean
    if job.rule == "mean" and slots:
        spent = len(slots)
        slots = [(job.slots[-1], torch.stack([g for _, g in slots]).mean(0))]
    for k, (s, g) in enumerate(slots, start=1 + spent):
        n = n + 1
        before = x.abs()
        x = x * (1 - s.lr * s.weight_decay)
        m = s.beta1 * m + (1 - s.beta1) * g
        magnitude = s.beta1 * magnitude + (1 - s.beta1) * g.abs()
        v = s.beta2 * v + (1 - s.beta2) * g * g
        denominator = (v / (1 - s.beta2**n)).sqrt() + s.eps
        direction = m / (1 - s.beta1**n) / denominator
        most = magnitude / (1 - s.beta1**n) / denominator
        x = x - s.lr * direction
        bound = bound + U * (3 * torch.maximum(before, x.abs()) + (6 * k + 10) * s.lr * most)
        published = x - s.lr * job.lookahead * direction
        ahead_bound = U * (6 * k + 12) * s.lr * job.lookahead * most + U * published.abs()
    k = len(slots) + spent
    return Exact(x, m, v, published, bound, 4 * k * U * magnitude, (4 * k + 2) * U * v, bound + ahead_bound)


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    excess = (actual.double() - expected).abs() - 1.01 * bound
    assert (excess <= 1e-40).all(), f"{excess.max():.3g} beyond the bound"


hypers = st.fixed_dictionaries(
    dict(
        lr=st.sampled_from([0.0, 1e-5, 1e-3, 0.1]),
        weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
        beta1=st.sampled_from([0.0, 0.5, 0.9, 0.95]),
        beta2=st.sampled_from([0.0, 0.9, 0.99, 0.999]),
        eps=st.sampled_from([1e-12, 1e-8, 1e-3]),
        factor=st.sampled_from([1.0, 0.3, 1e-3, 65536.0]),
    )
)


@st.composite
def jobs(draw, moment_dtype: torch.dtype = torch.float32) -> ReplayJob:
    channels = draw(st.integers(1, 9))
    return make_job(
        channels=channels,
        length=draw(st.sampled_from([1, 2, 7, 16, 33, 127, 128, 200, 1030])),
        rows=sorted(draw(st.sets(st.integers(0, channels - 1), min_size=1))),
        hypers=draw(st.lists(hypers, min_size=1, max_size=18)),
        grad_dtype=draw(st.sampled_from(GRADIENT_DTYPES)),
        moment_dtype=moment_dtype,
        out_dtype=draw(st.sampled_from(GRADIENT_DTYPES)),
        rule=draw(st.sampled_from(["replay", "replay", "mean"])),
        lookahead=draw(st.sampled_from([0.0, 1.5])),
        scale=draw(st.sampled_from([1.0, 1e-3])),
        seed=draw(st.integers(0, 2**31)),
    )
