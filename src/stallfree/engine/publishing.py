"""Host -> publish -> weights: what comes up from the host, when, and when it is shown.

What is due in the next call is expected from the end of this one. Its copies begin as soon as the host is done, as far as there
is room on the device: piece by piece, where a block is large. They are shown during backward, once nothing reads a block's
weights any more, beside computation, which waits for the host when backward is over; the rest in the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from stallfree.engine.streams import Point
from stallfree.engine.transfer import Arrival, Link
from stallfree.engine.window import BlockState, Piece, Window
from stallfree.kernels.block import Publisher

Up = Callable[[Tensor, Point | None, Arrival | None], AbstractContextManager[Tensor]]


class Publishing:
    """Windows between the host and the weights."""

    def __init__(self, link: Link, kernel: Publisher) -> None:
        self.link, self.kernel = link, kernel
        self._coming: list[tuple[BlockState, Window]] = []  # due in the next call, in the order of their use
        self._passed: set[BlockState] = set()  # whose turn in backward has come

    def expect(self, blocks: Sequence[BlockState], call: int) -> None:
        """What is due in the next call. blocks: in the order in which backward will be done with them."""
        self._coming = [(block, window) for block in blocks for window in block.due(call) if not window.shown]
        self._passed.clear()
        self._begin_ups()

    def arrived(self, block: BlockState) -> list[BlockState]:
        """During backward, when nothing reads the block's weights any more: whose weights have something on its way up already.

        The block, and others whose turn has come before, but for whose pieces there was no room then.
        """
        self._passed.add(block)
        return list({other: None for other, window in self._coming if other in self._passed and window.arrives})

    def show_arrived(self, block: BlockState) -> None:
        """Publish what is on its way up already, and what has room behind it, beside computation."""
        for window in [window for other, window in self._coming if other is block]:
            while window.arrives or (window.pieces and self._begin_up(window, window.pieces[0])):
                self._show_next(block, window, self.link.up_showing)
            if not window.shown:  # a later one, whose pieces may be smaller, must not be shown before the rest of it
                break
        self._coming = [pair for pair in self._coming if not pair[1].shown]
        self._begin_ups()

    def publish_due(self, blocks: Sequence[BlockState], call: int) -> None:
        """In the call: publish what has not been, and let channels arrive.

        First what has room on the device already, which keeps others from coming up.
        """
        for block, window in self._coming:
            while window.arrives:
                self._show_next(block, window, self.link.up)
        for block, window in self._coming:
            self._show_rest(block, window)
        self._coming = []
        for block in blocks:
            for window in block.due(call):
                block.queue.remove(window)
                self._show_rest(block, window)
                if window.hands_over:
                    if block.half.handover is not None:
                        assert block.exchange is not None
                        block.exchange.receive(window.work)
                    block.half.show()

    def _begin_ups(self) -> None:
        """Bring up what is expected: windows as far as there is room, in order; then channels, which have theirs."""
        for _, window in self._coming:
            for piece in window.pieces:
                if piece.arrival is None and not self._begin_up(window, piece):
                    return
        for block, window in self._coming:
            if window.hands_over and block.exchange is not None:
                block.exchange.begin(window.work)

    def _begin_up(self, window: Window, piece: Piece) -> bool:
        """Bring up a piece, if there is room."""
        piece.arrival = self.link.begin_up(piece.values, window.replay_of(piece))
        if piece.arrival is not None:
            window.read = piece.arrival.point
        return piece.arrival is not None

    def _show_rest(self, block: BlockState, window: Window) -> None:
        while window.pieces:
            self._show_next(block, window, self.link.up)

    def _show_next(self, block: BlockState, window: Window, up: Up) -> None:
        if len(window.dropped) == len(block.weights):
            block.forget(window)
            return
        division, piece = window.division, window.pieces[0]
        params = [None if place in window.dropped else shard for place, shard in enumerate(block.block.shards)]
        if piece.arrival is None:
            self._begin_up(window, piece)
        with up(piece.values, window.replay_of(piece), piece.arrival) as values:
            self.kernel.publish(division.layout, division.targets, params, values, piece.low)
        del window.pieces[0]
        if window.shown:
            block.give_back(window.slots, window.read)
