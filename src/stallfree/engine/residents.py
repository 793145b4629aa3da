"""Parameters that the device updates whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stallfree.engine.blocks import STATE, Resident, kind_of
from stallfree.engine.ledger import adopt_weights
from stallfree.engine.sharding import Groups, gradients_of
from stallfree.kernels.block import BlockLayout, Part, Segment

GROUP_NUMEL = 1 << 20  # elements that share buffers; larger parameters stand alone


class ResidentState:
    """One parameter's AdamW: views of its group's buffers."""

    def __init__(self, resident: Resident, group: ResidentGroup, place: int) -> None:
        self.resident = resident
        self.shape = resident.shape
        self.master, self.exp_avg, self.exp_avg_sq = (group.part(getattr(group, name), place) for name in STATE)
        self.steps = group.layout.places_of(group.steps, place)  # the same number in each

    def reset(self) -> None:
        """As at construction, from the parameter as it is now."""
        self.master.copy_(self.resident.shard.detach())
        for tensor in (self.exp_avg, self.exp_avg_sq, self.steps):
            tensor.zero_()

    def show(self) -> None:
        """Write the master into the parameter."""
        self.resident.shard.detach().copy_(self.master)

    def read_weights(self) -> None:
        """Take the parameter, written from outside, as the new master."""
        adopt_weights(self.master, self.resident.shard.detach())


class ResidentGroup:
    """Residents of one dtype that are updated together."""

    def __init__(self, residents: Sequence[Resident]) -> None:
        self.residents = tuple(residents)
        self._params = [resident.param for resident in residents]
        self.ids = [id(param) for param in self._params]
        device, dtype = residents[0].shard.device, residents[0].dtype
        self.layout = BlockLayout([_segment(resident.numel) for resident in residents], device)
        self.master = torch.empty(self.layout.selected_numel, dtype=torch.float32, device=device)
        self.exp_avg, self.exp_avg_sq = torch.empty_like(self.master), torch.empty_like(self.master)
        self.steps = torch.zeros(self.layout.places, dtype=torch.int32, device=device)
        self.gradients = torch.zeros_like(self.master, dtype=dtype)  # zeros of those that have none
        self._parts = [self.part(self.gradients, place) for place in range(len(residents))]
        self.kinds = tuple(dict.fromkeys(kind_of(resident.name, resident.param) for resident in residents))
        self._shaped = [place for place, resident in enumerate(residents) if len(resident.shape) != 1]
        self._empty = [place for place, resident in enumerate(residents) if not resident.numel]  # never have a gradient
        self._everyone = [True] * len(residents)
        self._present = [False] * len(residents)  # whose gradients were gathered last
        # What kernels see of parameters with other strides, each of which stands alone.
        self._plain = None if residents[0].contiguous else residents[0].shard.detach().contiguous()
        self.states = [ResidentState(resident, self, place) for place, resident in enumerate(residents)]
        for state in self.states:
            state.reset()

    def part(self, flat: Tensor, place: int) -> Tensor:
        """One parameter's part of a flat buffer, in the parameter's shape."""
        resident = self.residents[place]
        return self.layout.selected_rows(flat, place).view(-1)[: resident.numel].view(resident.shape)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in (self.master, self.exp_avg, self.exp_avg_sq, self.steps, self.gradients))

    @property
    def planned(self) -> Part:
        """As AdamW steps it: to the kernel, a block whose channels are all selected."""
        every = [
            torch.arange(segment.channels, dtype=torch.int32, device=self.layout.device) for segment in self.layout.segments
        ]
        weights = [resident.shard.detach() for resident in self.residents] if self._plain is None else [self._plain]
        for place in self._empty:
            weights[place] = weights[place].new_zeros(1)  # which nobody writes, but the layout has
        return Part(
            self.layout, torch.cat(every), weights, self.master, self.exp_avg, self.exp_avg_sq, self.steps, self.gradients
        )

    def gather(self) -> list[bool]:
        """Before AdamW: bring the gradients there are to where it expects them. Returns which there are."""
        grads = gradients_of(self._params)
        for place in self._empty:
            grads[place] = None
        there = [grad for grad in grads if grad is not None]
        if len(there) == len(grads):
            for place in self._shaped:
                there[place] = there[place].reshape(-1)
            torch.cat(there, out=self.gradients)
            present = self._everyone
        else:
            present = [grad is not None for grad in grads]
            gone = [self._parts[place] for place, was in enumerate(self._present) if was and not present[place]]
            if gone:
                torch._foreach_zero_(gone)
            if there:
                torch._foreach_copy_([part for part, is_there in zip(self._parts, present, strict=True) if is_there], there)
        self._present = present
        if there and self._plain is not None:
            self._plain.copy_(self.residents[0].shard.detach())
        return present

    def scatter(self) -> None:
        """After AdamW."""
        if self._plain is not None:
            self.residents[0].shard.detach().copy_(self._plain)


def resident_groups(residents: Sequence[Resident]) -> list[list[Resident]]:
    """Small parameters of a dtype, spread alike, together, large and strided ones alone."""
    groups: list[list[Resident]] = []
    open_groups: dict[tuple[torch.dtype, Groups], list[Resident]] = {}
    for resident in residents:
        alike = (resident.dtype, resident.spread)
        if resident.whole_numel >= GROUP_NUMEL or not resident.contiguous:
            groups.append([resident])
        else:
            held = open_groups.get(alike)
            if held is None or sum(member.whole_numel for member in held) + resident.whole_numel > GROUP_NUMEL:
                held = open_groups[alike] = []
                groups.append(held)
            held.append(resident)
    return groups


def _segment(numel: int) -> Segment:
    """One channel, or a few long ones, which keep a kernel's tiles full; all take every step together."""
    numel = max(numel, 1)  # a parameter without elements is never present
    channels = 8 if numel % 8 == 0 and numel >= 1 << 14 else 1
    return Segment(channels, numel // channels, 0, channels)
