"""Parameters in one flat buffer, so that one kernel launch updates a whole model.

Equal matrices of all layers lie at a fixed distance, so that a strided view holds them all. Every matrix starts at a
multiple of `tile` elements: a tile of the update kernel then lies in one matrix, and a small table tells it which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """A parameter `[rows, cols]`. A resident one (1-D) is `[1, n]` and has one channel, which is always selected."""

    name: str
    rows: int
    cols: int
    by_row: bool = False  # channels are rows (embedding tables), else input columns
    resident: bool = False

    @property
    def channels(self) -> int:
        return 1 if self.resident else self.rows if self.by_row else self.cols


@dataclass(frozen=True)
class Group:
    """`count` parameters of one shape, `stride` elements apart."""

    shape: Shape
    count: int
    offset: int
    stride: int
    channel_offset: int  # of its first member's channels; the members' channels follow each other
    blocks: tuple[int, ...]  # each member's block

    @property
    def channels(self) -> slice:
        return slice(self.channel_offset, self.channel_offset + self.count * self.shape.channels)


class Layout:
    """`layers` times the parameters `per_layer`, one block each, then the parameters `single`, one block each."""

    def __init__(
        self,
        layers: int,
        per_layer: Sequence[Shape],
        single: Sequence[Shape],
        *,
        tile: int = 1024,
        device: torch.device | str = "cpu",
    ) -> None:
        self.tile, self.device = tile, device
        padded = lambda shape: -(-shape.rows * shape.cols // tile) * tile  # noqa: E731
        layer_numel = sum(map(padded, per_layer))
        self.blocks = layers + sum(not shape.resident for shape in single)
        self.groups: list[Group] = []
        offset = channels = 0
        for shape in per_layer:
            blocks = (self.blocks,) * layers if shape.resident else tuple(range(layers))
            self.groups.append(Group(shape, layers, offset, layer_numel, channels, blocks))
            offset, channels = offset + padded(shape), channels + layers * shape.channels
        offset, block = layers * layer_numel, layers
        for shape in single:
            self.groups.append(Group(shape, 1, offset, padded(shape), channels, (self.blocks if shape.resident else block,)))
            offset, channels, block = offset + padded(shape), channels + shape.channels, block + (not shape.resident)
        self.numel, self.channels = offset, channels
        assert self.numel < 2**31, "offsets are 32-bit"

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.shape.name == name)

    def view(self, flat: Tensor, group: Group) -> Tensor:
        """`[runs, numel]` -> the group's `[runs, count, rows, cols]`, sharing memory."""
        rows, cols = group.shape.rows, group.shape.cols
        strides = (flat.stride(0), group.stride, cols, 1)
        return flat.as_strided((flat.shape[0], group.count, rows, cols), strides, flat.storage_offset() + group.offset)

    @cached_property
    def tiles(self) -> Tensor:
        """[tiles, 6] int32: where its matrix starts, rows, cols, by_row, its first channel, its block."""
        table = torch.zeros(self.numel // self.tile, 6, dtype=torch.int32)
        for group in self.groups:
            shape = group.shape
            for i, block in enumerate(group.blocks):
                start = group.offset + i * group.stride
                end = start + shape.rows * shape.cols
                channel = group.channel_offset + i * shape.channels
                row = [start, shape.rows, shape.cols, int(shape.by_row or shape.resident), channel, block]
                table[start // self.tile : -(-end // self.tile)] = torch.tensor(row, dtype=torch.int32)
        return table.to(self.device)

    @cached_property
    def elements(self) -> tuple[Tensor, Tensor]:
        """[numel] int64 each: the channel and the block of every element."""
        start, rows, cols, by_row, channel, block = self.tiles.long().repeat_interleave(self.tile, 0).unbind(1)
        local = torch.arange(self.numel, device=self.device) - start
        row = torch.minimum(local // cols, rows - 1)  # padding counts as the last row; its gradients and state stay 0
        return channel + torch.where(by_row.bool(), row, local % cols), block
