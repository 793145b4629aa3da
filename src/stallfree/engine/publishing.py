"""Host -> publish -> weights: what comes up from the host, when, and when it is shown.

What is due in the next call is expected from the end of this one. Its copies begin as soon as the host is done, as far as there
is room on the device. It is shown during backward, block by block, once nothing reads a block's weights any more; the rest in
the call itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from stallfree.engine.transfer import Link
from stallfree.engine.window import BlockState, Window
from stallfree.kernels.block import BlockKernel


class Publishing:
    """Windows between the host and the weights."""

    def __init__(self, link: Link, kernel: BlockKernel) -> None:
        self.link, self.kernel = link, kernel
        self._coming: list[tuple[BlockState, Window]] = []  # due in the next call, in the order of their use

    def expect(self, blocks: Sequence[BlockState], call: int) -> None:
        """What is due in the next call. blocks: in the order in which backward will be done with them."""
        self._coming = [(block, window) for block in blocks for window in block.due(call) if not window.shown]
        self._begin_ups()

    def expects(self, block: BlockState) -> bool:
        """Whether anything of a block is due in the next call."""
        return any(other is block for other, _ in self._coming)

    def show_arrived(self, block: BlockState) -> None:
        """During backward, when nothing reads the block's weights any more: publish what is on its way up already."""
        shown = [window for other, window in self._coming if other is block and window.arrival is not None]
        for window in shown:
            self._show(block, window)
        if shown:
            self._coming = [pair for pair in self._coming if not pair[1].shown]
            self._begin_ups()

    def publish_due(self, blocks: Sequence[BlockState], call: int) -> None:
        """In the call: publish what has not been, and let channels arrive.

        First what has room on the device already, which keeps others from coming up.
        """
        for on_its_way in (True, False):
            for block, window in self._coming:
                if not window.shown and (window.arrival is not None) is on_its_way:
                    self._show(block, window)
        self._coming = []
        for block in sorted(blocks, key=lambda block: block.exchange is None or block.exchange.arrival is None):
            for window in block.due(call):
                block.queue.remove(window)
                if not window.shown:
                    self._show(block, window)
                if window.hands_over:
                    if block.half.handover is not None:
                        assert block.exchange is not None
                        block.exchange.receive(window.work)
                    block.half.show()

    def _begin_ups(self) -> None:
        """Bring up what is expected, as far as there is room: windows first."""
        for _, window in self._coming:
            if window.arrival is None:
                window.arrival = self.link.begin_up(window.published, window.work)
                if window.arrival is None:
                    return
        for block, window in self._coming:
            exchange = block.exchange
            if exchange is not None and exchange.arrival is None and window.hands_over and block.half.handover is not None:
                exchange.arrival = self.link.begin_up(exchange.state, window.work)
                if exchange.arrival is None:
                    return

    def _show(self, block: BlockState, window: Window) -> None:
        if len(window.dropped) == len(block.weights):
            block.forget(window)
            return
        division = window.division
        params = [None if place in window.dropped else shard for place, shard in enumerate(block.block.shards)]
        window.arrival = window.arrival or self.link.begin_up(window.published, window.work)
        with self.link.up(window.published, window.work, window.arrival) as values:
            self.kernel.publish(division.layout, division.targets, params, values)
        window.shown = True
        block.give_back(window.slots, window.arrival)
