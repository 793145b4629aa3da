"""The device half's arithmetic: the interface that every device kernel implements, and its definition in torch ops.

Rows are channels: a `[channels, length]` view of a weight or gradient, whatever its memory order. Nothing here reads a value
back to the launching thread: a skipped call is a flag on the device.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Hyper(NamedTuple):
    """One parameter's settings in one call."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class DeviceKernel(Protocol):
    """What a step does on the device."""

    def split(self, rows: Tensor, selected: Tensor, deferred: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over a gradient.

        rows: `[channels, length]`; selected, deferred: int64 channel numbers.
        Returns squared channel norms `[channels]` fp32, and selected and deferred rows (contiguous, in the gradient's dtype).
        """
        ...

    def adamw(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        steps: Tensor,
        grad: Tensor,
        hyper: Hyper,
        factor: Tensor,
        skip: Tensor,
    ) -> None:
        """One step of torch.optim.AdamW in fp32, in place, unless `skip` (bool scalar on the device).

        master, exp_avg, exp_avg_sq: `[rows, length]` fp32; steps: `[rows]` int32, advanced; grad: `[rows, length]`, any float
        dtype, multiplied by `factor` (fp32 scalar on the device) first.
        """
        ...

    def scatter(self, rows: Tensor, channels: Tensor, values: Tensor) -> None:
        """Write values `[n, length]` to the given channels of a weight, rounding to its dtype."""
        ...


class TorchDevice:
    """Device kernels as torch operations: slow, on any device, and the definition for the others."""

    def split(self, rows: Tensor, selected: Tensor, deferred: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).square_()
        return squares, rows.index_select(0, selected), rows.index_select(0, deferred)

    def adamw(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        steps: Tensor,
        grad: Tensor,
        hyper: Hyper,
        factor: Tensor,
        skip: Tensor,
    ) -> None:
        lr, beta1, beta2, eps, weight_decay = hyper
        grad = grad.to(torch.float32) * factor
        steps += ~skip
        count = steps.to(torch.float64).unsqueeze(1)
        correction1 = (1 - beta1**count).to(torch.float32)
        correction2 = (1 - beta2**count).to(torch.float32)
        new_avg = exp_avg.lerp(grad, 1 - beta1)
        new_avg_sq = (exp_avg_sq * beta2).addcmul_(grad, grad, value=1 - beta2)
        direction = (new_avg / correction1).div_((new_avg_sq / correction2).sqrt_().add_(eps))
        new_master = (master * (1 - lr * weight_decay)).add_(direction, alpha=-lr)
        for old, new in ((master, new_master), (exp_avg, new_avg), (exp_avg_sq, new_avg_sq)):
            torch.where(skip, old, new, out=old)

    def scatter(self, rows: Tensor, channels: Tensor, values: Tensor) -> None:
        rows.index_copy_(0, channels, values.to(rows.dtype))
