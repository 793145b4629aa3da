"""Numbers of every channel of every weight in one place, so that a call judges all gradients in a few operations.

Flat over the weights in the order of their keys: a block's part is contiguous, and is what the kernel's `split` fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from stallfree.engine.blocks import Weight
from stallfree.kernels.judging import add_segments


class Channels:
    """Squared norms and scores of all channels, and norms of weights, for handles: `step()` adds up by itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights: list[Weight] = []
        self.starts = [0]
        self.score = torch.zeros(0, dtype=torch.float32, device=device)
        self.squares = torch.zeros_like(self.score)  # of the gradient staged last, before the user's factors
        self.deferred = torch.ones(0, dtype=torch.bool, device=device)  # where the gradient staged next goes to the host
        self._norms: tuple[Tensor, ...] | None = None

    def extend(self, weights: Sequence[Weight]) -> None:
        """Make room for more weights. Views taken before are void."""
        self.weights = [*self.weights, *weights]
        self.starts = [0, *accumulate(weight.channels for weight in self.weights)]
        more, device = self.starts[-1] - len(self.score), self.device
        self.squares = torch.cat([self.squares, torch.zeros(more, dtype=torch.float32, device=device)])
        self.score = torch.cat([self.score, torch.zeros(more, dtype=torch.float32, device=device)])
        self.deferred = torch.cat([self.deferred, torch.ones(more, dtype=torch.bool, device=device)])
        self._offsets = torch.tensor(self.starts, dtype=torch.int64, device=device)
        self.changed()

    def of(self, flat: Tensor, first: Weight, last: Weight) -> Tensor:
        """The part of some neighbouring weights."""
        return flat[self.starts[first.key] : self.starts[last.key + 1]]

    def changed(self) -> None:
        """New squares are there, or on their way."""
        self._norms = None

    def norm(self, weight: Weight) -> Tensor:
        """L2 norm of a weight's staged gradient, before the user's factors. All are worked out at the first question."""
        if self._norms is None:
            self._norms = add_segments(self.squares, self._offsets).sqrt().float().unbind()
        return self._norms[weight.key]
