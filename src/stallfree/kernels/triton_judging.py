# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""`Judging` in Triton: two or three launches in one call of the driver, however many weights and residents there are, and one
more for each further dtype of residents.

What stays where it is, which is most, is named by device tables. Sums have a fixed order, and no atomics: each program of the
first kernel adds up a part of a weight's channels or of a group's gradients; where these have several parts, a second one adds
up the parts; each program of the last adds up the whole again, to learn whether it may take its channels' squares up in their
scores. That is some hundred numbers, and saves a launch that everything would wait for.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stallfree.kernels import driver
from stallfree.kernels.judging import MARGIN, Evidence, Policy, Verdict, check_evidence, check_judge
from stallfree.kernels.triton_functions import _pointer
from stallfree.kernels.triton_launch import Launch, launch_all
from stallfree.kernels.triton_tables import LANGUAGE_DTYPES, Shares, Table, table

ADDED: tl.constexpr = tl.constexpr(MARGIN)


class Head(NamedTuple):
    """What `judge_kernel` is told once and for all."""

    groups: int
    weights: int
    residents: int
    sums: int  # addresses, from here on
    norms: int
    norm: int
    skip: int
    record: int
    skips: int
    skipped_norms: int
    score: int
    limit: int  # of the norm; as `rate` and `rest`, the bits of a double
    may_skip: int
    rate: int  # of scores: 1 - decay
    rest: int  # 1 - rate


# Where it finds that in device memory.
GROUPS, WEIGHTS, RESIDENTS, SUMS, NORMS, NORM, SKIP, RECORD, SKIPS, SKIPPED_NORMS, SCORE, LIMIT, MAY_SKIP, RATE, REST = map(
    tl.constexpr, range(len(Head._fields))
)

kernel = triton.jit(do_not_specialize=("tiles", "head", "call", "target", "present", "scales", "stride", "squares", "norm"))


@kernel
def measure_kernel(tiles: tl.int64, DTYPE: tl.constexpr, SIZE: tl.constexpr) -> None:
    """Add up squared norms of SIZE channels, and of those that are deferred; or the squares of SIZE elements of DTYPE."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 5
    source = tl.load(row)
    deferred = tl.load(row + 1)  # 0: elements
    count = tl.load(row + 2)
    out = _pointer(tl.load(row + 3), tl.float64, False)
    held_out = _pointer(tl.load(row + 4), tl.float64, False)
    place = tl.arange(0, SIZE)
    inside = place < count
    if deferred == 0:
        x = tl.load(_pointer(source, DTYPE, False) + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, tl.sum((x * x).to(tl.float64), axis=0))
    else:
        squares = tl.load(_pointer(source, tl.float32, False) + place, mask=inside, other=0.0).to(tl.float64)
        held = tl.load(_pointer(deferred, tl.int8, False) + place, mask=inside, other=0) != 0
        tl.store(out, tl.sum(squares, axis=0))
        tl.store(held_out, tl.sum(tl.where(held, squares, 0.0), axis=0))


@kernel
def sum_parts_kernel(tiles: tl.int64, PARTS: tl.constexpr) -> None:
    """Add up one sum's parts."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 3
    parts = _pointer(tl.load(row), tl.float64, False)
    count = tl.load(row + 1)
    out = _pointer(tl.load(row + 2), tl.float64, False)
    total = tl.zeros([PARTS], tl.float64)
    start = 0
    while start < count:  # no range(): the interpreter cannot make its bound from a loaded value
        part = start + tl.arange(0, PARTS)
        total += tl.load(parts + part, mask=part < count, other=0.0)
        start += PARTS
    tl.store(out, tl.sum(total, axis=0))


@triton.jit
def _norms(entry, sums, groups, weights, present, scales, stride):
    """Of groups and then weights, as `Verdict.norms`; 0 beyond the last."""
    weight = entry - groups
    is_weight = (weight >= 0) & (weight < weights)
    there = tl.load(_pointer(present, tl.int8, False) + weight, mask=is_weight, other=0) != 0
    scale = tl.load(_pointer(scales, tl.float32, False) + weight * stride, mask=is_weight, other=1.0)
    from_sums = _pointer(sums, tl.float64, False) + tl.where(weight < 0, 2 * weights + entry, weight)
    total = tl.load(from_sums, mask=weight < weights, other=0.0)
    total = tl.where(weight < 0, total.to(tl.float32).to(tl.float64), total)  # a group's is infinite where fp32 ends
    norms = tl.sqrt(total).to(tl.float32) * tl.abs(scale)
    return tl.where((weight < 0) | there, norms, 0.0)


@kernel
def judge_kernel(
    head: tl.int64,  # a `Head`
    tiles: tl.int64,  # [programs, 3]: weight, first channel, channels
    call: tl.int64,
    target: tl.int64,
    present: tl.int64,
    scales: tl.int64,
    stride: tl.int64,  # 0: one scale for all weights
    squares: tl.int64,
    norm: tl.int64,  # 0: from the sums
    SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    """Judge a call; program 0 writes what comes of it, the others update SIZE channels' scores."""
    constants = _pointer(head, tl.int64, False)  # all of it is loaded at once, before the first use
    groups = tl.load(constants + GROUPS)
    weights = tl.load(constants + WEIGHTS)
    residents = tl.load(constants + RESIDENTS)
    sums = tl.load(constants + SUMS)
    norms_out = _pointer(tl.load(constants + NORMS), tl.float32, False)
    norm_out = _pointer(tl.load(constants + NORM), tl.float32, False)
    skip_out = _pointer(tl.load(constants + SKIP), tl.int8, False)
    record = _pointer(tl.load(constants + RECORD), tl.float32, False)
    skips = _pointer(tl.load(constants + SKIPS), tl.int64, False)
    skipped_norms = _pointer(tl.load(constants + SKIPPED_NORMS), tl.float32, False)
    score = tl.load(constants + SCORE)
    limit = tl.load(constants + LIMIT).to(tl.float64, bitcast=True).to(tl.float32)
    may_skip = tl.load(constants + MAY_SKIP) != 0
    rate = tl.load(constants + RATE).to(tl.float64, bitcast=True).to(tl.float32)
    rest = tl.load(constants + REST).to(tl.float64, bitcast=True).to(tl.float32)
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 3
    weight = tl.load(row)
    first = tl.load(row + 1)
    count = tl.load(row + 2)

    total = tl.zeros([ENTRIES], tl.float64)
    start = 0
    while start < groups + weights:
        norms = _norms(start + tl.arange(0, ENTRIES), sums, groups, weights, present, scales, stride).to(tl.float64)
        total += norms * norms
        start += ENTRIES
    whole = tl.math.sqrt_rn(tl.sum(total, axis=0).to(tl.float32))
    whole = tl.where(norm != 0, tl.load(_pointer(norm, tl.float32, False), mask=norm != 0, other=0.0), whole)
    finite = whole < float("inf")
    skipped = may_skip & (finite == 0)

    if tl.program_id(0) == 0:
        clip = tl.where(finite, tl.minimum(tl.math.div_rn(1.0, whole + ADDED) * limit, 1.0), 1.0)
        begin = 0
        while begin < groups + weights:
            entry = begin + tl.arange(0, ENTRIES)
            found = _norms(entry, sums, groups, weights, present, scales, stride)
            tl.store(norms_out + entry, found, mask=entry < groups + weights)
            tl.store(skipped_norms + entry, found, mask=(entry < groups + weights) & skipped)
            begin += ENTRIES
        begin = 0
        while begin < 1 + weights + residents:
            place = begin + tl.arange(0, ENTRIES)
            is_weight = (place > 0) & (place <= weights)
            scale = tl.load(_pointer(scales, tl.float32, False) + (place - 1) * stride, mask=is_weight, other=1.0)
            value = tl.where(place == 0, tl.where(skipped, 1.0, 0.0), clip * scale)
            tl.store(record + place, value, mask=place < 1 + weights + residents)
            tl.store(_pointer(target, tl.float32, False) + place, value, mask=place < 1 + weights + residents)
            begin += ENTRIES
        tl.store(norm_out, whole)
        tl.store(skip_out, skipped.to(tl.int8))
        tl.store(skips, tl.load(skips) + skipped.to(tl.int64))
        tl.store(skips + 1, call, mask=skipped)

    there = tl.load(_pointer(present, tl.int8, False) + weight) != 0
    if skipped | (there == 0):
        return
    channel = tl.arange(0, SIZE)
    inside = channel < count
    to_score = _pointer(score, tl.float32, False) + first + channel
    old = tl.load(to_score, mask=inside, other=0.0)
    new = tl.load(_pointer(squares, tl.float32, False) + first + channel, mask=inside, other=0.0)
    factor = tl.load(_pointer(scales, tl.float32, False) + weight * stride)
    new = new * (factor * factor)
    change = new - old
    tl.store(to_score, tl.where(rate < 0.5, old + rate * change, new - change * rest), mask=inside)  # as torch's lerp


class TritonJudging:
    """`Judging` in Triton."""

    def __init__(self, evidence: Evidence, policy: Policy, device: torch.device, shares: Shares, checks: bool) -> None:
        if check_evidence(evidence) != device:
            raise ValueError(f"the evidence is on {evidence.squares.device}, the kernel on {device}")
        self.verdict = verdict = Verdict.of(evidence)
        self._evidence, self._device, self._shares = evidence, device, shares
        self._checks = False  # for the call that loads
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._every = torch.ones(max(evidence.weights, 1), dtype=torch.bool, device=device)
        self._measure = self._measuring()
        rate = 0.0 if policy.decay is None else 1.0 - policy.decay
        limit = float("inf") if policy.max_norm is None else policy.max_norm
        head = Head(
            groups=len(evidence.groups),
            weights=evidence.weights,
            residents=evidence.residents,
            sums=verdict.sums.data_ptr(),
            norms=verdict.norms.data_ptr(),
            norm=verdict.norm.data_ptr(),
            skip=verdict.skip.data_ptr(),
            record=verdict.record.data_ptr(),
            skips=verdict.skips.data_ptr(),
            skipped_norms=verdict.skipped_norms.data_ptr(),
            score=evidence.score.data_ptr(),
            limit=_bits(limit),
            may_skip=policy.skips,
            rate=_bits(rate),
            rest=_bits(1.0 - rate),
        )
        tiles = [(0, 0, 0)]
        for weight, (first, end) in enumerate(pairwise(evidence.starts) if policy.decay is not None else ()):
            tiles += [(weight, place, min(shares.size, end - place)) for place in range(first, end, shares.size)]
        self._head, self._tiles = _table([head], device), _table(tiles, device)
        self._judge = Launch(judge_kernel, self._tiles.programs, (shares.size, shares.entries), 4)
        self._load()
        self._checks = checks

    def _measuring(self) -> list[tuple[Launch, tuple[int, ...]]]:
        """The launches that work sums out."""
        evidence, device = self._evidence, self._device
        squares, deferred, item = evidence.squares.data_ptr(), evidence.deferred.data_ptr(), 8
        size, sums, weights = self._shares.size, self.verdict.sums.data_ptr(), evidence.weights
        several = sum(-(-(end - first) // size) for first, end in pairwise(evidence.starts)) * 2
        several += sum(-(-group.numel() // size) for group in evidence.groups)
        self._parts = torch.zeros(max(several, 1), dtype=torch.float64, device=device)
        rows: dict[torch.dtype, list[tuple[int, ...]]] = defaultdict(list)
        parts: list[tuple[int, ...]] = []
        free = self._parts.data_ptr()

        def taken(count: int, out: int) -> int:
            """Where a sum's parts go."""
            nonlocal free
            if count <= 1:
                return out
            begin, free = free, free + item * count
            parts.append((begin, count, out))
            return begin

        any_dtype = evidence.groups[0].dtype if evidence.groups else torch.float32  # squares are fp32, with whichever they go
        for weight, (first, end) in enumerate(pairwise(evidence.starts)):
            count = -(-(end - first) // size)
            out, held = (taken(count, sums + item * place) for place in (weight, weights + weight))
            for part, place in enumerate(range(first, end, size)):
                places = (squares + 4 * place, deferred + place, min(size, end - place))
                rows[any_dtype].append((*places, out + item * part, held + item * part))
        for number, group in enumerate(evidence.groups):
            numel, source = group.numel(), group.data_ptr()
            out = taken(-(-numel // size), sums + item * (2 * weights + number))
            for part, place in enumerate(range(0, max(numel, 1), size)):  # of one without elements, too: sums are overwritten
                count = min(size, numel - place)
                rows[group.dtype].append((source + group.itemsize * place, 0, count, out + item * part, 0))
        self._kept: list[Table] = []
        launches: list[tuple[Launch, tuple[int, ...]]] = []

        def launch(function: Any, mine: list[tuple[int, ...]], *constants: Any) -> None:
            tiles = _table(mine, device)
            self._kept.append(tiles)
            launches.append((Launch(function, tiles.programs, constants, 4), (tiles.address,)))

        for dtype, mine in rows.items():
            launch(measure_kernel, mine, LANGUAGE_DTYPES[dtype], size)
        if parts:
            launch(sum_parts_kernel, parts, self._shares.parts)
        return launches

    def _load(self) -> None:
        """Compile and load, by a call in which no weight is present; nothing of it is kept."""
        nobody = torch.zeros_like(self._every)[: self._evidence.weights]
        self.judge(0, torch.empty_like(self.verdict.record), nobody)
        for flat in vars(self.verdict).values():
            flat.zero_()

    def add_up(self) -> None:
        with driver.current_device(self._device):
            launch_all(*self._measure)

    def judge(
        self,
        call: int,
        target: Tensor,
        present: Tensor | None = None,
        scales: Tensor | None = None,
        squares: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> None:
        if self._checks:
            check_judge(self._evidence, target, present, scales, squares, norm)
        there = self._every if present is None or not self._evidence.weights else present
        factors = self._one if scales is None else scales
        verdict = (
            self._judge,
            (
                self._head.address,
                self._tiles.address,
                call,
                target.data_ptr(),
                there.data_ptr(),
                factors.data_ptr(),
                factors.dim(),
                (self._evidence.squares if squares is None else squares).data_ptr(),
                0 if norm is None else norm.data_ptr(),
            ),
        )
        with driver.current_device(self._device):
            if squares is None:
                launch_all(*self._measure, verdict)
            else:
                launch_all(verdict)


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Table:
    return table([torch.tensor(rows, dtype=torch.int64, device="cpu")], device)


def _bits(number: float) -> int:
    """The bits of a double, as a table holds them."""
    return int(struct.unpack("q", struct.pack("d", number))[0])
