"""Scores -> selected channels, and who moves: pure functions on tensors of any device, without reading a value back.

All weights of a block are done together. Channels are numbered through the block, weight by weight, and so are the places of
selected ones and the rows of the others; where what lies is known beforehand (`Geometry`), because every weight selects a
number of channels that never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Geometry:
    """How many channels each weight has, and how many of them are selected; on the device of the scores."""

    twice_owner: Tensor  # [channels] int32: twice the number of its weight
    places: Tensor  # [places] int64: of each place, where it is if every weight's places lie where its channels begin
    rows: Tensor  # [rows] int64: of each row, where it is if they lie behind those
    first_channels: Tensor  # [places] int64: of each place, the first channel of its weight
    first_places: Tensor  # [places] int64: and its first place
    owners: Tensor  # [places] int64: and its number
    counts: Tensor  # [weights] fp32: places of each weight, at least 1

    @classmethod
    def of(cls, channels: Sequence[int], selected: Sequence[int], device: torch.device) -> Geometry:
        def repeated(values: Tensor, times: Sequence[int]) -> Tensor:
            return torch.repeat_interleave(values, torch.tensor(times, dtype=torch.int64, device="cpu"))

        def starts(sizes: Sequence[int]) -> Tensor:
            return torch.tensor([0, *sizes], dtype=torch.int64, device="cpu").cumsum(0)[:-1]

        numbers = torch.arange(len(channels), dtype=torch.int64, device="cpu")
        owner, first = repeated(numbers, channels), repeated(starts(channels), channels)
        within = torch.arange(len(owner), dtype=torch.int64, device="cpu") - first
        is_place = within < torch.tensor(selected, dtype=torch.int64, device="cpu")[owner]
        counts = torch.tensor(selected, dtype=torch.float32, device="cpu").clamp(min=1)
        parts = (
            2 * owner.int(),
            is_place.nonzero().flatten(),
            (~is_place).nonzero().flatten(),
            repeated(starts(channels), selected),
            repeated(starts(selected), selected),
            repeated(numbers, selected),
            counts,
        )
        return cls(*(part.to(device) for part in parts))


class Selection(NamedTuple):
    """Channels by number in the block."""

    places: Tensor  # [places] int64: the channel of each place
    rows: Tensor  # [rows] int64: the others, ascending
    moved: Tensor  # [places] bool: whose channel is another one than before
    kept: Tensor | None  # [weights] fp32: the share of what was selected before that still is; None: nothing was


def select(score: Tensor, geometry: Geometry, held: Tensor | None) -> Selection:
    """The best channels of each weight. held: `[places]` int64, the channel of each place until now; None: none.

    Arriving channels get the places of leaving ones; staying ones keep theirs, so that only changes move.
    """
    chosen = choose(score, geometry)
    parted = part(chosen, geometry)
    rows = parted[geometry.rows]
    if held is None:
        places = parted[geometry.places]
        return Selection(places, rows, torch.ones_like(places, dtype=torch.bool), None)
    moved = ~chosen[held]
    stays = torch.zeros_like(chosen).scatter_(0, held, True)
    arriving = part(chosen & ~stays, geometry)
    count = moved.cumsum(0)
    before = (count - moved.long())[geometry.first_places]
    place = geometry.first_channels + (count - before - 1).clamp_(min=0)
    left = torch.zeros_like(geometry.counts).index_add_(0, geometry.owners, moved.float())
    return Selection(torch.where(moved, arriving[place], held), rows, moved, 1 - left / geometry.counts)


def choose(score: Tensor, geometry: Geometry) -> Tensor:
    """Mask of each weight's highest scores; ties go to the lowest number (topk does not promise that)."""
    order = torch.argsort(score, descending=True, stable=True)
    order = order[torch.argsort(geometry.twice_owner[order], stable=True)]
    return torch.zeros(score.shape, dtype=torch.bool, device=score.device).scatter_(0, order[geometry.places], True)


def part(mask: Tensor, geometry: Geometry) -> Tensor:
    """All channels, weight by weight: first those in the mask, then the others; ascending."""
    return torch.argsort(geometry.twice_owner + ~mask, stable=True)
