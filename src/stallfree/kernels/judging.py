"""What a call's gradients are worth: the interface that works it out on the device, of all weights and residents together.

Beside the gradients themselves nothing is read that a call does not write: numbers of weights and residents lie in flat
buffers, in the order of their keys, and what comes of a call in others, which the next call overwrites.

    sums        [2 * weights + groups] fp64        squared norms: of each weight, its part in deferred channels, of each group
    norms       [groups + weights] fp32            as user code has scaled them; 0 for a weight without a gradient
    record      [1 + weights + residents] fp32     whether the call is skipped, and what each gradient is multiplied by
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stallfree.kernels.block import DTYPES
from stallfree.kernels.checks import check_flat

MARGIN = 1e-6  # added to a norm that is divided by, as torch.nn.utils.clip_grad_norm_ does


@dataclass(frozen=True, eq=False)
class Evidence:
    """What calls are judged by. Everything stays where it is in memory."""

    starts: Sequence[int]  # of each weight's channels in the flat buffers; then how many channels there are
    squares: Tensor  # [channels] fp32, as `split` makes them
    deferred: Tensor  # [channels] bool: whose gradients go to the host
    score: Tensor  # [channels] fp32
    groups: Sequence[Tensor]  # by group of residents: their gradients, flat; zeros of those that have none
    residents: int  # in all groups

    @property
    def weights(self) -> int:
        return len(self.starts) - 1

    @property
    def channels(self) -> int:
        return self.starts[-1]


class Policy(NamedTuple):
    """How they are judged."""

    max_norm: float | None = None  # to which gradients are clipped
    skips: bool = True  # calls whose norm is not finite
    decay: float | None = None  # of scores; None: they stay as they are


@dataclass(frozen=True, eq=False)
class Verdict:
    """What came of the last call, on the device."""

    sums: Tensor
    norms: Tensor
    norm: Tensor  # of all gradients: fp32 scalar
    skip: Tensor  # bool scalar
    record: Tensor
    skips: Tensor  # [2] int64: how many calls were skipped, and which one was the last; 0: none
    skipped_norms: Tensor  # the norms of that one

    @classmethod
    def of(cls, evidence: Evidence) -> Verdict:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=evidence.squares.device)

        weights, groups = evidence.weights, len(evidence.groups)
        return cls(
            sums=zeros(2 * weights + groups, dtype=torch.float64),
            norms=zeros(groups + weights),
            norm=zeros(),
            skip=zeros(dtype=torch.bool),
            record=zeros(1 + weights + evidence.residents),
            skips=zeros(2, dtype=torch.int64),
            skipped_norms=zeros(groups + weights),
        )


class Judging(Protocol):
    """Judges calls by the evidence that it was planned for. Every method only enqueues work on the current stream, and gives
    the same bits every time."""

    verdict: Verdict

    def add_up(self) -> None:
        """Work out the verdict's sums: only for who goes on with them, as with sums over ranks. fp64, but squares in fp32."""
        ...

    def judge(
        self,
        call: int,
        target: Tensor,
        present: Tensor | None = None,
        scales: Tensor | None = None,
        squares: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> None:
        """Bring the verdict up to date, and take up this call's squares in the scores of weights that have a gradient.

        target: where the record goes as well, in host memory that the device reaches: no copy engine is asked, and no copy
        that is under way is waited for.
        present: bool `[weights]`, which have a gradient; None: all. scales: what user code multiplied gradients by, fp32,
        a scalar or `[weights]`; None: nothing.
        squares: what scores take up in place of the evidence's; sums are then those that are in the verdict.
        norm: of all gradients, fp32 scalar, where they do not say it.

        With a norm that is not finite the call is skipped, if the policy says so, and scores stay; nothing is clipped by it.

        Raises:
            ValueError: arguments of other sizes or dtypes. Nothing has been enqueued.
        """
        ...


def check_evidence(evidence: Evidence) -> torch.device:
    """Raise `ValueError` unless it is what `Evidence` says, on one device, which is returned."""
    starts, device = evidence.starts, evidence.squares.device
    if not starts or starts[0] != 0 or any(start >= end for start, end in pairwise(starts)):
        raise ValueError(f"every weight has channels, which follow each other from 0 on; their starts are {starts}")
    check_flat("squares", device, evidence.squares, evidence.channels, torch.float32)
    check_flat("deferred", device, evidence.deferred, evidence.channels, torch.bool)
    check_flat("score", device, evidence.score, evidence.channels, torch.float32)
    for group in evidence.groups:
        if group.dtype not in DTYPES:
            raise ValueError(f"gradients of residents must be fp32, bf16 or fp16, not {group.dtype}")
        check_flat("gradients", device, group, group.numel(), None)
    return device


def check_judge(
    evidence: Evidence,
    target: Tensor,
    present: Tensor | None,
    scales: Tensor | None,
    squares: Tensor | None,
    norm: Tensor | None,
) -> None:
    """Raise `ValueError` unless the arguments are what `Judging.judge` says."""
    device, weights = evidence.squares.device, evidence.weights
    check_flat("target", torch.device("cpu"), target, 1 + weights + evidence.residents, torch.float32)
    if present is not None:
        check_flat("present", device, present, weights, torch.bool)
    if scales is not None:
        check_flat("scales", device, scales, weights if scales.dim() else 1, torch.float32)
    if squares is not None:
        check_flat("squares", device, squares, evidence.channels, torch.float32)
    if norm is not None:
        check_flat("norm", device, norm, 1, torch.float32)


def all_norms(sums: Tensor, weights: int, present: Tensor | None, scales: Tensor | None, out: Tensor | None = None) -> Tensor:
    """The norms that a call is judged by, from a verdict's sums."""
    norms = sums.sqrt().float()
    split = norms[:weights]
    if scales is not None:
        split = split * scales.abs()
    if present is not None:
        split = torch.where(present, split, 0.0)
    return torch.cat([norms[2 * weights :], split], out=out)


def add_segments(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each segment in fp64; the offsets are those of all segments, and the end of the last."""
    return torch.segment_reduce(values.double(), "sum", offsets=offsets, unsafe=True)
