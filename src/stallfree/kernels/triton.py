# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Block kernels in Triton: each call is one or two launches over tables of tiles, built once per layout.

A program finds its work in a row of a device table: which weight, which tile, and where its parts lie in the flat buffers.
What changes from call to call, the addresses of gradients and weights and which of them are present, travels as kernel
arguments. A table in pinned memory would need a copy per call, which queues behind whatever large copy the device is
making, and a guard against being overwritten while it is in use.

Reductions have a fixed order: each program sums its chunk of a channel, a second launch sums the chunks. No atomics.

Importing this module needs triton. It runs on CUDA, and on the CPU in triton's interpreter if TRITON_INTERPRET=1 is set
when it is imported.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from stallfree.kernels.block import DTYPES, BlockLayout, Targets, check_adamw, check_publish, check_split
from stallfree.kernels.device import Hyper

# Kernels. Addresses are int64 and never specialized on, so that no value of an argument causes a compilation in mid-training.
# UNIT: the tables count lengths (and columns) in units of 8 elements, if all are multiples of 8: the compiler then knows that
# rows begin at multiples of 16 bytes, and moves 16 bytes at a time where ALIGNED says that the tensors do, too.

INTERPRETED = triton.knobs.runtime.interpret  # triton reads it where kernels are defined
kernel = triton.jit(
    do_not_specialize=(
        *("tiles", "targets", "channel_of", "partial", "squares", "selected", "deferred", "values", "addresses", "present"),
        *("master", "exp_avg", "exp_avg_sq", "grad", "steps", "places", "coefficients", "factors", "skip"),
        *("lr", "beta1", "beta2", "eps", "weight_decay"),
    )
)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BYTES: tl.constexpr = 16):
    """An address as a typed pointer; if ALIGNED, to a multiple of BYTES, which each thread then moves at a time."""
    pointer = address.to(tl.int64).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, BYTES)
    return pointer


@triton.jit
def _choose(addresses, segment):
    """addresses[segment], for a tuple in kernel arguments, which have no index."""
    address = addresses[0].to(tl.int64)
    for i in tl.static_range(1, len(addresses)):
        address = tl.where(segment == i, addresses[i].to(tl.int64), address)
    return address


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """fp32 to DTYPE, to nearest, ties to even. bf16 by hand: the interpreter's conversion truncates."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        rounded = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x.to(DTYPE)
    return rounded


@kernel
def _split(
    tiles: tl.int64,  # [programs, 9]
    targets: tl.int64,
    partial: tl.int64,
    squares: tl.int64,
    selected: tl.int64,
    deferred: tl.int64,
    present: tl.int64,
    addresses,  # the weights' or gradients'
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """CHANNELS channels, CHUNK elements of each: copy them to their rows, and sum their squares."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 9  # all of it is loaded at once, before the first use
    segment = tl.load(row)
    channel = tl.load(row + 1).to(tl.int32) * CHANNELS + tl.arange(0, CHANNELS)
    chunk = tl.load(row + 2).to(tl.int32)
    channels = tl.load(row + 3).to(tl.int32)
    length = tl.load(row + 4).to(tl.int32) * UNIT
    first_channel = tl.load(row + 5)
    to_selected = _pointer(selected, DTYPE, ALIGNED) + tl.load(row + 6) * UNIT
    to_deferred = _pointer(deferred, DTYPE, ALIGNED) + tl.load(row + 7) * UNIT
    first_partial = tl.load(row + 8)  # -1: the channels have one chunk only
    if ((present >> segment) & 1) == 0:
        return
    if COLUMNS:
        channels = channels * UNIT
    inside = channel < channels
    target = tl.load(_pointer(targets, tl.int32, False) + first_channel + channel, mask=inside, other=0)
    place = tl.where(target < 0, -1 - target, target).to(tl.int64)
    to = tl.where(target < 0, to_deferred + place * length, to_selected + place * length)
    grad = _pointer(_choose(addresses, segment), DTYPE, ALIGNED)
    if COLUMNS:  # tiles [LENGTH, CHANNELS], turned on their way out
        total = tl.zeros([LENGTH, CHANNELS], tl.float32)
    else:  # tiles [CHANNELS, LENGTH]
        total = tl.zeros([CHANNELS, LENGTH], tl.float32)
    for done in range(0, CHUNK, LENGTH):
        start = chunk * CHUNK + done
        if start < length:
            position = start + tl.arange(0, LENGTH)
            if COLUMNS:
                mask = (position < length)[:, None] & inside[None, :]
                x = tl.load((grad + position.to(tl.int64) * channels)[:, None] + channel[None, :], mask=mask, other=0.0)
                tl.store(to[None, :] + position[:, None], x, mask=mask)
            else:
                mask = inside[:, None] & (position < length)[None, :]
                x = tl.load((grad + channel.to(tl.int64) * length)[:, None] + position[None, :], mask=mask, other=0.0)
                tl.store(to[:, None] + position[None, :], x, mask=mask)
            wide = x.to(tl.float32)
            total += wide * wide
    sums = tl.sum(total, axis=0 if COLUMNS else 1)
    parts = _pointer(partial, tl.float32, False) + first_partial + chunk.to(tl.int64) * channels
    out = tl.where(first_partial < 0, _pointer(squares, tl.float32, False) + first_channel, parts)
    tl.store(out + channel, sums, mask=inside)


@kernel
def _sum_chunks(
    tiles: tl.int64,  # [programs, 7]
    partial: tl.int64,
    squares: tl.int64,
    present: tl.int64,
    CHANNELS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Squared norms of CHANNELS channels from the sums of their chunks."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 7
    segment = tl.load(row)
    channel = tl.load(row + 1) * CHANNELS + tl.arange(0, CHANNELS)
    channels = tl.load(row + 3)
    chunks = tl.load(row + 4)
    out = _pointer(squares, tl.float32, False) + tl.load(row + 5) + channel
    parts = _pointer(partial, tl.float32, False) + tl.load(row + 6) + channel
    if ((present >> segment) & 1) == 0:
        return
    inside = channel < channels
    total = tl.zeros([CHUNKS, CHANNELS], tl.float32)
    start = 0
    while start < chunks:  # no range(): the interpreter cannot make its bound from a loaded value
        chunk = start + tl.arange(0, CHUNKS)
        mask = (chunk < chunks)[:, None] & inside[None, :]
        total += tl.load((chunk * channels)[:, None] + parts[None, :], mask=mask, other=0.0)
        start += CHUNKS
    tl.store(out, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _power(base, exponent):
    """base ** exponent for an fp64 scalar and non-negative int32: by squaring, since its error must not grow with exponent."""
    power = tl.zeros_like(exponent).to(tl.float64) + 1.0
    for bit in tl.static_range(31):
        power = tl.where(((exponent >> bit) & 1) == 1, power * base, power)
        base = base * base
    return power


@kernel
def _count(
    tiles: tl.int64,  # [programs, 6]
    steps: tl.int64,
    coefficients: tl.int64,  # [9, places] fp32
    factors: tl.int64,
    skip: tl.int64,
    present: tl.int64,
    places: tl.int64,
    lr: tl.int64,  # from here on: the bits of a double
    beta1: tl.int64,
    beta2: tl.int64,
    eps: tl.int64,
    weight_decay: tl.int64,
    PLACES: tl.constexpr,
) -> None:
    """Advance the step counts of places, and work out what `_adamw` multiplies with at this count."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 6
    segment = tl.load(row)
    skipped = tl.load(_pointer(skip, tl.int8, False)) != 0
    if skipped | (((present >> segment) & 1) == 0):
        return
    place = tl.load(row + 1) * PLACES + tl.arange(0, PLACES)
    inside = place < tl.load(row + 4)
    place += tl.load(row + 3)
    count = _pointer(steps, tl.int32, False) + place
    n = tl.load(count, mask=inside, other=0) + 1
    tl.store(count, n, mask=inside)
    lr_ = lr.to(tl.int64).to(tl.float64, bitcast=True)
    beta1_ = beta1.to(tl.int64).to(tl.float64, bitcast=True)
    beta2_ = beta2.to(tl.int64).to(tl.float64, bitcast=True)
    eps_ = eps.to(tl.int64).to(tl.float64, bitcast=True)
    decay = 1.0 - lr_ * weight_decay.to(tl.int64).to(tl.float64, bitcast=True)
    shared = _pointer(coefficients, tl.float32, False) + tl.load(row + 3)  # programs of one weight write the same values here
    tl.store(shared, tl.load(_pointer(factors, tl.float32, False) + tl.load(row + 5)))
    tl.store(shared + places, decay.to(tl.float32))
    tl.store(shared + places * 2, beta1_.to(tl.float32))
    tl.store(shared + places * 3, (1.0 - beta1_).to(tl.float32))
    tl.store(shared + places * 4, beta2_.to(tl.float32))
    tl.store(shared + places * 5, (1.0 - beta2_).to(tl.float32))
    tl.store(shared + places * 6, eps_.to(tl.float32))
    out = _pointer(coefficients, tl.float32, False) + place
    tl.store(out + places * 7, (lr_ / (1.0 - _power(beta1_, n))).to(tl.float32), mask=inside)
    tl.store(out + places * 8, tl.sqrt(1.0 - _power(beta2_, n)).to(tl.float32), mask=inside)


@kernel
def _adamw(
    tiles: tl.int64,  # [programs, 8]
    channel_of: tl.int64,
    coefficients: tl.int64,
    master: tl.int64,
    exp_avg: tl.int64,
    exp_avg_sq: tl.int64,
    grad: tl.int64,
    skip: tl.int64,
    places: tl.int64,
    present: tl.int64,
    addresses,  # the weights' or gradients'
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    PLACES: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    """One AdamW step of LENGTH elements of PLACES selected channels, and what the weight shows of it."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 8
    segment = tl.load(row)
    place = tl.load(row + 1) * PLACES + tl.arange(0, PLACES)
    position = tl.load(row + 2).to(tl.int32) * LENGTH + tl.arange(0, LENGTH)
    length = tl.load(row + 3).to(tl.int32) * UNIT
    channels = tl.load(row + 4)
    inside = place < tl.load(row + 5)
    first_place = tl.load(row + 6)
    start = tl.load(row + 7) * UNIT + place * length  # [PLACES]
    skipped = tl.load(_pointer(skip, tl.int8, False)) != 0
    if skipped | (((present >> segment) & 1) == 0):
        return
    mask = inside[:, None] & (position < length)[None, :]
    channel = tl.load(_pointer(channel_of, tl.int32, False) + first_place + place, mask=inside, other=0).to(tl.int64)
    # Settings are a weight's, so any of its places has them; the last two depend on the place's step count.
    shared = _pointer(coefficients, tl.float32, False) + first_place
    own = shared + place
    factor = tl.load(shared)
    decay = tl.load(shared + places)
    beta1 = tl.load(shared + places * 2)
    rest1 = tl.load(shared + places * 3)
    beta2 = tl.load(shared + places * 4)
    rest2 = tl.load(shared + places * 5)
    eps = tl.load(shared + places * 6)
    step_size = tl.load(own + places * 7, mask=inside, other=1.0)[:, None]
    root = tl.load(own + places * 8, mask=inside, other=1.0)[:, None]

    to_master = (_pointer(master, tl.float32, ALIGNED) + start)[:, None] + position[None, :]
    to_avg = (_pointer(exp_avg, tl.float32, ALIGNED) + start)[:, None] + position[None, :]
    to_avg_sq = (_pointer(exp_avg_sq, tl.float32, ALIGNED) + start)[:, None] + position[None, :]
    G_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 2  # 4 elements per thread, as of the state: nothing is rearranged
    g = tl.load((_pointer(grad, DTYPE, ALIGNED, G_BYTES) + start)[:, None] + position[None, :], mask=mask, other=0.0)
    g = g.to(tl.float32) * factor
    m = beta1 * tl.load(to_avg, mask=mask, other=0.0) + rest1 * g
    v = beta2 * tl.load(to_avg_sq, mask=mask, other=0.0) + rest2 * g * g
    direction = tl.math.div_rn(m, tl.math.div_rn(tl.math.sqrt_rn(v), root) + eps)
    w = decay * tl.load(to_master, mask=mask, other=0.0) - step_size * direction
    tl.store(to_avg, m, mask=mask)
    tl.store(to_avg_sq, v, mask=mask)
    tl.store(to_master, w, mask=mask)

    shown = _round(w, DTYPE)
    weight = _pointer(_choose(addresses, segment), DTYPE, ALIGNED, G_BYTES)
    if COLUMNS:  # neighbouring threads take neighbouring places, whose channels often share a sector of a weight's row
        tl.store((weight + channel)[:, None] + (position.to(tl.int64) * channels)[None, :], shown, mask=mask)
    else:
        tl.store((weight + channel.to(tl.int64) * length)[:, None] + position[None, :], shown, mask=mask)


@kernel
def _publish(
    tiles: tl.int64,  # those of `_split`
    targets: tl.int64,
    values: tl.int64,
    present: tl.int64,
    addresses,  # the weights' or gradients'
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Copy CHUNK elements of the deferred ones among CHANNELS channels into their weight."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 9
    segment = tl.load(row)
    channel = tl.load(row + 1).to(tl.int32) * CHANNELS + tl.arange(0, CHANNELS)
    chunk = tl.load(row + 2).to(tl.int32)
    channels = tl.load(row + 3).to(tl.int32)
    length = tl.load(row + 4).to(tl.int32) * UNIT
    to_target = _pointer(targets, tl.int32, False) + tl.load(row + 5) + channel
    source = _pointer(values, DTYPE, ALIGNED) + tl.load(row + 7) * UNIT
    if ((present >> segment) & 1) == 0:
        return
    if COLUMNS:
        channels = channels * UNIT
    target = tl.load(to_target, mask=channel < channels, other=0)
    is_deferred = target < 0
    source = source + (-1 - target).to(tl.int64) * length  # [CHANNELS]
    # Between selected columns single elements are written: with a pointer of unknown alignment a warp writes neighbours.
    weight = _pointer(_choose(addresses, segment), DTYPE, ALIGNED and not COLUMNS)
    for done in range(0, CHUNK, LENGTH):
        start = chunk * CHUNK + done
        if start < length:
            position = start + tl.arange(0, LENGTH)
            if COLUMNS:
                mask = (position < length)[:, None] & is_deferred[None, :]
                x = tl.load(source[None, :] + position[:, None], mask=mask, other=0.0)
                tl.store((weight + position.to(tl.int64) * channels)[:, None] + channel[None, :], x, mask=mask)
            else:
                mask = is_deferred[:, None] & (position < length)[None, :]
                x = tl.load(source[:, None] + position[None, :], mask=mask, other=0.0)
                tl.store((weight + channel.to(tl.int64) * length)[:, None] + position[None, :], x, mask=mask)


class Tile(NamedTuple):
    """The share of one program; powers of two."""

    channels: int
    length: int  # elements of each channel that are held at a time
    chunk: int  # elements of each channel that a program goes through; a multiple of length
    warps: int


class Tiling(NamedTuple):
    """Shares for weights whose channels are columns, and rows; and for the state of selected channels of either."""

    columns: Tile = Tile(64, 64, 256, 4)
    rows: Tile = Tile(16, 256, 2048, 4)
    column_state: Tile = Tile(32, 64, 64, 4)
    row_state: Tile = Tile(8, 256, 256, 4)


MAX_WEIGHTS = 32  # in one launch; bounds the argument list and the time to choose from it
SUM_CHANNELS, SUM_CHUNKS, COUNT_PLACES = 64, 32, 128
LANGUAGE_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
assert set(LANGUAGE_DTYPES) == set(DTYPES)


class _Table(NamedTuple):
    rows: Tensor  # [programs, columns] int64, on the device
    grid: tuple[int]
    address: int


class _Call(NamedTuple):
    """What changes from call to call: arguments `present` to `ALIGNED` of the kernels."""

    present: int  # bit mask
    addresses: tuple[int, ...]
    dtype: tl.dtype
    aligned: bool


class _Group:
    """Some weights of a layout whose channels lie along the same axis: what one launch of each kernel goes through."""

    def __init__(self, layout: BlockLayout, members: Sequence[int], tiling: Tiling) -> None:
        self.members = tuple(members)
        segments = [layout.segments[index] for index in members]
        columns = segments[0].channel_dim == 1
        self.tile, self.state_tile = (tiling.columns, tiling.column_state) if columns else (tiling.rows, tiling.row_state)
        even = [segment.length for segment in segments] + [segment.channels for segment in segments if columns]
        even += [start[index] for index in members for start in (layout.selected_starts, layout.deferred_starts)]
        self.unit = unit = 8 if all(number % 8 == 0 for number in even) else 1
        self.shape = (columns, unit, *self.tile[:3])  # arguments COLUMNS to CHUNK of the kernels
        self.state_shape = (columns, unit, *self.state_tile[:2])
        self.chunks = 0  # all channels' sums of chunks, where there are several
        tiles, sums, counts, states = [], [], [], []
        for place, (index, segment) in enumerate(zip(members, segments, strict=True)):
            channels, length, selected = segment.channels, segment.length, segment.selected
            channel_start, place_start = layout.channel_starts[index], layout.place_starts[index]
            selected_start, deferred_start = layout.selected_starts[index] // unit, layout.deferred_starts[index] // unit
            counted = channels // unit if columns else channels
            chunks = triton.cdiv(length, self.tile.chunk)
            first_chunk = -1 if chunks == 1 else self.chunks
            grid = (triton.cdiv(channels, self.tile.channels), chunks)
            tiles.append(
                _programs(
                    *(place, *grid, counted, length // unit),
                    *(channel_start, selected_start, deferred_start, first_chunk),
                )
            )
            if chunks > 1:
                grid = (triton.cdiv(channels, SUM_CHANNELS), 1)
                sums.append(_programs(place, *grid, channels, chunks, channel_start, first_chunk))
                self.chunks += chunks * channels
            if selected:
                grid = (triton.cdiv(selected, COUNT_PLACES), 1)
                counts.append(_programs(place, *grid, place_start, selected, index))
                grid = (triton.cdiv(selected, self.state_tile.channels), triton.cdiv(length, self.state_tile.length))
                states.append(_programs(place, *grid, length // unit, channels, selected, place_start, selected_start))
        self.tiles = _table(tiles, layout.device)
        self.sums = _table(sums, layout.device) if sums else None
        self.counts = _table(counts, layout.device) if counts else None
        self.states = _table(states, layout.device) if states else None
        width = triton.next_power_of_2(len(members))  # few lengths of argument lists, few compilations
        self._absent = [self.tiles.address] * width  # any address that is there

    def call(self, dtype: torch.dtype, tensors: Sequence[Tensor | None], *others: int) -> _Call:
        """The call with these weights or gradients, and with flat buffers at these other addresses."""
        addresses, present, every = self._absent.copy(), 0, 0
        for place, index in enumerate(self.members):
            tensor = tensors[index]
            if tensor is not None:
                addresses[place] = address = tensor.data_ptr()
                every |= address
                present |= 1 << place
        for address in others:
            every |= address
        return _Call(present, tuple(addresses), LANGUAGE_DTYPES[dtype], self.unit > 1 and every % 16 == 0)

    def empty_calls(self, dtype: torch.dtype) -> list[_Call]:
        """Calls without weights, of every kind that compiles to different code."""
        aligned = (False, True) if self.unit > 1 else (False,)
        return [_Call(0, tuple(self._absent), LANGUAGE_DTYPES[dtype], flag) for flag in aligned]


def _groups(layout: BlockLayout, tiling: Tiling) -> list[_Group]:
    groups = []
    for channel_dim in (0, 1):
        members = [index for index, segment in enumerate(layout.segments) if segment.channel_dim == channel_dim]
        groups += [_Group(layout, members[i : i + MAX_WEIGHTS], tiling) for i in range(0, len(members), MAX_WEIGHTS)]
    return groups


def _programs(place: int, inner: int, outer: int, *constants: int) -> Tensor:
    """One weight's rows of a table, `[inner * outer, 3 + constants]`: its place, both tile numbers, the constants."""
    rows = torch.empty(outer, inner, 3 + len(constants), dtype=torch.int64, device="cpu")
    rows[:] = torch.tensor([place, 0, 0, *constants], device="cpu")
    rows[:, :, 1] = torch.arange(inner, device="cpu")
    rows[:, :, 2] = torch.arange(outer, device="cpu").unsqueeze(1)
    return rows.flatten(0, 1)


def _table(rows: list[Tensor], device: torch.device) -> _Table:
    table = torch.cat(rows).to(device)
    return _Table(table, (len(table),), table.data_ptr())


@lru_cache(maxsize=1024)
def _bits(hyper: Hyper) -> tuple[int, ...]:
    """The bits of each setting as a double: as floating-point arguments they would arrive in fp32."""
    return struct.unpack("5q", struct.pack("5d", *hyper))


class TritonBlock:
    """A `BlockKernel` in Triton, for one device.

    Calls must be ordered on the device (one stream, or streams that wait): sums of chunks and AdamW's coefficients pass
    through scratch memory that all layouts share. Without `warm_up` a layout's first call builds its tables, and the first
    call with a dtype compiles; later calls allocate nothing. Buffers and weights that begin at multiples of 16 bytes, with
    channels and lengths that are multiples of 8, are the fast case; all others work.

    Raises:
        ValueError: neither a CUDA device, nor the CPU under TRITON_INTERPRET=1.
    """

    def __init__(self, device: torch.device | str, tiling: Tiling | None = None) -> None:
        self.device = torch.empty(0, device=device).device
        if self.device.type != ("cpu" if INTERPRETED else "cuda"):
            raise ValueError(f"Triton kernels run on CUDA or, with TRITON_INTERPRET=1, on the CPU; not here on {self.device}")
        self.tiling = tiling or Tiling()
        self._plans: WeakKeyDictionary[BlockLayout, list[_Group]] = WeakKeyDictionary()
        self._partial = torch.empty(1, dtype=torch.float32, device=self.device)
        self._coefficients = torch.empty(9, dtype=torch.float32, device=self.device)

    def warm_up(self, layout: BlockLayout, dtype: torch.dtype) -> None:
        """Compile and load, by launches in which no weight is present."""
        with self._current_device():
            for group in self._plan(layout):
                for call in group.empty_calls(dtype):
                    self._launch_split(group, call, 0, 0, 0, 0)
                    self._launch_publish(group, call, 0, 0)
                    if group.states is not None:
                        flag = self._partial.data_ptr()  # read whatever the call
                        self._launch_count(group, 0, 0, 0, flag, 0, Hyper(0.0, 0.0, 0.0, 0.0, 0.0))
                        self._launch_adamw(group, call, 0, 0, 0, 0, 0, flag, 0)

    def split(
        self,
        layout: BlockLayout,
        targets: Targets,
        grads: Sequence[Tensor | None],
        squares: Tensor,
        selected: Tensor,
        deferred: Tensor,
    ) -> None:
        dtype = check_split(layout, grads, squares, selected, deferred)
        if dtype is None:
            return
        rows = targets.rows.data_ptr()
        flats = (selected.data_ptr(), deferred.data_ptr())
        with self._current_device():
            for group in self._plan(layout):
                call = group.call(dtype, grads, *flats)
                if call.present:
                    self._launch_split(group, call, rows, squares.data_ptr(), *flats)

    def adamw(
        self,
        layout: BlockLayout,
        targets: Targets,
        weights: Sequence[Tensor | None],
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        steps: Tensor,
        grad: Tensor,
        hypers: Sequence[Hyper | None],
        factors: Tensor,
        skip: Tensor,
    ) -> None:
        dtype = check_adamw(layout, weights, master, exp_avg, exp_avg_sq, steps, grad, hypers, factors, skip)
        if dtype is None:
            return
        weights = [None if hyper is None else weight for weight, hyper in zip(weights, hypers, strict=True)]
        channels, flag = targets.selected.data_ptr(), skip.data_ptr()
        flats = (master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr())
        with self._current_device():
            for group in self._plan(layout):
                call = group.call(dtype, weights, *flats)
                if not call.present or group.states is None:
                    continue
                settings: dict[Hyper, int] = {}  # few, mostly one
                for place, index in enumerate(group.members):
                    hyper = hypers[index]
                    if hyper is not None and call.present >> place & 1:
                        settings[hyper] = settings.get(hyper, 0) | 1 << place
                for hyper, present in settings.items():
                    self._launch_count(group, present, steps.data_ptr(), factors.data_ptr(), flag, layout.places, hyper)
                self._launch_adamw(group, call, channels, *flats, flag, layout.places)

    def publish(self, layout: BlockLayout, targets: Targets, weights: Sequence[Tensor | None], values: Tensor) -> None:
        dtype = check_publish(layout, weights, values)
        if dtype is None:
            return
        source = values.data_ptr()
        with self._current_device():
            for group in self._plan(layout):
                call = group.call(dtype, weights, source)
                if call.present:
                    self._launch_publish(group, call, targets.rows.data_ptr(), source)

    def _plan(self, layout: BlockLayout) -> list[_Group]:
        plan = self._plans.get(layout)
        if plan is None:
            if layout.device != self.device:
                raise ValueError(f"the layout is on {layout.device}, the kernel on {self.device}")
            plan = self._plans[layout] = _groups(layout, self.tiling)
            chunks = max((group.chunks for group in plan), default=0)
            if chunks > self._partial.numel():
                self._partial = torch.empty(chunks, dtype=torch.float32, device=self.device)
            if 9 * layout.places > self._coefficients.numel():
                self._coefficients = torch.empty(9 * layout.places, dtype=torch.float32, device=self.device)
        return plan

    def _current_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.device.type == "cpu" else torch.cuda.device(self.device)

    # Launches, shared by calls and warm-up so that both use the same compiled code. Numbers are addresses.

    def _launch_split(self, group: _Group, call: _Call, rows: int, squares: int, selected: int, deferred: int) -> None:
        tiles, sums, partial = group.tiles, group.sums, self._partial.data_ptr()
        pointers = (tiles.address, rows, partial, squares, selected, deferred)
        _split[tiles.grid](*pointers, *call, *group.shape, num_warps=group.tile.warps)
        if sums is not None:
            _sum_chunks[sums.grid](sums.address, partial, squares, call.present, SUM_CHANNELS, SUM_CHUNKS, num_warps=4)

    def _launch_count(
        self, group: _Group, present: int, steps: int, factors: int, skip: int, places: int, hyper: Hyper
    ) -> None:
        assert group.counts is not None
        pointers = (group.counts.address, steps, self._coefficients.data_ptr(), factors, skip)
        _count[group.counts.grid](*pointers, present, places, *_bits(hyper), COUNT_PLACES, num_warps=4)

    def _launch_adamw(
        self,
        group: _Group,
        call: _Call,
        channels: int,
        master: int,
        exp_avg: int,
        exp_avg_sq: int,
        grad: int,
        skip: int,
        places: int,
    ) -> None:
        assert group.states is not None
        pointers = (group.states.address, channels, self._coefficients.data_ptr(), master, exp_avg, exp_avg_sq, grad, skip)
        _adamw[group.states.grid](*pointers, places, *call, *group.state_shape, num_warps=group.state_tile.warps)

    def _launch_publish(self, group: _Group, call: _Call, rows: int, values: int) -> None:
        tiles = group.tiles
        _publish[tiles.grid](tiles.address, rows, values, *call, *group.shape, num_warps=group.tile.warps)
