"""Channels that change hands, between a selection and the next call, without letting the launching thread wait.

After the selection a block's device state and the new division go down; the host, once it has replayed the window, files
the rows of leaving channels with its own and puts those of arriving ones in their places (`kernels/windows.py`); it all goes up
again, to where it came from, and the device takes over the places that moved. Nobody steps the state while it is away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stallfree.engine.device import SelectedState
from stallfree.engine.slots import Slot, SlotPool
from stallfree.engine.streams import Point
from stallfree.engine.transfer import Link
from stallfree.kernels.windows import HostExchange


class Exchange:
    """One block's way from half to half, through a slot of the pool. One hand-over at a time."""

    def __init__(self, half: SelectedState, link: Link, pool: SlotPool) -> None:
        self.half, self.link, self.pool = half, link, pool
        self.selected = torch.full((half.chosen.places,), -1, dtype=torch.int32, device="cpu")  # the host's knowledge
        self._returning: Point | None = None  # when the state is back; None: it has not set out
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
        half.handover.write_numbers(half.numbers)
        self._slot = slot = self.pool.take_handover(half.block)
        numbers = slot.memory[half.memory.nbytes :][: half.numbers.nbytes].view(torch.int32)
        link.down(half.numbers, numbers, slot.after)  # the host writes the state after it has seen these
        if half.installed.divided:
            link.down(half.memory, self.state, slot.after)
        return HostExchange(*half.parts(self.state), numbers, self.selected)

    def begin(self, work: Point | None) -> None:
        """Let the state come up as soon as the host is done, if somebody is on the move."""
        if self._returning is None and self.half.handover is not None:
            self._returning = self.link.begin_return(self.half.memory, self.state, work)

    def receive(self, work: Point | None) -> None:
        """Let the device take over the state of arriving channels, once the host is done. Their weights are not shown yet."""
        half = self.half
        assert half.handover is not None
        assert self._slot is not None
        returned = self._returning or self.link.begin_return(half.memory, self.state, work)
        self._returning = None
        self.link.take_back(half.memory, self.state, work, returned)  # whoever stays comes back as it went
        half.follow(half.handover.division)
        self.pool.give([self._slot], returned)
        self._slot = None
