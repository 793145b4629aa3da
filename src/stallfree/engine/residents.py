"""Parameters that the device updates whole: to the kernel, blocks whose channels are all selected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stallfree.engine.blocks import STATE, Resident
from stallfree.engine.device import adopt_weights
from stallfree.kernels.block import BlockKernel, BlockLayout, Segment, targets
from stallfree.kernels.device import Hyper

GROUP_NUMEL = 1 << 20  # elements that share buffers; larger parameters stand alone and need no copy of their gradients


class ResidentState:
    """One parameter's AdamW: views of its group's buffers."""

    def __init__(self, resident: Resident, group: ResidentGroup, place: int) -> None:
        self.resident = resident
        self.shape = resident.shape
        self.master, self.exp_avg, self.exp_avg_sq = (group.part(getattr(group, name), place) for name in STATE)
        self.steps = group.layout.places_of(group.steps, place)  # the same number in each

    def reset(self) -> None:
        """As at construction, from the parameter as it is now."""
        self.master.copy_(self.resident.param.detach())
        for tensor in (self.exp_avg, self.exp_avg_sq, self.steps):
            tensor.zero_()

    def show(self) -> None:
        """Write the master into the parameter."""
        self.resident.param.detach().copy_(self.master)

    def read_weights(self) -> None:
        """Take the parameter, written from outside, as the new master."""
        adopt_weights(self.master, self.resident.param.detach())


class ResidentGroup:
    """Residents of one dtype that are updated together."""

    def __init__(self, residents: Sequence[Resident], kernel: BlockKernel) -> None:
        self.residents, self.kernel = tuple(residents), kernel
        device, dtype = residents[0].param.device, residents[0].dtype
        self.layout = BlockLayout([_segment(resident.param.numel()) for resident in residents], device)
        every = [torch.arange(segment.channels, dtype=torch.int64, device=device) for segment in self.layout.segments]
        self._targets = targets(self.layout, every, [every[0][:0]] * len(every))
        self.master = torch.empty(self.layout.selected_numel, dtype=torch.float32, device=device)
        self.exp_avg, self.exp_avg_sq = torch.empty_like(self.master), torch.empty_like(self.master)
        self.steps = torch.zeros(self.layout.places, dtype=torch.int32, device=device)
        self._gradient = torch.empty(self.layout.selected_numel if len(residents) > 1 else 0, dtype=dtype, device=device)
        self._parts = [self.part(self._gradient, place) for place in range(len(residents))] if len(residents) > 1 else []
        self._scattered = not residents[0].param.is_contiguous()  # then it stands alone
        kernel.warm_up(self.layout, dtype)
        self.states = [ResidentState(resident, self, place) for place, resident in enumerate(residents)]
        for state in self.states:
            state.reset()

    def part(self, flat: Tensor, place: int) -> Tensor:
        """One parameter's part of a flat buffer, in the parameter's shape."""
        param = self.residents[place].param
        return self.layout.selected_rows(flat, place).view(-1)[: param.numel()].view(param.shape)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], hypers: Sequence[Hyper | None], factors: Tensor, skip: Tensor) -> None:
        """AdamW where there is a gradient. factors: at least as many as there are parameters."""
        present = {place: grad for place, grad in enumerate(grads) if grad is not None and grad.numel()}
        if not present:
            return
        if self._parts:
            gradient = self._gradient
            torch._foreach_copy_([self._parts[place] for place in present], list(present.values()))
        else:
            gradient = present[0].to(self._gradient.dtype).contiguous().view(-1)
        weights: list[Tensor | None] = [None] * len(grads)
        for place in present:
            weights[place] = self.residents[place].param.detach()
        shown = None
        if self._scattered:
            shown = weights[0] = self.residents[0].param.detach().contiguous()
        state = (self.master, self.exp_avg, self.exp_avg_sq, self.steps)
        factors = factors[: len(self.residents)]
        self.kernel.adamw(self.layout, self._targets, weights, *state, gradient, hypers, factors, skip)
        if shown is not None:
            self.residents[0].param.copy_(shown)


def resident_groups(residents: Sequence[Resident]) -> list[list[Resident]]:
    """Small parameters of a dtype together, large and strided ones alone."""
    groups: list[list[Resident]] = []
    open_groups: dict[torch.dtype, list[Resident]] = {}
    for resident in residents:
        numel = resident.param.numel()
        if numel >= GROUP_NUMEL or not resident.param.is_contiguous():
            groups.append([resident])
        else:
            held = open_groups.get(resident.dtype)
            if held is None or sum(member.param.numel() for member in held) + numel > GROUP_NUMEL:
                held = open_groups[resident.dtype] = []
                groups.append(held)
            held.append(resident)
    return groups


def _segment(numel: int) -> Segment:
    """One channel, or a few long ones, which keep a kernel's tiles full; all take every step together."""
    numel = max(numel, 1)  # a parameter without elements is never present
    channels = 8 if numel % 8 == 0 and numel >= 1 << 14 else 1
    return Segment(channels, numel // channels, 0, channels)
