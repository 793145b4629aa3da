"""Numbers of every channel of every weight in one place, so that a call judges all gradients in a few operations.

Flat over the weights in the order of their keys: a block's part is contiguous, and is what the kernel's `split` fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from stallfree.engine import selection
from stallfree.engine.blocks import Weight
from stallfree.engine.sharding import RankSums


class Summed(NamedTuple):
    """What a call's gradients add up to, over all ranks that hold parts of them; before the user's factors."""

    squares: Tensor  # [channels] fp32
    totals: Tensor  # [weights]
    deferred_totals: Tensor  # [weights], the part of it in deferred channels
    residents: list[Tensor]  # norms

    def norms(self) -> Tensor:
        """L2 norm of each weight's gradient: `[weights]` fp32."""
        return self.totals.sqrt().float()


class Channels:
    """Squared norms and scores of all channels, and what follows from them for each weight."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights: list[Weight] = []
        self.starts = [0]
        self.score = torch.zeros(0, dtype=torch.float32, device=device)
        self.squares = torch.zeros_like(self.score)  # of the gradient staged last, before the user's factors
        self.deferred = torch.ones(0, dtype=torch.bool, device=device)  # where the gradient staged next goes to the host
        self.summed = Summed(self.squares, self.squares, self.squares, [])  # of the last call
        self._totals: Tensor | None = None  # sums of squares by weight, fp64
        self._norms: tuple[Tensor, ...] | None = None
        self._masks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # by who has a gradient: weights, channels

    def extend(self, weights: Sequence[Weight]) -> None:
        """Make room for more weights. Views taken before are void."""
        self.weights = [*self.weights, *weights]
        self.starts = [0, *accumulate(weight.channels for weight in self.weights)]
        more, old = self.starts[-1] - len(self.score), self.device
        self.squares = torch.cat([self.squares, torch.zeros(more, dtype=torch.float32, device=old)])
        self.score = torch.cat([self.score, torch.zeros(more, dtype=torch.float32, device=old)])
        self.deferred = torch.cat([self.deferred, torch.ones(more, dtype=torch.bool, device=old)])
        self._offsets = torch.tensor(self.starts, dtype=torch.int64, device=old)
        counts = torch.tensor([weight.channels for weight in self.weights], dtype=torch.int64, device=old)
        keys = torch.arange(len(counts), dtype=torch.int64, device=old)
        self._owner = torch.repeat_interleave(keys, counts)  # [channels] key of the weight
        self._masks.clear()
        self.changed()

    def of(self, flat: Tensor, first: Weight, last: Weight) -> Tensor:
        """The part of some neighbouring weights."""
        return flat[self.starts[first.key] : self.starts[last.key + 1]]

    def changed(self) -> None:
        """New squares are there, or on their way."""
        self._totals = self._norms = None

    def norm(self, weight: Weight) -> Tensor:
        """L2 norm of a weight's staged gradient, before the user's factors. All are worked out at the first question."""
        if self._norms is None:
            self._norms = self.totals().sqrt().float().unbind()
        return self._norms[weight.key]

    def totals(self) -> Tensor:
        """Squared norm of each weight's staged gradient, before the user's factors: `[weights]` fp64."""
        if self._totals is None:
            self._totals = self._sums(self.squares)
        return self._totals

    def deferred_totals(self) -> Tensor:
        """The part of it in deferred channels: `[weights]` fp64."""
        return self._sums(torch.where(self.deferred, self.squares, 0.0))

    def add_up(self, ranks: RankSums, residents: list[Tensor]) -> Summed:
        """In `step()`: sum over ranks. residents: the norm of each group."""
        if not ranks.needed:
            self.summed = Summed(self.squares, self.totals(), self.deferred_totals(), residents)
            return self.summed
        groups = [norm.square().view(1) for norm in residents]
        parts = [self.squares, self.totals().float(), self.deferred_totals().float(), *groups]
        sizes = [len(self.squares), len(self.weights), len(self.weights), len(residents)]
        squares, totals, deferred, norms = ranks(torch.cat(parts)).split(sizes)
        self.summed = Summed(squares, totals, deferred, list(norms.sqrt()))
        return self.summed

    def update_scores(self, factors: Tensor | None, present: tuple[int, ...], decay: float, skip: Tensor) -> None:
        """Take up the gradients of this call, as they stand in `.grad` now.

        factors: scalar or `[weights]`, what the user multiplied them by; present: keys of the weights that have one.
        """
        squares = self.summed.squares
        if factors is not None:
            factor = factors.square()
            squares = squares * (factor if factor.dim() == 0 else factor[self._owner])
        if len(present) < len(self.weights):
            skip = skip | ~self.masks(present)[1]
        selection.update_score(self.score, squares, decay, skip)

    def masks(self, present: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Weights and channels that have a gradient, when these keys do: bool `[weights]` and `[channels]`."""
        if present not in self._masks:
            if len(self._masks) > 64:
                self._masks.clear()
            chosen = torch.zeros(len(self.weights), dtype=torch.bool, device="cpu")
            chosen[list(present)] = True
            of_weights = chosen.to(self.device)
            self._masks[present] = (of_weights, of_weights[self._owner])
        return self._masks[present]

    def _sums(self, values: Tensor) -> Tensor:
        if not self.weights:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.segment_reduce(values.double(), "sum", offsets=self._offsets, unsafe=True)
