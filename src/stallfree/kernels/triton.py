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
from stallfree.kernels.triton_functions import (
    INTERPRETED,
    adamw_kernel,
    count_kernel,
    publish_kernel,
    split_kernel,
    sum_chunks_kernel,
)


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
        split_kernel[tiles.grid](*pointers, *call, *group.shape, num_warps=group.tile.warps)
        if sums is not None:
            sum_chunks_kernel[sums.grid](sums.address, partial, squares, call.present, SUM_CHANNELS, SUM_CHUNKS, num_warps=4)

    def _launch_count(
        self, group: _Group, present: int, steps: int, factors: int, skip: int, places: int, hyper: Hyper
    ) -> None:
        assert group.counts is not None
        pointers = (group.counts.address, steps, self._coefficients.data_ptr(), factors, skip)
        count_kernel[group.counts.grid](*pointers, present, places, *_bits(hyper), COUNT_PLACES, num_warps=4)

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
        adamw_kernel[group.states.grid](*pointers, places, *call, *group.state_shape, num_warps=group.state_tile.warps)

    def _launch_publish(self, group: _Group, call: _Call, rows: int, values: int) -> None:
        tiles = group.tiles
        publish_kernel[tiles.grid](tiles.address, rows, values, *call, *group.shape, num_warps=group.tile.warps)
