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

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from stallfree.kernels import driver
from stallfree.kernels.block import BlockLayout, Part, Targets
from stallfree.kernels.checks import check_publish, check_split
from stallfree.kernels.judging import Evidence, Policy
from stallfree.kernels.triton_functions import INTERPRETED, publish_kernel, split_kernel, sum_chunks_kernel
from stallfree.kernels.triton_judging import TritonJudging
from stallfree.kernels.triton_launch import Launch, launch_all
from stallfree.kernels.triton_tables import LANGUAGE_DTYPES, Shares, Tile, Tiling, programs, table
from stallfree.kernels.triton_update import TritonUpdate

__all__ = ["Shares", "Tile", "Tiling", "TritonBlock"]


MAX_WEIGHTS = 32  # in one launch; bounds the argument list and the time to choose from it
SUM_CHANNELS, SUM_CHUNKS = 64, 32


class _Call(NamedTuple):
    """What changes from call to call, and the launches that fit its dtype and alignment."""

    present: int  # bit mask
    addresses: tuple[int, ...]
    split: Launch
    publish: Launch


class _Group:
    """Some weights of a layout whose channels lie along the same axis: what one launch of each kernel goes through."""

    def __init__(self, layout: BlockLayout, members: Sequence[int], tiling: Tiling) -> None:
        self.members = tuple(members)
        segments = [layout.segments[index] for index in members]
        self._columns = columns = segments[0].channel_dim == 1
        self._tile = tile = tiling.columns if columns else tiling.rows
        even = [segment.length for segment in segments] + [segment.channels for segment in segments if columns]
        even += [start[index] for index in members for start in (layout.selected_starts, layout.deferred_starts)]
        self._unit = unit = 8 if all(number % 8 == 0 for number in even) else 1
        self.chunks = 0  # all channels' sums of chunks, where there are several
        tiles, sums = [], []
        for place, (index, segment) in enumerate(zip(members, segments, strict=True)):
            channels, length, channel_start = segment.channels, segment.length, layout.channel_starts[index]
            selected_start, deferred_start = layout.selected_starts[index] // unit, layout.deferred_starts[index] // unit
            counted = channels // unit if columns else channels
            chunks = triton.cdiv(length, tile.chunk)
            first_chunk = -1 if chunks == 1 else self.chunks
            grid = (triton.cdiv(channels, tile.channels), chunks)
            starts = (channel_start, selected_start, deferred_start, first_chunk)
            tiles.append(programs(place, *grid, counted, length // unit, *starts))
            if chunks > 1:
                grid = (triton.cdiv(channels, SUM_CHANNELS), 1)
                sums.append(programs(place, *grid, channels, chunks, channel_start, first_chunk))
                self.chunks += chunks * channels
        self.tiles = table(tiles, layout.device)
        self.sums = table(sums, layout.device) if sums else None
        self.sum = Launch(sum_chunks_kernel, self.sums.programs, (SUM_CHANNELS, SUM_CHUNKS), 4) if self.sums else None
        width = triton.next_power_of_2(len(members))  # few lengths of argument lists, few compilations
        self._absent = [self.tiles.address] * width  # any address that is there
        self._launches: dict[tuple[torch.dtype, bool], tuple[Launch, Launch]] = {}

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
        return _Call(present, tuple(addresses), *self._fitting(dtype, self._unit > 1 and every % 16 == 0))

    def empty_calls(self, dtype: torch.dtype) -> list[_Call]:
        """Calls without weights, of every kind that compiles to different code."""
        aligned = (False, True) if self._unit > 1 else (False,)
        return [_Call(0, tuple(self._absent), *self._fitting(dtype, flag)) for flag in aligned]

    def _fitting(self, dtype: torch.dtype, aligned: bool) -> tuple[Launch, Launch]:
        """Of split and publish."""
        launches = self._launches.get((dtype, aligned))
        if launches is None:
            tile, programs = self._tile, self.tiles.programs
            constants = (LANGUAGE_DTYPES[dtype], aligned, self._columns, self._unit, *tile[:3])
            split, publish = (Launch(kernel, programs, constants, tile.warps) for kernel in (split_kernel, publish_kernel))
            launches = self._launches[dtype, aligned] = split, publish
        return launches


def _groups(layout: BlockLayout, tiling: Tiling) -> list[_Group]:
    groups = []
    for channel_dim in (0, 1):
        members = [index for index, segment in enumerate(layout.segments) if segment.channel_dim == channel_dim]
        groups += [_Group(layout, members[i : i + MAX_WEIGHTS], tiling) for i in range(0, len(members), MAX_WEIGHTS)]
    return groups


class TritonBlock:
    """A `BlockKernel` in Triton, for one device.

    First pieces are to be split on one stream, or on streams that wait for each other: sums of chunks pass through scratch
    memory that all layouts share. Other pieces have no sums, and `publish` has none. Without `warm_up` a layout's first call
    builds its tables, and the first call with a dtype compiles; later calls allocate nothing. Buffers and weights that begin at
    multiples of 16 bytes, with channels and lengths that are multiples of 8, are the fast case; all others work.

    Raises:
        ValueError: neither a CUDA device, nor the CPU under TRITON_INTERPRET=1.
    """

    def __init__(self, device: torch.device | str, tiling: Tiling | None = None, checks: bool = True) -> None:
        """checks: look at the arguments of `split`, `publish` and judgements, unless whoever calls has done that."""
        self.device = torch.empty(0, device=device).device
        if self.device.type != ("cpu" if INTERPRETED else "cuda"):
            raise ValueError(f"Triton kernels run on CUDA or, with TRITON_INTERPRET=1, on the CPU; not here on {self.device}")
        self.tiling, self._checks = tiling or Tiling(), checks
        self._plans: WeakKeyDictionary[BlockLayout, list[_Group]] = WeakKeyDictionary()
        self._partial = torch.empty(1, dtype=torch.float32, device=self.device)

    def warm_up(self, layout: BlockLayout, dtype: torch.dtype) -> None:
        """Compile and load, by launches in which no weight is present."""
        with driver.current_device(self.device):
            for group in self._plan(layout):
                for call in group.empty_calls(dtype):
                    self._split(group, call, 0, 0, 0, 0, 0, 0)
                    self._publish(group, call, 0, 0, 0, 0)

    def split(
        self,
        layout: BlockLayout,
        targets: Targets,
        grads: Sequence[Tensor | None],
        squares: Tensor,
        selected: Tensor,
        deferred: Tensor,
        low: int = 0,
    ) -> None:
        dtype = check_split(layout, grads, squares, selected, deferred, low) if self._checks else deferred.dtype
        if dtype is None:
            return
        rows, sums, flats = targets.rows.data_ptr(), squares.data_ptr(), (selected.data_ptr(), _first(deferred, low))
        high = low + deferred.numel()
        with driver.current_device(self.device):
            for group in self._plan(layout):
                call = group.call(dtype, grads, *flats)
                if call.present:
                    self._split(group, call, rows, sums, *flats, low, high)

    def judging(self, evidence: Evidence, policy: Policy) -> TritonJudging:
        return TritonJudging(evidence, policy, self.device, self.tiling.judging, self._checks)

    def plan(self, parts: Sequence[Part]) -> TritonUpdate:
        return TritonUpdate(parts, self.device, self.tiling)

    def publish(
        self, layout: BlockLayout, targets: Targets, weights: Sequence[Tensor | None], values: Tensor, low: int = 0
    ) -> None:
        dtype = check_publish(layout, weights, values, low) if self._checks else values.dtype
        if dtype is None:
            return
        rows, source, high = targets.rows.data_ptr(), _first(values, low), low + values.numel()
        with driver.current_device(self.device):
            for group in self._plan(layout):
                call = group.call(dtype, weights, source)
                if call.present:
                    self._publish(group, call, rows, source, low, high)

    def _plan(self, layout: BlockLayout) -> list[_Group]:
        plan = self._plans.get(layout)
        if plan is None:
            if layout.device != self.device:
                raise ValueError(f"the layout is on {layout.device}, the kernel on {self.device}")
            plan = self._plans[layout] = _groups(layout, self.tiling)
            chunks = max((group.chunks for group in plan), default=0)
            if chunks > self._partial.numel():
                self._partial = torch.empty(chunks, dtype=torch.float32, device=self.device)
        return plan

    # Launches, shared by calls and warm-up so that both use the same compiled code. Numbers are addresses.

    def _split(
        self, group: _Group, call: _Call, rows: int, squares: int, selected: int, deferred: int, low: int, high: int
    ) -> None:
        partial = self._partial.data_ptr()
        split = (group.tiles.address, rows, partial, squares, selected, deferred, low, high, call.present, call.addresses)
        if group.sum is None or group.sums is None or low:
            launch_all((call.split, split))
        else:
            launch_all((call.split, split), (group.sum, (group.sums.address, partial, squares, call.present)))

    def _publish(self, group: _Group, call: _Call, rows: int, values: int, low: int, high: int) -> None:
        launch_all((call.publish, (group.tiles.address, rows, values, low, high, call.present, call.addresses)))


def _first(piece: Tensor, low: int) -> int:
    """Where the first of all deferred rows would be, if they lay before and behind a piece that begins at `low`."""
    return piece.data_ptr() - low * piece.itemsize
