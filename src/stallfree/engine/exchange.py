"""Channels that change hands, between a selection and the next call, without letting the launching thread wait.

After the selection a block's device state and the new division go down; the host, once it has replayed the window, files
the rows of leaving channels with its own and puts those of arriving ones in their places (`kernels.queue`); it all goes up
again, and the device takes over the places that moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stallfree.engine.device import SelectedState
from stallfree.engine.streams import Point
from stallfree.engine.transfer import Arrival, Link
from stallfree.kernels.windows import HostExchange


class Exchange:
    """One block's way from half to half. One hand-over at a time."""

    def __init__(self, half: SelectedState, link: Link) -> None:
        self.half, self.link = half, link
        layout = half.chosen
        self.state = link.host_empty((half.memory.numel(),), torch.float32)
        numbers = link.host_empty((2 * layout.places + layout.deferred_channels,), torch.int32)
        selected = torch.full((layout.places,), -1, dtype=torch.int32, device="cpu")
        self.host = HostExchange(*half.parts(self.state), numbers, selected)
        self.arrival: Arrival | None = None  # the state, on its way up already
        self._free: Point | None = None  # when the device has read what arrived

    def send(self) -> None:
        """After a selection, to the host, which merges after the replay."""
        half = self.half
        assert half.handover is not None
        division, moved = half.handover.division, half.handover.moved
        torch.cat([division.targets.selected, division.targets.deferred, *(mask.int() for mask in moved)], out=half.numbers)
        self.link.down(half.numbers, self.host.numbers, self._free)
        if half.installed.layout.places:
            self.link.down(half.memory, self.state, self._free)

    def receive(self, work: Point | None) -> None:
        """Let the device take over the state of arriving channels, once the host is done. Their weights are not shown yet."""
        arrival, self.arrival = self.arrival, None
        with self.link.up(self.state, work, arrival) as state:
            self._take_over(state)
        self._free = self.link.read_up()

    def receive_now(self) -> None:
        """The same, when the host is done already."""
        if self.arrival is not None:
            self.arrival.forget()
            self.arrival = None
        self._take_over(self.link.send(self.state))

    def _take_over(self, state: Tensor) -> None:
        half = self.half
        assert half.handover is not None
        half.memory.copy_(state)  # whoever stays comes back as it went: no step came in between
        half.follow(half.handover.division)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.host.numbers.nbytes
