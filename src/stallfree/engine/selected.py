"""Memory for the selected rows of a call's gradients: of all blocks, from the first one's staging to the end of `step()`.

Outside of that nobody has it. When the device holds most, at the beginning of backward, it would lie idle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stallfree.engine.transfer import Link

ALIGNMENT = 256  # bytes


class SelectedGradients:
    """One piece of memory, of which every block has a part, in the same place in each call."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.nbytes = 0
        self._held: Tensor | None = None  # uint8

    @property
    def held(self) -> bool:
        return self._held is not None

    @property
    def memory(self) -> Tensor | None:
        """All of it; None if nobody has asked for a part in this call."""
        return None if self._held is None else self._whole()

    def add(self, nbytes: int) -> int:
        """One more part. Returns where it begins, in bytes."""
        place, self.nbytes = self.nbytes, self.nbytes + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def part(self, place: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A part's first elements, flat. Who asks first in a call lets the memory be taken."""
        if not numel:
            return torch.empty(0, dtype=dtype, device=self.link.device)
        return self._whole()[place : place + numel * dtype.itemsize].view(dtype)

    def _whole(self) -> Tensor:
        old = self._held
        if old is not None and old.numel() >= self.nbytes:
            return old
        memory = self.link.take(self.nbytes)
        if old is not None:  # parts have been added since
            memory[: old.numel()].copy_(old)
            self.let_go()
        self._held = memory
        return memory

    def let_go(self) -> None:
        """Nobody will ask any more for what is in it."""
        if self._held is not None:
            self.link.hold([self._held], shared=True)
            self._held = None

    def close(self) -> None:
        """The same, of a device that is idle."""
        self._held = None
