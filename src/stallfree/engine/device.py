"""The device half: fp32 state of residents and of selected channels, on the parameter's device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stallfree.config import ZenFlowConfig
from stallfree.engine import selection
from stallfree.engine.blocks import Resident, Weight
from stallfree.kernels.device import DeviceKernel, Hyper


class ResidentState:
    """AdamW of a whole parameter."""

    def __init__(self, resident: Resident) -> None:
        self.resident = resident
        param = resident.param.detach()
        self.shape = param.shape
        self.master = param.to(torch.float32, copy=True).reshape(1, -1).contiguous()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.steps = torch.zeros(1, dtype=torch.int32, device=param.device)

    def reset(self) -> None:
        """As at construction, from the parameter as it is now."""
        self.master.copy_(self.resident.param.detach().reshape(1, -1))
        for tensor in (self.exp_avg, self.exp_avg_sq, self.steps):
            tensor.zero_()

    def step(self, kernel: DeviceKernel, grad: Tensor, hyper: Hyper, factor: Tensor, skip: Tensor) -> None:
        kernel.adamw(self.master, self.exp_avg, self.exp_avg_sq, self.steps, grad.reshape(1, -1), hyper, factor, skip)
        self.show()

    def show(self) -> None:
        """Write the master into the parameter."""
        self.resident.param.detach().copy_(self.master.view(self.shape))

    def read_weights(self) -> None:
        """Take the parameter, written from outside, as the new master."""
        adopt_weights(self.master, self.resident.param.detach().reshape(1, -1))


class Split(NamedTuple):
    """A division of a weight's channels."""

    selected: Tensor  # [places] int64, the channel of each place
    deferred: Tensor  # [channels - places] int64, ascending


class Handover(NamedTuple):
    """Channels on the move between a selection and the next call, in places of the device state that change hands."""

    split: Split  # the division from the next gradient on
    moved: Tensor  # [places] bool


class SelectedState:
    """AdamW of a weight's selected channels, and the scores that choose them."""

    def __init__(self, weight: Weight, kernel: DeviceKernel, config: ZenFlowConfig) -> None:
        self.weight, self.kernel, self.config = weight, kernel, config
        device = weight.param.device
        count, length = weight.selected_count, weight.length
        self.master = torch.empty(count, length, dtype=torch.float32, device=device)
        self.exp_avg = torch.empty_like(self.master)
        self.exp_avg_sq = torch.empty_like(self.master)
        self.steps = torch.zeros(count, dtype=torch.int32, device=device)
        self.score = torch.zeros(weight.channels, dtype=torch.float32, device=device)
        self.reset()

    def reset(self) -> None:
        """As at construction: every channel is deferred."""
        device = self.weight.param.device
        nobody = torch.empty(0, dtype=torch.int64, device=device)
        self.installed = Split(nobody, torch.arange(self.weight.channels, device=device))  # whose state is here
        self.handover: Handover | None = None
        self.retention: Tensor | None = None
        self.score.zero_()

    @property
    def split(self) -> Split:
        """The division that gradients follow."""
        return self.handover.split if self.handover else self.installed

    def score_gradient(self, squares: Tensor, skip: Tensor) -> None:
        selection.update_score(self.score, squares, self.config.score_decay, skip)

    def step(self, grad: Tensor, hyper: Hyper, factor: Tensor, skip: Tensor) -> None:
        """AdamW of the selected channels, visible to the next forward pass. grad: `[places, length]`."""
        if grad.shape[0]:
            self.kernel.adamw(self.master, self.exp_avg, self.exp_avg_sq, self.steps, grad, hyper, factor, skip)
            self.show()

    def show(self) -> None:
        """Write the masters of the selected channels into the parameter."""
        if self.installed.selected.numel():
            self.kernel.scatter(self.weight.rows, self.installed.selected, self.master)

    def select(self) -> None:
        """Choose the channels of the next window; state moves at the next call (`install` of the pipeline)."""
        count = self.weight.selected_count
        chosen = selection.choose(self.score, count)
        held = self.installed.selected
        if held.numel():
            selected, moved = selection.rearrange(held, chosen)
            self.retention = 1 - moved.float().mean()
        else:
            selected = selection.first_places(chosen, count)
            moved = torch.ones_like(selected, dtype=torch.bool)
        deferred = selection.first_places(~chosen, self.weight.channels - count)
        self.handover = Handover(Split(selected, deferred), moved)

    def read_weights(self) -> None:
        if self.installed.selected.numel():
            adopt_weights(self.master, self.weight.rows[self.installed.selected])

    @property
    def nbytes(self) -> int:
        return 3 * self.master.nbytes + self.steps.nbytes + self.score.nbytes


def adopt_weights(master: Tensor, weights: Tensor) -> None:
    """Take weights as the new masters, except where a master still rounds to its weight and so knows it better."""
    master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights.to(torch.float32)))
