"""What a model will need in host and device memory, from shapes and settings, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stallfree import limits
from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import build_blocks, classify
from stallfree.engine.ring import ring_bytes
from stallfree.engine.slots import plan_slots
from stallfree.limits import GIB, SPARE

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Plan:
    """Bytes by place and purpose, beyond weights and gradients."""

    named: Named = field(repr=False, compare=False)
    config: ZenFlowConfig = field(repr=False, compare=False)
    host_state: int
    host_slots: int
    device_state: int
    device_staging: int
    device_gradients: int  # at most at once: of the largest block until staged, of selected channels and residents to `step()`
    down: int  # to the host in each step, without channels that change hands; up comes a part of that in S

    @property
    def host(self) -> int:
        return self.host_state + self.host_slots

    @property
    def device(self) -> int:
        return self.device_state + self.device_staging

    def host_beside(self, device: torch.device | None) -> int:
        """Host memory for parameters there: on the CPU both halves are."""
        return self.host + (self.device if device is not None and device.type == "cpu" else 0)

    def table(self) -> str:
        rows = [
            ("host memory: master, exp_avg, exp_avg_sq", self.host_state),
            ("host memory: slots (gradients and channels in flight)", self.host_slots),
            ("host memory in all", self.host),
            ("device memory: state of selected channels and residents", self.device_state),
            ("device memory: copies under way", self.device_staging),
        ]
        return "\n".join(f"  {label:<58}{size / GIB:9.3f} GiB" for label, size in rows)


def plan(named: Named, config: ZenFlowConfig, device: str | None = None) -> Plan:
    """Needs no memory: works for parameters on the meta device too. device: what kind they will be on; None: where they are."""
    residents, weights = classify(named, config)
    moment = 4 if config.moments_dtype == "float32" else 2
    blocks = build_blocks(weights, config)
    state = divided = gradients = 0
    for weight in weights:
        size = weight.numel
        state += size * (4 + 2 * moment) + 4 * weight.channels
        divided += weight.selected_count * (12 * weight.length + 4) + 8 * weight.channels
        gradients += weight.selected_count * weight.length * weight.dtype.itemsize
    on_gpu = any((device or weight.shard.device.type) == "cuda" for weight in weights)
    staging = sum(ring_bytes(blocks)) if on_gpu else 0
    resident = sum(item.numel * (12 + item.dtype.itemsize) for item in residents)
    gradients += sum(item.numel * item.dtype.itemsize for item in residents)
    gradients += max((block.numel * block.dtype.itemsize for block in blocks), default=0)
    down = sum(block.deferred_numel * block.dtype.itemsize for block in blocks)
    return Plan(
        named,
        config,
        host_state=state,
        host_slots=plan_slots(blocks, config).nbytes,
        device_state=divided + resident,
        device_staging=staging,
        device_gradients=gradients,
        down=down,
    )


def with_room(named: Named, config: ZenFlowConfig, available: int | None = None) -> ZenFlowConfig:
    """Settings with a `max_update_interval` that host memory has room for, if it is left to be chosen.

    The largest that leaves a tenth of what is available; if none does, the smallest, for `check_fits` to judge.
    available: bytes; None: what this machine has now.
    """
    if not config.room_is_open:
        return config
    choices = [config.replace(max_update_interval=room) for room in config.rooms]
    available, device = limits.available_host_bytes() if available is None else available, named[0][1].device
    fitting = (choice for choice in choices if plan(named, choice).host_beside(device) <= SPARE * available)
    return next(fitting, choices[-1])


def check_fits(needed: Plan, device: torch.device | None = None, least: Callable[[int], int] = int) -> None:
    """Refuse a model whose state does not fit, before anything is allocated. device: of the parameters; None: not judged.

    least: of a number on all ranks. Those of one machine ask for the same memory: none takes its share before all have asked.
    """
    host, available = needed.host_beside(device), limits.available_host_bytes()
    spare, free = available - host, 0
    if device is not None and device.type == "cuda":
        free = limits.available_device_bytes(device)
        spare = min(spare, free - needed.device)
    if least(spare) >= 0:
        return
    if spare >= 0:
        raise MemoryError(
            f"the optimizer state does not fit on another rank; here it needs:\n{needed.table()}\n{ways_out(needed, device)}"
        )
    if host > available:
        raise MemoryError(
            f"the optimizer state needs {host / GIB:.2f} GiB of host memory; {available / GIB:.2f} GiB are available:\n"
            f"{needed.table()}\n{ways_out(needed, device)}"
        )
    raise MemoryError(
        f"the optimizer state needs {needed.device / GIB:.2f} GiB of memory on {device}; {free / GIB:.2f} GiB are free:\n"
        f"{needed.table()}\n"
        "Ways out: a smaller topk_ratio, a smaller min_numel, or less on the GPU beside it"
    )


def ways_out(needed: Plan, device: torch.device | None) -> str:
    """The settings that need less host memory than these, each with what it needs."""
    named, config, ways = needed.named, needed.config, []
    for text, choice in _lighter(config):
        host = plan(named, choice).host_beside(device)
        if host < needed.host_beside(device):
            ways.append(f"{text} ({host / GIB:.2f} GiB)")
    return f"Ways out: {', '.join([*ways, 'a larger machine'])}"


def _lighter(config: ZenFlowConfig) -> list[tuple[str, ZenFlowConfig]]:
    """Settings that may need less; which do depends on the sizes of the blocks."""
    least = config.rooms[-1]  # that the first S and the schedule need
    changes: list[dict[str, Any]] = [dict(moments_dtype="bfloat16"), dict(topk_ratio=0.0)]
    if config.max_update_interval > least:
        changes.append(dict(max_update_interval=least))
    elif least > 1 and config.interval_schedule is None:
        changes.append(dict(update_interval=2 if least > 2 else 1))
    choices = []
    for change in changes:
        ((name, value),) = change.items()
        room = {"max_update_interval": value} if name == "update_interval" else {}
        choices.append((f"{name}={value!r}", config.replace(**change, **room)))
    kept = {name: getattr(config, name) for name in ("moments_dtype", "min_numel", "channel_dim", "block_numel")}
    return [*choices, ("preset='zero-offload'", ZenFlowConfig(preset="zero-offload", **kept))]
