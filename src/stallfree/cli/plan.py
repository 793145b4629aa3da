"""What a model will need in GPU and host memory, and what a step will move, by settings: before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.table import Table
from torch import nn

from stallfree import limits, planner
from stallfree.cli.bench.modes import parse_mode
from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.bench.shapes import build_model, model_config
from stallfree.cli.errors import UsageError
from stallfree.cli.flags import first_mistake, flag, setting
from stallfree.config import PRESETS, ZenFlowConfig
from stallfree.engine.blocks import by_modules
from stallfree.engine.sharding import shard_of
from stallfree.limits import GIB, SPARE

DEFAULT = (
    "device",
    "stallfree:update_interval=2",
    "stallfree:update_interval=4",
    "stallfree:update_interval=8",
    "stallfree:update_interval=4,moments_dtype=bfloat16",
    "zero-offload",
)
COLUMNS = (
    ("mode",),
    ("GPU:\nweights",),
    ("\nstate",),
    ("\ncopies",),
    ("\ngradients",),
    ("\nall", "bold"),
    ("host:\nstate",),
    ("\nslots",),
    ("\nall", "bold"),
    ("bus:\ndown",),
    ("\nup",),
    ("",),
)
WIDTH = 150


class PlanSettings(BaseModel):
    """What is planned. The flags and the docs are made from these fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = setting("1.5b", "0.5b, 1.5b, 3b, 7b (shapes of Qwen2.5), or a directory with a config.json.")
    modes: list[str] = setting(
        [],
        f"Presets ({', '.join(PRESETS)}) with settings, as in stallfree:update_interval=4,topk_ratio=0.2.",
        metavar="MODE...",
        shown="everything on the GPU, some S, bfloat16 moments, everything on the host",
    )
    gpus: int = setting(
        1, "GPUs of one machine that share the model by fully_shard; numbers are then of the fullest one.", ge=1
    )
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16", "Type of weights and gradients.")
    gpu_memory: float | None = setting(None, "GiB of each GPU.", shown="what is free on this machine's", gt=0)
    host_memory: float | None = setting(None, "GiB of the host.", shown="what is available here", gt=0)


@dataclass(frozen=True)
class Need:
    """Bytes of one mode. Of the host: for all GPUs."""

    weights: int
    plan: planner.Plan
    ranks: int

    @property
    def gpu(self) -> int:
        return self.weights + self.plan.device + self.plan.device_gradients

    @property
    def host(self) -> int:
        return self.plan.host * self.ranks

    def verdict(self, gpu: int | None, host: int) -> str:
        """Whether it fits, with what is left on the GPU for activations."""
        missing = [
            f"{where} {_gib(need - there)} short"
            for where, need, there in (("GPU", self.gpu, gpu), ("host", self.host, int(SPARE * host)))
            if there is not None and need > there
        ]
        if missing:
            return "no: " + ", ".join(missing)
        return "fits" if gpu is None else f"fits, GPU {_gib(gpu - self.gpu)} left"


def make_plan(settings: PlanSettings) -> int:
    """Print one line per mode. Returns the exit code.

    Raises:
        UsageError: for anything wrong with the input.
    """
    gpu, host = _gpu_bytes(settings), _bytes(settings.host_memory, limits.available_host_bytes())
    numel, needs = work_out(settings, host)
    shared = f" on each of {settings.gpus} GPUs; on the host for all of them" if settings.gpus > 1 else ""
    there = "no GPU here (--gpu-memory GIB gives one)" if gpu is None else f"{_gib(gpu)} on a GPU"
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{settings.model}: {numel / 1e9:.3f} billion parameters in {settings.dtype}. GiB{shared}\n")
    _show(needs, gpu, host)
    console.print(
        f"\nThere is: {there}; {SPARE:.0%} of {_gib(host)} on the host. Activations come on top; docs/plan.md explains."
    )
    return 0


def work_out(settings: PlanSettings, host: int) -> tuple[int, dict[str, Need]]:
    """The number of parameters, and what each mode needs. host: bytes that there are."""
    wanted = {text: _config(text) for text in dict.fromkeys(settings.modes or DEFAULT)}
    needs = {}
    with _shards(settings) as model:
        named = list(model.named_parameters())
        weights = sum(shard_of(param).nbytes for _, param in named)
        for text, config in wanted.items():
            fitting = planner.with_room(named, by_modules(config, model), host // settings.gpus)
            needs[text] = Need(weights, planner.plan(named, fitting, "cuda"), settings.gpus)
        return sum(param.numel() for _, param in named), needs


def load_settings(given: Mapping[str, Any]) -> PlanSettings:
    """Settings from what the command line gave.

    Raises:
        UsageError: for an impossible value.
    """
    try:
        return PlanSettings.model_validate(given)
    except ValidationError as error:
        name, reason = first_mistake(error)
        raise UsageError(f"{flag(name)} {given[name]}: {reason[0].lower()}{reason[1:]}") from None


def _config(text: str) -> ZenFlowConfig:
    mode = parse_mode(text)
    if mode.name not in PRESETS or mode.config is None:
        raise UsageError(f"mode {text!r}: only presets are planned: {', '.join(PRESETS)}")
    return mode.config


def _bytes(gib: float | None, found: int) -> int:
    return found if gib is None else int(gib * GIB)


def _gpu_bytes(settings: PlanSettings) -> int | None:
    if settings.gpu_memory is None and not torch.cuda.is_available():
        return None
    return _bytes(settings.gpu_memory, torch.cuda.mem_get_info()[0] if settings.gpu_memory is None else 0)


@contextmanager
def _shards(settings: PlanSettings) -> Iterator[nn.Module]:
    """The model without memory, sharded as the first of several ranks has it: no other has more."""
    shape = BenchSettings(model=settings.model, dtype=settings.dtype, seq=2)
    model = build_model(model_config(shape), shape, "meta")
    if settings.gpus == 1:
        yield model
        return
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore  # ranks without processes; nothing is communicated

    distributed.init_process_group("fake", rank=0, world_size=settings.gpus, store=FakeStore())
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (settings.gpus,)))
        yield model
    finally:
        distributed.destroy_process_group()


def _show(needs: Mapping[str, Need], gpu: int | None, host: int) -> None:
    table = Table(box=None, pad_edge=False, header_style="")
    for name, *style in COLUMNS:
        table.add_column(name, justify="right" if name else "left", no_wrap=True, style=" ".join(style))
    table.columns[0].justify, table.columns[0].no_wrap, table.columns[0].overflow = "left", False, "fold"
    for text, need in needs.items():
        plan, ranks = need.plan, need.ranks
        sizes = [need.weights, plan.device_state, plan.device_staging, plan.device_gradients, need.gpu]
        sizes += [plan.host_state * ranks, plan.host_slots * ranks, need.host, plan.down, plan.up]
        table.add_row(text.replace(":", ": ").replace(",", ", "), *map(_gib, sizes), need.verdict(gpu, host))
    Console(highlight=False, markup=False, width=WIDTH).print(table)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= 10 * GIB else f"{size / GIB:.2f}"
