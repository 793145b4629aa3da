"""Tables of tiles: a program of a Triton kernel finds its work in a row of one, in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from stallfree.kernels.block import DTYPES


class Tile(NamedTuple):
    """The share of one program; powers of two."""

    channels: int
    length: int  # elements of each channel that are held at a time
    chunk: int  # elements of each channel that a program goes through; a multiple of length
    warps: int


class Shares(NamedTuple):
    """What one program goes through when a call is judged; powers of two."""

    size: int  # channels, or elements of a group of residents
    parts: int  # sums of these, at a time
    entries: int  # norms, and numbers of a record, at a time


class Tiling(NamedTuple):
    """Shares for weights whose channels are columns, and rows; for the state of selected channels of either; for judging."""

    columns: Tile = Tile(64, 64, 256, 4)
    rows: Tile = Tile(16, 256, 2048, 4)
    column_state: Tile = Tile(32, 64, 64, 4)
    row_state: Tile = Tile(8, 256, 256, 4)
    judging: Shares = Shares(2048, 128, 512)


LANGUAGE_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
assert set(LANGUAGE_DTYPES) == set(DTYPES)


class Table(NamedTuple):
    rows: Tensor  # [programs, columns] int64, on the device
    programs: int
    address: int


def table(rows: Sequence[Tensor], device: torch.device) -> Table:
    """These rows, one program each, on the device."""
    joined = torch.cat(list(rows)).to(device)
    return Table(joined, len(joined), joined.data_ptr())


def programs(place: int, inner: int, outer: int, *constants: int) -> Tensor:
    """One weight's rows of a table, `[inner * outer, 3 + constants]`: its place, both tile numbers, the constants."""
    rows = torch.empty(outer, inner, 3 + len(constants), dtype=torch.int64, device="cpu")
    rows[:] = torch.tensor([place, 0, 0, *constants], dtype=torch.int64, device="cpu")
    rows[:, :, 1] = torch.arange(inner, device="cpu")
    rows[:, :, 2] = torch.arange(outer, device="cpu").unsqueeze(1)
    return rows.flatten(0, 1)
