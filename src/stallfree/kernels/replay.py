"""The host update of one parameter's window: the interface that every host kernel implements, and its definition in torch.

One job replays the gradients that a window collected, in order, each as one full AdamW step
(rule "replay", docs/update-rule.md), or takes one AdamW step on their mean (rule "mean", the ZenFlow paper).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENT_DTYPES = (torch.float32, torch.bfloat16)


MOST_STEPS = 2**31 - 1  # that an int32 counts


@dataclass(frozen=True, slots=True)
class SlotGradient:
    """The deferred gradient of one call and the settings of that call."""

    grad: Tensor  # [rows, length], fp32 / bf16 / fp16, host memory, contiguous
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    factor: float  # what the gradient is multiplied by first: clipping, and what the user's code scaled it by


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """One parameter's window. Row i of a gradient belongs to channel rows[i]."""

    master: Tensor  # [channels, length] fp32, contiguous host memory
    exp_avg: Tensor  # [channels, length] fp32 or bf16
    exp_avg_sq: Tensor  # [channels, length], dtype of exp_avg
    steps: Tensor  # [channels] int32: AdamW steps each channel has taken; advanced by the job
    rows: Tensor  # [rows] int64, ascending: the channels this window defers
    slots: tuple[SlotGradient, ...]  # those that count (not skipped, with a gradient), oldest first; may be empty
    rule: Literal["replay", "mean"]
    lookahead: float  # published = master - lr * lookahead * direction of the last AdamW step; 0: the plain master
    out: Tensor | None  # [rows, length] in the weights' dtype: the published rows; may share memory with slots[0].grad
    commit: bool  # False: write nothing but `out` (what a flush would publish)
    key: int  # (seed, parameter) for stochastic rounding of bf16 moments; 64 bits


class HostKernel(Protocol):
    """Runs replay jobs. Deterministic: the result does not depend on the number of threads."""

    name: str

    def replay(self, job: ReplayJob) -> None: ...

    def limit(self, threads: int) -> None:
        """From the next job on, let at most so many of its threads work."""

    def close(self) -> None:
        """End the kernel's threads. Idempotent."""


class TorchReplay:
    """A job's result in torch operations: what every kernel is tested against, and the slow way to run one.

    Follows `torch.optim.AdamW`'s arithmetic: fp32, bias corrections in double.

    Holds fp32 copies of the deferred rows' state while a job runs (12 bytes per element, and temporaries).
    """

    name = "torch"

    def replay(self, job: ReplayJob) -> None:
        check_job(job)
        rows = job.rows
        if rows.numel() and not (int(rows[0]) >= 0 and int(rows[-1]) < len(job.master) and bool((rows.diff() > 0).all())):
            raise ValueError("rows must be strictly ascending and lie in [0, channels)")
        master, exp_avg, exp_avg_sq = job.master[rows], job.exp_avg[rows].float(), job.exp_avg_sq[rows].float()
        steps, taken = job.steps[rows], _adamw_steps(job)
        if steps.numel() and int(steps.max()) > MOST_STEPS - len(taken):
            raise ValueError(f"a step count would exceed {MOST_STEPS}")
        published = master
        for hyper, grad in taken:
            steps = steps + 1
            correction1, correction2 = (1 - beta ** steps.double()[:, None] for beta in (hyper.beta1, hyper.beta2))  # [rows, 1]
            master = master * (1 - hyper.lr * hyper.weight_decay)
            exp_avg = hyper.beta1 * exp_avg + (1 - hyper.beta1) * grad
            exp_avg_sq = hyper.beta2 * exp_avg_sq + (1 - hyper.beta2) * grad * grad
            quotient = exp_avg / (exp_avg_sq.sqrt() / correction2.sqrt().float() + hyper.eps)
            master = master - (hyper.lr / correction1).float() * quotient
            ahead = (job.lookahead * hyper.lr / correction1).float()
            published = master - ahead * quotient if job.lookahead else master
        if job.commit and job.slots:
            job.master[rows] = master
            job.steps[rows] = steps
            if job.exp_avg.dtype == torch.bfloat16:
                low, high = _random_halves(job.key, steps, rows, job.master.shape[1])
                exp_avg, exp_avg_sq = _round_stochastically(exp_avg, low), _round_stochastically(exp_avg_sq, high)
            job.exp_avg[rows] = exp_avg
            job.exp_avg_sq[rows] = exp_avg_sq
        if job.out is not None:
            job.out.copy_(published)

    def limit(self, threads: int) -> None:
        """Torch's own threads do the work, and training's as well."""

    def close(self) -> None:
        """Nothing to end."""


def check_job(job: ReplayJob) -> None:
    """Raise `ValueError` unless a job is what `ReplayJob` says. The contents of `rows` are left to the kernel.

    Nothing has been written when a kernel refuses a job.
    """
    if job.master.ndim != 2:
        raise ValueError(f"master must be [channels, length], not of shape {tuple(job.master.shape)}")
    shape = job.master.shape
    check_array("master", job.master, shape, (torch.float32,))
    check_array("exp_avg", job.exp_avg, shape, MOMENT_DTYPES)
    check_array("exp_avg_sq", job.exp_avg_sq, shape, (job.exp_avg.dtype,))
    check_array("steps", job.steps, shape[:1], (torch.int32,))
    check_array("rows", job.rows, (job.rows.numel(),), (torch.int64,))
    window = (job.rows.numel(), shape[1])
    for i, slot in enumerate(job.slots):
        check_array(f"slots[{i}].grad", slot.grad, window, GRADIENT_DTYPES if i == 0 else (job.slots[0].grad.dtype,))
        if not (0 <= slot.beta1 < 1 and 0 <= slot.beta2 < 1 and slot.eps >= 0):
            raise ValueError(f"slots[{i}]: betas {slot.beta1, slot.beta2} must be in [0, 1) and eps {slot.eps} at least 0")
    if job.rule not in ("replay", "mean"):
        raise ValueError(f'rule must be "replay" or "mean", not {job.rule!r}')
    if job.out is not None:
        check_array("out", job.out, window, GRADIENT_DTYPES)
        _check_sharing(job, job.out)


def check_array(name: str, array: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must be of shape {tuple(shape)}, not {tuple(array.shape)}")
    if array.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, not {array.dtype}")
    if array.device.type != "cpu" or not array.is_contiguous():
        raise ValueError(f"{name} must be contiguous host memory")


def _check_sharing(job: ReplayJob, out: Tensor) -> None:
    """`out` is written element by element while gradients are read: it may take the place of the first one only."""
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for i, slot in enumerate(job.slots):
        other = slot.grad.data_ptr()
        same = i == 0 and other == begin and slot.grad.dtype == out.dtype
        if not same and begin < other + slot.grad.nbytes and other < end:
            raise ValueError(
                f"out may share memory with slots[0].grad, element by element, and with no other gradient (slots[{i}])"
            )


def _adamw_steps(job: ReplayJob) -> list[tuple[SlotGradient, Tensor]]:
    """Each AdamW step's settings and fp32 gradient [rows, length]."""
    grads = [slot.factor * slot.grad.float() for slot in job.slots]
    if job.rule == "mean" and grads:
        return [(job.slots[-1], torch.stack(grads).sum(0) / len(grads))]
    return list(zip(job.slots, grads, strict=True))


def _random_halves(key: int, steps: Tensor, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """16 random bits for each element of each moment, [rows, length] int64: a function of (key, element, step count).

    The element's index e = channel * length + position is hashed in 32 bits, under a 64-bit stream number made from the
    key, the channel's step count and e's upper half. int64 arithmetic wraps like the kernels' unsigned one.
    """
    element = rows[:, None] * length + torch.arange(length, device=rows.device)
    stream = _mix64(_mix64(torch.tensor(_signed(key), device=rows.device)) ^ (steps[:, None].long() << 32 | element >> 32))
    x = (element ^ stream) & 0xFFFFFFFF
    x = x ^ x >> 16
    x = (x * 0x21F0AAAD + (stream >> 32)) & 0xFFFFFFFF
    x = x ^ x >> 15
    x = (x * 0xD35A2D97) & 0xFFFFFFFF
    x = x ^ x >> 15
    return x & 0xFFFF, x >> 16


def _mix64(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 on int64, with logical shifts."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _signed(x: int) -> int:
    """The int64 with the low 64 bits of x."""
    return (x & (1 << 64) - 1) - ((x & 1 << 63) << 1)


def _round_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """fp32 to bf16, up with the probability that leaves the mean unchanged; `random` holds integers in [0, 2^16)."""
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + random >> 16).to(torch.int16).view(torch.bfloat16)  # the conversion keeps the low 16 bits
    return torch.where(x.isnan(), torch.nan, rounded)
