"""Staged gradients on their way down: a block's deferred rows, in the pieces that staging memory has room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stallfree.engine.transfer import Link
from stallfree.engine.uninterrupted import outside_inference
from stallfree.engine.window import BlockState


class LaterPiece(NamedTuple):
    """A piece of a large block's gradients that has not been sent; they live on until it is."""

    block: BlockState
    places: Sequence[int]
    grads: Sequence[Tensor | None]
    low: int
    target: Tensor


class Sending:
    """Takes gradients apart, and sends what the host gets of them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.later: deque[LaterPiece] = deque()  # oldest first

    def send(self, block: BlockState, places: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """A block's gradients: at once if staging memory holds the whole block, in two pieces where that memory begins anew.

        If not, the first piece has all that the device needs in this call. Computation does not wait for the others, and
        neither do the first pieces of blocks that come next: one of the others is sent now, and one after each of these. Only
        one block's gradients live on for it.
        """
        memory, layout = block.take_slot(), block.half.division.layout
        if self.link.stages_whole(memory.nbytes):
            cut = layout.row_before(min(memory.numel(), self.link.room_left() // memory.itemsize))
            now, later = [(0, memory[:cut]), (cut, memory[cut:])] if 0 < cut < memory.numel() else [(0, memory)], []
        else:
            first, *later = block.half.pieces(layout, memory)
            now = [first]
        if later or any(piece.block is block for piece in self.later):
            self.finish()
        for low, target in now:
            self._send(block, places, grads, low, target)
        self.later += [LaterPiece(block, places, grads, *piece) for piece in later]

    def go_on(self) -> None:
        """Send a piece that has been left for later."""
        if self.later:
            piece = self.later[0]
            with self.link.beside(piece.grads):
                self._send(*piece)
            self.later.popleft()

    def finish(self) -> None:
        """Send all of them: before anybody reads what is staged, or applies it."""
        if self.later:
            with outside_inference(), torch.no_grad():
                while self.later:
                    self.go_on()

    def forget(self) -> None:
        """Nobody will ever read them."""
        self.later.clear()

    def _send(self, block: BlockState, places: Sequence[int], grads: Sequence[Tensor | None], low: int, target: Tensor) -> None:
        link, layout = self.link, block.half.division.layout
        assert block.filling is not None
        after = block.filling.after
        with link.staging(target, after) as staged:
            block.half.split(grads, staged, low)
            if len(places) == len(layout.segments):
                link.down(staged, target, after)
            else:
                for place in places:
                    link.down(layout.deferred_rows(staged, place, low), layout.deferred_rows(target, place, low), after)
        block.sent = link.sent()
