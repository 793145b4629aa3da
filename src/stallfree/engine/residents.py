"""Parameters that the device updates whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stallfree.engine.blocks import STATE, Resident, kind_of
from stallfree.engine.device import adopt_weights
from stallfree.engine.sharding import Groups, gradient_of
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
        device, dtype = residents[0].shard.device, residents[0].dtype
        self.layout = BlockLayout([_segment(resident.numel) for resident in residents], device)
        self.master = torch.empty(self.layout.selected_numel, dtype=torch.float32, device=device)
        self.exp_avg, self.exp_avg_sq = torch.empty_like(self.master), torch.empty_like(self.master)
        self.steps = torch.zeros(self.layout.places, dtype=torch.int32, device=device)
        self._gradient = torch.empty_like(self.master, dtype=dtype)
        self._parts = [self.part(self._gradient, place) for place in range(len(residents))]
        self._whole = self._gradient[: sum(resident.numel for resident in residents)]
        self.kinds = tuple(dict.fromkeys(kind_of(resident.name, resident.param) for resident in residents))
        self._there: list[int] = []  # places of those that have a gradient
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
    def planned(self) -> Part:
        """As AdamW steps it: to the kernel, a block whose channels are all selected."""
        every = [
            torch.arange(segment.channels, dtype=torch.int32, device=self.layout.device) for segment in self.layout.segments
        ]
        weights = [resident.shard.detach() for resident in self.residents] if self._plain is None else [self._plain]
        return Part(
            self.layout, torch.cat(every), weights, self.master, self.exp_avg, self.exp_avg_sq, self.steps, self._gradient
        )

    def gather(self) -> list[bool]:
        """Before AdamW: bring the gradients there are to where it expects them. Returns which there are."""
        grads = [gradient_of(resident.param) for resident in self.residents]
        present = [grad is not None and grad.numel() > 0 for grad in grads]
        there = [grad for grad, is_there in zip(grads, present, strict=True) if grad is not None and is_there]
        self._there = [place for place, is_there in enumerate(present) if is_there]
        if len(there) == len(grads):
            torch.cat([grad if grad.dim() == 1 else grad.reshape(-1) for grad in there], out=self._whole)
        elif there:
            torch._foreach_copy_([self._parts[place] for place in self._there], there)
        if there and self._plain is not None:
            self._plain.copy_(self.residents[0].shard.detach())
        return present

    def norm(self) -> Tensor:
        """L2 norm of the gradients gathered last: fp32 scalar on the device."""
        norm: Tensor
        if len(self._there) == len(self.residents):  # as a whole
            norm = torch.linalg.vector_norm(self._whole, dtype=torch.float32)
        elif self._there:
            parts = [self._parts[place] for place in self._there]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts, 2, torch.float32)))
        else:
            norm = torch.zeros((), dtype=torch.float32, device=self.layout.device)
        return norm

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
