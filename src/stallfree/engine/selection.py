"""Scores -> selected channels, and who moves: pure functions on tensors of any device, without reading a value back.

Weights with as many channels are done together: the last dimension is the weight's, others are any number of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose(score: Tensor, count: int) -> Tensor:
    """Mask of the `count` highest scores; ties go to the lowest index (topk does not promise that)."""
    best = torch.argsort(score, dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros(score.shape, dtype=torch.bool, device=score.device).scatter_(-1, best, True)


def first_places(chosen: Tensor, count: int) -> Tensor:
    """Channel numbers of a mask with `count` members, ascending, at a size known without counting."""
    return torch.argsort(~chosen, dim=-1, stable=True)[..., :count]


def rearrange(selected: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Give arriving channels the places of leaving ones; staying ones keep theirs, so that only changes move.

    selected: `[..., count]` channel number of each place; chosen: `[..., channels]` mask with `count` members.
    Returns the new channel numbers and a mask of the places that changed hands.
    """
    moved = ~chosen.gather(-1, selected)
    held = torch.zeros_like(chosen).scatter_(-1, selected, True)
    arriving = first_places(chosen & ~held, selected.shape[-1])
    rank = (moved.cumsum(-1) - 1).clamp_(min=0)
    return torch.where(moved, arriving.gather(-1, rank), selected), moved
