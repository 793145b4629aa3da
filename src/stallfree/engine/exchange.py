"""Channels that change hands, between a selection and the next call, without letting the launching thread wait.

After the selection a block's device state and the new division go down; the worker, once it has replayed the window, files
the rows of leaving channels with the host's and puts those of arriving ones in their places; it all goes up again, and the
device takes over the places that moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stallfree.engine.device import SelectedState
from stallfree.engine.host import HostState
from stallfree.engine.streams import Event
from stallfree.engine.transfer import HostWork, Link, Ready


class Exchange:
    """One block's way from half to half. One hand-over at a time."""

    def __init__(self, half: SelectedState, hosts: Sequence[HostState], link: Link) -> None:
        self.half, self.hosts, self.link = half, hosts, link
        layout = half.chosen
        self._state = link.host_empty((half.memory.numel(),), torch.float32)
        self._numbers = link.host_empty((2 * layout.places + layout.deferred_channels,), torch.int32)
        self._free: Event | None = None  # when the device has read what arrived
        self.selected: list[Tensor] = []  # the worker's knowledge: by weight, the channel of each place; empty: nobody

    def send(self) -> Callable[[], None]:
        """After a selection. Returns what the worker has to do after the replay."""
        half = self.half
        assert half.handover is not None
        division, moved = half.handover.division, half.handover.moved
        # Kept by the allocator until the computing stream has waited for what the worker makes of it.
        numbers = torch.cat([division.targets.selected, division.targets.deferred, *(mask.int() for mask in moved)])
        ready = self.link.down(numbers, self._numbers, self._free)
        if half.installed.layout.places:
            ready = self.link.down(half.memory, self._state, self._free)  # later than the other
        half.handover.numbers = numbers
        return lambda: self._merge(ready)

    def _merge(self, ready: Ready) -> None:
        ready()
        layout, half = self.half.chosen, self.half
        places, rows = layout.places, layout.deferred_channels
        selected, deferred, moved = (part.long() for part in self._numbers.split([places, rows, places]))
        *flats, steps = half.parts(self._state)
        now = [layout.places_of(selected, place) for place in range(len(self.hosts))]
        for place, host in enumerate(self.hosts):
            moving = layout.places_of(moved, place).nonzero().flatten()
            pairs = [
                *((layout.selected_rows(flat, place), theirs) for flat, theirs in zip(flats, host.flats, strict=True)),
                (layout.places_of(steps, place), host.steps),
            ]
            if self.selected:
                leaving = self.selected[place][moving]
                for ours, theirs in pairs:
                    theirs[leaving] = ours[moving].to(theirs.dtype)
            arriving = now[place][moving]
            for ours, theirs in pairs:
                ours[moving] = theirs[arriving].to(ours.dtype)
            start = layout.row_starts[place]
            host.deferred = deferred[start : start + layout.segments[place].deferred]
        self.selected = now

    def receive(self, work: HostWork) -> None:
        """Let the device take over the state of arriving channels, once the worker is done. Their weights are not shown yet."""
        half, layout = self.half, self.half.chosen
        assert half.handover is not None
        with self.link.up(self._state, work) as (state, arrived):
            *flats, steps = half.parts(state)
            *mine, my_steps = half.parts(half.memory)
            for place, moved in enumerate(half.handover.moved):
                for new, old in zip(flats, mine, strict=True):
                    rows = layout.selected_rows(old, place)
                    torch.where(moved.unsqueeze(1), layout.selected_rows(new, place), rows, out=rows)
                counts = layout.places_of(my_steps, place)
                torch.where(moved, layout.places_of(steps, place), counts, out=counts)
        self._free = arrived
        half.follow(half.handover.division)

    @property
    def nbytes(self) -> int:
        return self._state.nbytes + self._numbers.nbytes
