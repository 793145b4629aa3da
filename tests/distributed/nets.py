"""A model whose gradients are given, sharded in every way, and what must come of training it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks import DEVICE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stallfree import ZenFlowAdamW

LR = 1e-2
CALLS = 14
SMALL = dict(min_numel=0, block_numel=100, full_warm_up_rounds=2, select_interval=3)
PRESETS = {
    "zero-offload": dict(preset="zero-offload", **SMALL),
    "deferred": dict(topk_ratio=0.0, update_interval=3, **SMALL),
    "stallfree": dict(topk_ratio=0.25, update_interval=3, **SMALL),
    "rounds": dict(topk_ratio=0.25, update_interval=2, lag=2, stagger=False, **SMALL),
    "device": dict(preset="device", **SMALL),
}


class Layer(nn.Module):
    """A loss linear in the weights: the gradient of each is what it is given. `x` gives layers an order in backward."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: Tensor, grads: dict[str, Tensor]) -> Tensor:
        for name, param in self.named_parameters():
            if name in grads:
                x = x + (param * grads[name].to(param.dtype)).sum().to(x.dtype)
        return x


class Net(nn.Module):
    """Odd sizes: no number of ranks divides 5 rows, and most ranks have nothing of 1 row."""

    SHAPES = (
        {"up": (8, 6), "bias": (8,)},
        {"down": (5, 8), "bias": (5,), "narrow": (1, 6)},
        {"gate": (12, 4), "norm": (7,), "kernel": (4, 2, 3), "experts": (5, 2, 64)},
    )
    EMBED = (10, 4)

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = Layer({"weight": self.EMBED}, generator)
        self.layers = nn.ModuleList(Layer(shapes, generator) for shapes in self.SHAPES)
        self.head = Layer({}, generator)
        self.head.weight = self.embed.weight  # tied
        self.to(DEVICE)

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        x = torch.zeros((), requires_grad=True, device=DEVICE)
        x = self.embed(x, {"weight": 0.25 * grads["embed.weight"]})
        for number, layer in enumerate(self.layers):
            prefix = f"layers.{number}."
            x = layer(x, {name.removeprefix(prefix): grad for name, grad in grads.items() if name.startswith(prefix)})
        return self.head(x, {"weight": 0.75 * grads["embed.weight"]})


def drawn(model: nn.Module, call: int, rank: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Gradients of a call. Each channel has its own order of magnitude, which changes slowly: no near ties in a selection."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    grads = {}
    for name, param in model.named_parameters():
        rows = torch.arange(param.shape[0]).view(-1, *[1] * (param.dim() - 1))
        columns = torch.arange(param.shape[-1])
        loud = 1 + 3 * (((columns + call // 5) % 3 == 0) if param.dim() > 1 else (rows % 3 == 0)).float()
        grads[name] = (scale * (loud + 0.01 * columns) * torch.randn(param.shape, generator=generator)).to(DEVICE)
    return grads


# Ways to spread it


def mesh_of(*shape: int, **options: Any) -> DeviceMesh:
    """All ranks, by default in one dimension."""
    return init_device_mesh(DEVICE, shape or (dist.get_world_size(),), **options)


def plain(model: Net) -> Net:
    return model


def sharded(model: Net, **options: Any) -> Net:
    """FSDP over all ranks."""
    options = dict(mesh=mesh_of()) | options
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def resharding_late(model: Net) -> Net:
    return sharded(model, reshard_after_forward=False)


def hybrid(model: Net) -> Net:
    """HSDP: two replicas, each over two ranks."""
    return sharded(model, mesh=mesh_of(2, 2, mesh_dim_names=("replicate", "shard")))


def by_columns(model: Net) -> Net:
    """FSDP along the axis of the channels, where it divides."""

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.dim() > 1 and param.shape[1] % dist.get_world_size() == 0 else None

    return sharded(model, shard_placement_fn=placement)


WAYS: dict[str, Callable[[Net], Net]] = {way.__name__: way for way in (plain, sharded, resharding_late, hybrid, by_columns)}


class Mirror:
    """torch.optim.AdamW on the gathered gradients of a run."""

    def __init__(self, optimizer: ZenFlowAdamW) -> None:
        self.optimizer = optimizer
        self.params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        self.masters = [nn.Parameter(gathered(param).float().clone()) for param in self.params]
        groups = []
        for group in optimizer.param_groups:
            held = [m for p, m in zip(self.params, self.masters, strict=True) if any(p is other for other in group["params"])]
            groups.append(dict(params=held, **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}))
        self.adamw = torch.optim.AdamW(groups)

    def step(self) -> Tensor:
        """Before the optimizer's own. Returns the norm of all gradients."""
        for param, master in zip(self.params, self.masters, strict=True):
            grad = self.optimizer.full_gradient(param)
            master.grad = None if grad is None else gathered(grad).float().clone()
        norm = torch.linalg.vector_norm(torch.stack([m.grad.norm() for m in self.masters if m.grad is not None]))
        if (limit := self.optimizer.config.max_grad_norm) is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, limit)
        self.adamw.step()
        return norm

    def compare(self, calls: int) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            tolerance = calls * (2.0**-23 * master.detach().abs() + LR * 5e-6)
            off = (gathered(param) - master.detach()).abs()
            assert (off <= tolerance).all(), f"{tuple(param.shape)} is off by {off.max():.3g}"


def gathered(tensor: Tensor) -> Tensor:
    """Gathered on the ranks' devices, be it state in host memory: there is no backend for that on GPUs."""
    tensor = tensor.detach()
    return tensor.to(DEVICE).full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> list[Tensor]:
    return [gathered(param).clone() for param in model.parameters()]


def equal(actual, expected, what: str = "") -> None:
    for call, (now, then) in enumerate(zip(actual, expected, strict=True)):
        for place, (a, b) in enumerate(zip(now, then, strict=True)):
            assert torch.equal(a, b), f"{what}: call {call + 1}, parameter {place} differs by {(a - b).abs().max():.3g}"


def near(actual, expected) -> None:
    for now, then in zip(actual, expected, strict=True):
        for a, b in zip(now, then, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@dataclass
class Run:
    """A model in training."""

    model: nn.Module
    optimizer: ZenFlowAdamW
    alike: bool = True  # whether all ranks have the same gradients
    call: int = 0

    @classmethod
    def of(cls, way: str, settings: dict[str, Any], **options: Any) -> Run:
        model = WAYS[way](Net())
        return cls(model, ZenFlowAdamW(model.named_parameters(), lr=LR, **settings), **options)

    def backward(self, scale: float = 1.0, change: Callable[[dict[str, Tensor]], None] | None = None) -> None:
        rank = 0 if self.alike or not dist.is_initialized() else dist.get_rank()
        grads = drawn(Net(), self.call, rank, scale)
        if change is not None:
            change(grads)
        self.model(grads).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.call += 1

    def play(self, until: int, before: Callable[[Run], None] | None = None) -> list[list[Tensor]]:
        seen = []
        while self.call < until:
            self.backward()
            if before is not None:
                before(self)
            self.step()
            seen.append(weights(self.model))
        return seen

    def flushed(self) -> list[Tensor]:
        self.optimizer.flush()
        return weights(self.model)


# A model over two dimensions: real linear layers, whose gradients are whatever they are


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Transformerish(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(Mlp(width, hidden), Mlp(width, hidden)).to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def drawn_batch(rows: int, seed: int, width: int = 6) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def in_one_dimension() -> Transformerish:
    """FSDP over all ranks."""
    model, mesh = Transformerish(), mesh_of()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_two_dimensions(width: int = 6, hidden: int = 8) -> Transformerish:
    """FSDP over two ranks of tensor parallelism over two. Between the layers are DTensors, of any size."""
    model = Transformerish(width, hidden)
    mesh = mesh_of(2, 2, mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])
