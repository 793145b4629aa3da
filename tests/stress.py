"""Training under stress: places to train in, models, and time lost at random on every stream and thread."""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from streams import use
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine import ring

# "streams": a GPU's path on the CPU, with copies that come late; "pieces": and staging memory smaller than most blocks.
PLACES = ["cpu", "streams", "pieces", *(pytest.param(place, marks=pytest.mark.gpu) for place in ("cuda", "cuda pieces"))]
STAGING_BYTES = {"streams": 1 << 20, "pieces": 1 << 11, "cuda pieces": 1 << 11}
SETTINGS = dict(topk_ratio=0.25, update_interval=3, select_interval=3, full_warm_up_rounds=2, min_numel=0, block_numel=600)
WIDTH, CALLS = 16, 11
Weights = list[Tensor]


def device_of(place: str, monkeypatch, seed: int = 0) -> torch.device:
    if place.startswith("cuda"):
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        if place in STAGING_BYTES:
            monkeypatch.setattr(ring, "STAGING_BYTES", STAGING_BYTES[place])
        return torch.device("cuda")
    if place in STAGING_BYTES:
        rnd = random.Random(seed)
        use(monkeypatch, lambda: time.sleep(rnd.random() * rnd.choice([0.0, 0.0, 0.0, 3e-4])), STAGING_BYTES[place])
    return torch.device("cpu")


class Late:
    """Random delays for `engine.delay`: in hooks, at copies and of the host; on CUDA on the device's streams, too."""

    def __init__(self, optimizer: ZenFlowAdamW, seed: int, seconds: float = 5e-4, cycles: int = 2_000_000) -> None:
        self.engine, self.random, self.seconds, self.cycles = optimizer.engine, random.Random(seed), seconds, cycles

    def __call__(self, place: str) -> float:
        if place != "worker" and self.engine.device.type == "cuda":
            copies = self.engine.link.streams
            for stream in (torch.cuda.current_stream(), copies.to_host, copies.to_device, copies.beside, copies.showing):
                if self.random.random() < 0.3:
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(self.random.randrange(self.cycles))
        return self.random.random() * self.random.choice([0.0, 0.0, self.seconds])


def late(seed: int, **how: Any) -> Callable[[ZenFlowAdamW], None]:
    """For `trained(prepare=...)`."""

    def prepare(optimizer: ZenFlowAdamW) -> None:
        optimizer.engine.delay = Late(optimizer, seed, **how)

    return prepare


class Deep(nn.Module):
    """Layers one after the other. checkpointing: None, or whether it is reentrant."""

    def __init__(self, layers: int = 4, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(layers)
        )
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x) if self.checkpointing is None else checkpoint(layer, x, use_reentrant=self.checkpointing))
        return x


class Branches(nn.Module):
    """Layers beside each other; `order` says which comes first, `streams` where each is computed."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        self.order = list(range(count))
        self.streams: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor | None] = [None] * len(self.branches)
        for place in self.order:
            stream = self.streams[place % len(self.streams)] if self.streams else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
                x.record_stream(stream)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                found[place] = torch.tanh(self.branches[place](x))
        for place, stream in enumerate(self.streams):
            torch.cuda.current_stream().wait_stream(stream)
            found[place].record_stream(torch.cuda.current_stream())
        return torch.stack(found).sum(0)


class Thin(nn.Module):
    """Three weights of a shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(shape)) for _ in range(3))


@cache  # on the device, so that nobody waits for a copy
def data(t: int, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(t)).to(device)


def batch(model: nn.Module, t: int) -> Tensor:
    return data(t, next(model.parameters()).device, 8, WIDTH)


def gradients(model: nn.Module, t: int) -> list[Tensor]:
    """Of `linear`."""
    return [data(100 * t + place, p.device, *p.shape) for place, p in enumerate(model.parameters())]


def squares(model: nn.Module, t: int) -> Tensor:
    return (model(batch(model, t)) - 1).pow(2).mean()


def linear(model: nn.Module, t: int) -> Tensor:
    """A loss whose gradients do not depend on the weights."""
    return sum((p * g).sum() for p, g in zip(model.parameters(), gradients(model, t), strict=True))


def weights(model: nn.Module) -> Weights:
    """As they are on the device at this point: nobody waits."""
    return [p.detach().clone() for p in model.parameters()]


def build(make: Callable[[], nn.Module], device: torch.device, **settings: Any) -> tuple[nn.Module, ZenFlowAdamW]:
    """The same model and optimizer every time."""
    torch.manual_seed(0)
    model = make().to(device)
    config = ZenFlowConfig(**SETTINGS | settings)
    return model, ZenFlowAdamW(model.named_parameters(), lr=1e-2, config=config)


def trained(
    make: Callable[[], nn.Module],
    device: torch.device,
    *,
    loss: Callable[[nn.Module, int], Tensor] = squares,
    calls: int = CALLS,
    prepare: Callable[[ZenFlowAdamW], None] | None = None,
    before: Callable[[nn.Module, int], None] = lambda model, t: None,
    **settings: Any,
) -> list[Weights]:
    """The weights after each call, and last after a flush."""
    model, optimizer = build(make, device, **settings)
    if prepare is not None:
        prepare(optimizer)
    seen = []
    for t in range(calls):
        before(model, t)
        loss(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(weights(model))
    optimizer.flush()
    seen.append(weights(model))
    optimizer.close()
    return seen
