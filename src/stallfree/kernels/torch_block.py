"""Block kernels as torch operations: on any device, and the definition for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stallfree.kernels.block import BlockLayout, Part, Targets, Update
from stallfree.kernels.checks import Planned, check_publish, check_split, check_step
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.judging import Evidence, Judging, Policy
from stallfree.kernels.torch_judging import TorchJudging


class TorchBlock:
    """Block kernels as torch operations: slow, on any device, and the definition for the others."""

    def warm_up(self, layout: BlockLayout, dtype: torch.dtype) -> None:
        """Torch has everything it needs."""

    def split(
        self,
        layout: BlockLayout,
        targets: Targets,
        grads: Sequence[Tensor | None],
        squares: Tensor,
        selected: Tensor,
        deferred: Tensor,
        low: int = 0,
    ) -> None:
        check_split(layout, grads, squares, selected, deferred, low)
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            rows = layout.segments[index].rows(grad)
            if not low:
                norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
                layout.channels_of(squares, index).copy_(norms.square_())
                layout.selected_rows(selected, index).copy_(rows.index_select(0, layout.places_of(targets.selected, index)))
            held = _deferred(layout, targets, index, low, deferred.numel())
            layout.deferred_rows(deferred, index, low).copy_(rows.index_select(0, held))

    def judging(self, evidence: Evidence, policy: Policy) -> Judging:
        return TorchJudging(evidence, policy)

    def plan(self, parts: Sequence[Part]) -> Update:
        return TorchUpdate(parts)

    def publish(
        self, layout: BlockLayout, targets: Targets, weights: Sequence[Tensor | None], values: Tensor, low: int = 0
    ) -> None:
        check_publish(layout, weights, values, low)
        for index, weight in enumerate(weights):
            if weight is not None:
                rows = layout.segments[index].rows(weight)
                held = _deferred(layout, targets, index, low, values.numel())
                rows.index_copy_(0, held.long(), layout.deferred_rows(values, index, low))


class TorchUpdate:
    """`Update` as torch operations, a weight at a time."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._planned = Planned.of(parts)
        self._weights = [(part, index) for part in parts for index in range(len(part.weights))]

    def step(self, hypers: Sequence[Hyper | None], factors: Tensor, skip: Tensor, memory: Tensor | None = None) -> None:
        check_step(self._planned, hypers, factors, skip, memory)
        for number, hyper in enumerate(hypers):
            if hyper is not None:
                part, index = self._weights[number]
                _adamw(part, index, _gradient(part, memory), hyper, factors[number], skip)


def _gradient(part: Part, memory: Tensor | None) -> Tensor:
    """The selected rows of a part's gradients."""
    if isinstance(part.grad, Tensor):
        return part.grad
    dtype, numel = part.weights[0].dtype, part.layout.selected_numel
    if memory is None or not numel:  # nobody reads any
        return torch.empty(numel, dtype=dtype, device=part.layout.device)
    return memory[part.grad : part.grad + numel * dtype.itemsize].view(dtype)


def _adamw(part: Part, index: int, gradient: Tensor, hyper: Hyper, factor: Tensor, skip: Tensor) -> None:
    layout, weight = part.layout, part.weights[index]
    lr, beta1, beta2, eps, weight_decay = hyper
    old_master, old_avg, old_avg_sq, grad = (
        layout.selected_rows(flat, index) for flat in (part.master, part.exp_avg, part.exp_avg_sq, gradient)
    )
    taken = layout.places_of(part.steps, index)
    taken += ~skip
    count = taken.to(torch.float64).clamp_(min=1).unsqueeze(1)  # [selected, 1]; a place that never stepped is skipped
    step_size = (lr / (1 - beta1**count)).to(torch.float32)
    root = (1 - beta2**count).sqrt().to(torch.float32)
    g = grad.to(torch.float32) * factor
    new_avg = old_avg * beta1 + g * (1 - beta1)
    new_avg_sq = old_avg_sq * beta2 + g * g * (1 - beta2)
    direction = new_avg / (new_avg_sq.sqrt() / root + eps)
    new_master = old_master * (1 - lr * weight_decay) - step_size * direction
    for old, new in ((old_master, new_master), (old_avg, new_avg), (old_avg_sq, new_avg_sq)):
        torch.where(skip, old, new, out=old)
    channels = layout.places_of(part.channels, index).long()
    shown = layout.segments[index].rows(weight)
    shown.index_copy_(0, channels, torch.where(skip, shown.index_select(0, channels), new_master.to(weight.dtype)))


def _deferred(layout: BlockLayout, targets: Targets, index: int, low: int, numel: int) -> Tensor:
    """The channels of segment `index` whose deferred rows are in a piece."""
    rows = layout.rows_between(index, low, low + numel)
    return targets.deferred.narrow(0, layout.row_starts[index] + rows.start, len(rows))
