"""Channels that change hands, between a selection and the next call, without letting the launching thread wait.

After the selection a block's device state and the new division go down; the host, once it has replayed the window, files
the rows of leaving channels with its own and puts those of arriving ones in their places (`kernels.queue`); it all goes up
again, and the device takes over the places that moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stallfree.engine.device import SelectedState
from stallfree.engine.slots import Slot, SlotPool
from stallfree.engine.streams import Point
from stallfree.engine.transfer import Arrival, Link
from stallfree.kernels.windows import HostExchange


class Exchange:
    """One block's way from half to half, through a slot of the pool. One hand-over at a time."""

    def __init__(self, half: SelectedState, link: Link, pool: SlotPool) -> None:
        self.half, self.link, self.pool = half, link, pool
        self.selected = torch.full((half.chosen.places,), -1, dtype=torch.int32, device="cpu")  # the host's knowledge
        self.arrival: Arrival | None = None  # the state, on its way up already
        self._slot: Slot | None = None

    @property
    def state(self) -> Tensor:
        """The state under way, in host memory."""
        assert self._slot is not None
        return self._slot.rows(torch.float32, self.half.memory.numel())

    def send(self) -> HostExchange:
        """After a selection, to the host, which is to merge this after the replay."""
        half, link = self.half, self.link
        assert half.handover is not None
        division, moved = half.handover.division, half.handover.moved
        torch.cat([division.targets.selected, division.targets.deferred, *(mask.int() for mask in moved)], out=half.numbers)
        self._slot = slot = self.pool.take_handover(half.block)
        numbers = slot.memory[half.memory.nbytes :][: half.numbers.nbytes].view(torch.int32)
        link.down(half.numbers, numbers, slot.after)  # the host writes the state after it has seen these
        if half.installed.divided:
            link.down(half.memory, self.state, slot.after)
        return HostExchange(*half.parts(self.state), numbers, self.selected)

    def receive(self, work: Point | None) -> None:
        """Let the device take over the state of arriving channels, once the host is done. Their weights are not shown yet."""
        arrival, self.arrival = self.arrival, None
        with self.link.up(self.state, work, arrival) as state:
            self._take_over(state)

    def receive_now(self) -> None:
        """The same, when the host is done already."""
        if self.arrival is not None:
            self.arrival.forget()
            self.arrival = None
        self._take_over(self.link.send(self.state))

    def _take_over(self, state: Tensor) -> None:
        half = self.half
        assert half.handover is not None
        assert self._slot is not None
        half.memory.copy_(state)  # whoever stays comes back as it went: no step came in between
        half.follow(half.handover.division)
        self.pool.give([self._slot], self.link.read_up())
        self._slot = None
