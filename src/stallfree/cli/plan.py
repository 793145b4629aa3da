"""What a model will need in GPU and host memory, and what a step will move, by settings: before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from torch import nn

from stallfree import planner
from stallfree.cli.bench.modes import parse_mode
from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.bench.shapes import SHAPES, build_model, model_config
from stallfree.cli.bench.table import breakable
from stallfree.cli.errors import UsageError, did_you_mean
from stallfree.cli.flags import setting
from stallfree.config import PRESETS, ZenFlowConfig
from stallfree.engine.blocks import by_modules
from stallfree.engine.sharding import shard_of
from stallfree.limits import GIB, SPARE, unshared_host_bytes

DEFAULT = (
    "device",
    "stallfree",
    "stallfree:update_interval=2",
    "stallfree:update_interval=4",
    "stallfree:update_interval=8",
    "stallfree:update_interval=4,moments_dtype=bfloat16",
    "zero-offload",
)
COLUMNS = (  # what, its title, and maybe its style
    ("mode", "mode"),
    ("weights", "GPU:\nweights"),
    ("state", "\nstate"),
    ("copies", "\ncopies"),
    ("gradients", "\ngradients"),
    ("gathered", "\ngathered"),
    ("gpu", "GPU:\nall", "bold"),
    ("host state", "host:\nstate"),
    ("slots", "\nslots"),
    ("host", "host:\nall", "bold"),
    ("down", "bus:\ndown"),
    ("up", "\nup"),
    ("verdict", ""),
)
PARTS = ("weights", "state", "copies", "gradients", "gathered", "host state", "slots", "down", "up")
WIDTH = 168


class PlanSettings(BaseModel):
    """What is planned. The flags and the docs are made from these fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = setting("1.5b", "0.5b, 1.5b, 3b, 7b (shapes of Qwen2.5), `tiny`, or a directory with a config.json.")
    modes: list[str] = setting(
        [],
        f"Presets ({', '.join(PRESETS)}) with settings, as in stallfree:update_interval=4,topk_ratio=0.2.",
        metavar="MODE...",
        shown="everything on the GPU; the default, and some S; bfloat16 moments; everything on the host",
    )
    gpus: int = setting(1, "GPUs of one machine that share the model by fully_shard; numbers are of the fullest one.", ge=1)
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16", "Type of weights and gradients.")
    gpu_memory: float | None = setting(None, "GiB of each GPU.", shown="what is free on this machine's", gt=0)
    host_memory: float | None = setting(None, "GiB of the host.", shown="what is available here", gt=0)


@dataclass(frozen=True)
class Need:
    """Bytes of one mode. Of the host: for all GPUs."""

    weights: int
    gathered: int
    plan: planner.Plan
    ranks: int

    @property
    def gpu(self) -> int:
        return self.weights + self.plan.device + self.plan.device_gradients + self.gathered

    @property
    def host(self) -> int:
        return self.plan.host * self.ranks

    def missing(self, gpu: int | None, host: int) -> dict[str, int]:
        """Bytes short, by place; empty if it fits as far as is known."""
        short = {"GPU": 0 if gpu is None else self.gpu - gpu, "host": self.host - host}
        return {where: size for where, size in short.items() if size > 0}

    def verdict(self, gpu: int | None, host: int) -> str:
        """Whether it fits, and what is left: on the GPU for activations."""
        if missing := self.missing(gpu, host):
            return f"no: {', '.join(f'{where} {_gib(size)} short' for where, size in missing.items())}"
        tight = self.host > SPARE * host
        on_gpu = "GPU unknown" if gpu is None else f"GPU {_gib(gpu - self.gpu)} left"
        return f"{'tight' if tight else 'fits'}: {on_gpu}, host {_gib(host - self.host)}"


def make_plan(settings: PlanSettings) -> int:
    """Print one line per mode. Returns the exit code: 1 if none fits.

    Raises:
        UsageError: for anything wrong with the input.
    """
    gpu, host = _gpu_bytes(settings), _bytes(settings.host_memory, unshared_host_bytes())
    numel, needs = work_out(settings, host)
    shared = f" on each of {settings.gpus} GPUs; on the host for all of them" if settings.gpus > 1 else ""
    there = "no GPU here (--gpu-memory GIB gives one)" if gpu is None else f"{_gib(gpu)} on a GPU"
    console = Console(highlight=False, markup=False, soft_wrap=True)
    sizes = f"{numel / 1e9:.3f} billion parameters in {settings.dtype}"
    console.print(f"{settings.model}: {sizes}. GiB{shared}; bus: in a step\n")
    _show(needs, gpu, host, narrow=console.is_terminal and console.width < WIDTH)
    console.print(f"\nThere is: {there}, {_gib(host)} on the host. Activations come on top; docs/plan.md explains.")
    return int(all(need.missing(gpu, host) for need in needs.values()))


def work_out(settings: PlanSettings, host: int) -> tuple[int, dict[str, Need]]:
    """The number of parameters, and what each mode needs. host: bytes that there are."""
    wanted = {text: _config(text) for text in dict.fromkeys(settings.modes or DEFAULT)}
    needs = {}
    with _shards(settings) as (model, gathered):
        named = list(model.named_parameters())
        weights = sum(shard_of(param).nbytes for _, param in named)
        for text, config in wanted.items():
            fitting = planner.with_room(named, by_modules(config, model), host // settings.gpus)
            needs[text] = Need(weights, gathered, planner.plan(named, fitting, "cuda"), settings.gpus)
        return sum(param.numel() for _, param in named), needs


def _config(text: str) -> ZenFlowConfig:
    name = text.partition(":")[0]
    if text in SHAPES:
        raise UsageError(f"{text!r} is a model: write --model {text}")
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS, or_else=f"; presets are planned: {', '.join(PRESETS)}")
        raise UsageError(f"mode {text!r}: there is no preset {name!r}{hint}")
    config = parse_mode(text).config
    assert config is not None
    return config


def _bytes(gib: float | None, found: int) -> int:
    return found if gib is None else int(gib * GIB)


def _gpu_bytes(settings: PlanSettings) -> int | None:
    if settings.gpu_memory is None and not torch.cuda.is_available():
        return None
    return _bytes(settings.gpu_memory, torch.cuda.mem_get_info()[0] if settings.gpu_memory is None else 0)


@contextmanager
def _shards(settings: PlanSettings) -> Iterator[tuple[nn.Module, int]]:
    """The model without memory, sharded as the first of several ranks has it, which has most; and bytes that it gathers."""
    shape = BenchSettings(model=settings.model, dtype=settings.dtype, seq=2)
    model = build_model(model_config(shape), shape, "meta")
    if settings.gpus == 1:
        yield model, 0
        return
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore  # ranks without processes; nothing is communicated

    gathered = _gathered(model)
    distributed.init_process_group("fake", rank=0, world_size=settings.gpus, store=FakeStore())
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (settings.gpus,)))
        yield model, gathered
    finally:
        distributed.destroy_process_group()


def _gathered(model: nn.Module) -> int:
    """What `fully_shard` holds whole, layer by layer: what is outside of layers stays; of layers two, with their gradients."""
    from stallfree.cli.finetune.sharding import layers

    sizes = [sum(param.nbytes for param in layer.parameters()) for layer in layers(model)]
    rest = sum(param.nbytes for param in model.parameters()) - sum(sizes)
    return rest + max(rest, 4 * max(sizes, default=0))


def _show(needs: Mapping[str, Need], gpu: int | None, host: int, narrow: bool) -> None:
    """narrow: only the sums, and whether they fit."""
    shards = any(need.ranks > 1 for need in needs.values())
    hidden = {*PARTS} if narrow else set() if shards else {"gathered"}
    shown = [(name, title, *style) for name, title, *style in COLUMNS if name not in hidden]
    table = Table(box=None, pad_edge=False, header_style="")
    for name, title, *style in shown:
        words = name in ("mode", "verdict")
        table.add_column(title, justify="left" if words else "right", no_wrap=name != "mode", style=" ".join(style))
    for text, need in needs.items():
        cells = _cells(need) | {"mode": breakable(text), "verdict": need.verdict(gpu, host)}
        table.add_row(*[cells[name] for name, *_ in shown])
    Console(highlight=False, markup=False, width=None if narrow else WIDTH).print(table)


def _cells(need: Need) -> dict[str, str]:
    plan, ranks = need.plan, need.ranks
    sizes = {
        "weights": need.weights,
        "state": plan.device_state,
        "copies": plan.device_staging,
        "gradients": plan.device_gradients,
        "gathered": need.gathered,
        "gpu": need.gpu,
        "host state": plan.host_state * ranks,
        "slots": plan.host_slots * ranks,
        "host": need.host,
        "down": plan.down,
    }
    least, most = (_gib(plan.down // interval) for interval in (plan.config.max_update_interval, plan.config.initial_interval))
    up = f"{least}-{most}" if plan.config.update_interval == "auto" and least != most else most
    return {name: _gib(size) for name, size in sizes.items()} | {"up": up}


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= 10 * GIB else f"{size / GIB:.2f}"
