"""Train a model for a few calls and compare it with AdamW on the gradients that this very run produced."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from stallfree import ZenFlowAdamW, ZenFlowConfig

LR = 1e-2
CALLS = 9
SMALL = dict(full_warm_up_rounds=2, min_numel=0, block_numel=400)
PRESETS = {
    "zero-offload": dict(preset="zero-offload", **SMALL),
    "stallfree": dict(topk_ratio=0.25, update_interval=3, select_interval=3, **SMALL),
}
Loss = Callable[[nn.Module, int], Tensor]


class Mirror:
    """torch.optim.AdamW on fp32 masters of a model's parameters, whatever the model's dtype."""

    def __init__(self, groups: list[dict]) -> None:
        self.groups = groups
        self.params = [p for group in groups for p in group["params"] if p.requires_grad]
        self.masters = {p: nn.Parameter(p.detach().float().clone()) for p in self.params}
        settings = [{k: group[k] for k in ("lr", "betas", "eps", "weight_decay")} for group in groups]
        held = [[self.masters[p] for p in group["params"] if p in self.masters] for group in groups]
        self.optimizer = torch.optim.AdamW([dict(params=h, **s) for h, s in zip(held, settings, strict=True) if h])
        self.sources = [group for group, h in zip(groups, held, strict=True) if h]

    def step(self, grads: list[Tensor | None]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            self.masters[p].grad = None if grad is None else grad.detach().float()
        for mine, source in zip(self.optimizer.param_groups, self.sources, strict=True):
            mine["lr"] = source["lr"]
        self.optimizer.step()

    def compare(self, what: str, calls: int) -> None:
        """Every parameter is its master rounded, up to fp32 arithmetic: see histories.tolerance."""
        for p in self.params:
            master = self.masters[p].detach()
            tol = calls * (2.0**-23 * master.abs() + LR * 5e-6)
            low, high, actual = (master - tol).to(p.dtype), (master + tol).to(p.dtype), p.detach()
            off = (actual.float() - master).abs().max().item()
            assert ((low <= actual) & (actual <= high)).all(), f"{what}: {tuple(p.shape)} {p.dtype} is off by {off:.3g}"


def full(optimizer: ZenFlowAdamW, params: list[Tensor]) -> list[Tensor | None]:
    grads = [optimizer.full_gradient(p) for p in params]
    return [None if g is None else g.clone() for g in grads]


def train(model: nn.Module, loss: Loss, settings: dict, *, passes: int = 1, groups=None, touch=None, schedule=None) -> None:
    """Train under one preset; assert that the weights are AdamW's: at every call for zero-offload, after a flush otherwise.

    Under zero-offload a twin is trained by AdamW beside it, on gradients of its own. Its losses must agree; single weights need
    not, because AdamW makes whole steps of rounding noise, which is all the gradient that, say, a bias before a batch norm has.
    """
    synchronous = settings.get("preset") == "zero-offload"
    precise = all(p.dtype == torch.float32 for p in model.parameters())
    twin = copy.deepcopy(model)
    optimizer = ZenFlowAdamW(groups(model) if groups else model.named_parameters(), lr=LR, config=ZenFlowConfig(**settings))
    scheduler = schedule(optimizer) if schedule else None
    mirror = Mirror(optimizer.param_groups)
    twins = dict(zip(model.parameters(), twin.parameters(), strict=True))
    twin_groups = [group | dict(params=[twins[p] for p in group["params"]]) for group in optimizer.param_groups]
    follower = Mirror(twin_groups)
    before = [p.detach().clone() for p in mirror.params]
    for t in range(CALLS):
        for m in range(passes):
            ours = loss(model, t * passes + m)
            ours.backward()
            if synchronous:
                theirs = loss(twin, t * passes + m)
                theirs.backward()
                torch.testing.assert_close(ours, theirs, rtol=1e-4 if precise else 3e-2, atol=1e-5)
        if touch:
            touch(list(model.parameters()))
            if synchronous:
                touch(list(twin.parameters()))
        mirror.step(full(optimizer, mirror.params))
        optimizer.step()
        optimizer.zero_grad()
        if synchronous:
            mirror.compare(f"call {t + 1}", t + 1)
            for group, source in zip(twin_groups, optimizer.param_groups, strict=True):
                group["lr"] = source["lr"]
            follower.step([p.grad for p in follower.params])
            twin.zero_grad()
            with torch.no_grad():
                for p in follower.params:
                    p.copy_(follower.masters[p])
        if scheduler:
            scheduler.step()
    optimizer.flush()
    mirror.compare("flushed", CALLS)
    assert any(not torch.equal(p.detach(), old) for p, old in zip(mirror.params, before, strict=True))
    optimizer.close()


def inputs(t: int, *shape: int, like: nn.Module) -> Tensor:
    p = next(like.parameters())
    return torch.randn(shape, generator=torch.Generator().manual_seed(t)).to(p.device, p.dtype)


def tokens(t: int, vocabulary: int, *shape: int, like: nn.Module) -> Tensor:
    drawn = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(t))
    return drawn.to(next(like.parameters()).device)


def regression(model: nn.Module, t: int) -> Tensor:
    return (model(inputs(t, 4, 12, like=model)).float() - 1).pow(2).mean()


def mlp(device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))
    return layers.to(device, dtype)
