"""Scores -> selected channels, and who moves: pure functions on tensors of any device, without reading a value back."""

from __future__ import annotations

import torch
from torch import Tensor


def update_score(score: Tensor, squares: Tensor, decay: float, skip: Tensor) -> None:
    """Exponential mean of squared channel norms, in place, unless the call is skipped."""
    torch.where(skip, score, score.lerp(squares, 1 - decay), out=score)


def choose(score: Tensor, count: int) -> Tensor:
    """Mask of the `count` highest scores; ties go to the lowest index (topk does not promise that)."""
    chosen = torch.zeros(score.shape, dtype=torch.bool, device=score.device)
    chosen[torch.argsort(score, descending=True, stable=True)[:count]] = True
    return chosen


def first_places(chosen: Tensor, count: int) -> Tensor:
    """Channel numbers of a mask with `count` members, ascending, at a size known without counting."""
    return torch.argsort(~chosen, stable=True)[:count]


def rearrange(selected: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Give arriving channels the places of leaving ones; staying ones keep theirs, so that only changes move.

    selected: `[count]` channel number of each place; chosen: `[channels]` mask with `count` members.
    Returns the new channel numbers and a mask of the places that changed hands.
    """
    moved = ~chosen[selected]
    held = torch.zeros_like(chosen).index_fill_(0, selected, True)
    arriving = torch.argsort(~(chosen & ~held), stable=True)[: selected.numel()]
    rank = (moved.cumsum(0) - 1).clamp_(min=0)
    return torch.where(moved, arriving[rank], selected), moved
