"""A setting in which gradients are staged, and what must come of it."""

import torch
from histories import backward
from torch import nn

from stallfree import ZenFlowAdamW

SETTINGS = dict(lr=1e-2, topk_ratio=0.25, update_interval=2, full_warm_up_rounds=1, select_interval=3, min_numel=0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Setting:
    """Two channelled parameters and a resident one, after `calls` calls; gradients come from a generator."""

    def __init__(self, device, dtype: torch.dtype = torch.float32, calls: int = 3, **overrides) -> None:
        self.generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(6, 8, generator=self.generator), torch.randn(5, 4, 3, generator=self.generator)]
        self.params = [nn.Parameter(w.to(device, dtype)) for w in [*weights, torch.zeros(7)]]
        self.optimizer = ZenFlowAdamW(zip(("a.weight", "b.weight", "c.bias"), self.params, strict=True), **SETTINGS | overrides)
        for _ in range(calls):
            self.backward(self.draw())
            self.step()

    def draw(self) -> list[torch.Tensor]:
        return [torch.randn(p.shape, generator=self.generator).to(p) for p in self.params]

    def backward(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        backward(self.params, grads)
        return grads

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        self.optimizer.flush()
        return [p.detach().cpu().clone() for p in self.params]

    def full(self) -> list[torch.Tensor]:
        return [self.optimizer.full_gradient(p) for p in self.params]


def same_as(device, dtype: torch.dtype, grads: list[torch.Tensor], **overrides) -> list[torch.Tensor]:
    """The weights of a setting whose fourth call saw these gradients in one plain backward pass."""
    plain = Setting(device, dtype, **overrides)
    plain.draw()
    plain.backward(grads)
    plain.step()
    return plain.weights()


def assert_equal(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e), (a.double() - e.double()).abs().max()
