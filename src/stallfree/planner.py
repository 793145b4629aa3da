"""What a model will need in host and device memory, from shapes and settings, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import Block, build_blocks, classify
from stallfree.engine.ring import ring_bytes
from stallfree.engine.slots import slot_bytes

GIB = 1 << 30
SPARE = 0.9  # of what is available, for room that is optional


@dataclass(frozen=True)
class Plan:
    """Bytes by place and purpose, beyond weights and gradients."""

    host_state: int
    host_slots: int
    host_exchange: int
    device_state: int
    device_staging: int

    @property
    def host(self) -> int:
        return self.host_state + self.host_slots + self.host_exchange

    def table(self) -> str:
        rows = [
            ("host memory: master, exp_avg, exp_avg_sq", self.host_state),
            ("host memory: slots for gradients in flight", self.host_slots),
            ("host memory: channels that change hands", self.host_exchange),
            ("host memory in all", self.host),
            ("device memory: state of selected channels and residents", self.device_state),
            ("device memory: copies under way", self.device_staging),
        ]
        return "\n".join(f"  {label:<58}{size / GIB:9.3f} GiB" for label, size in rows)


def plan(named: Sequence[tuple[str, nn.Parameter]], config: ZenFlowConfig) -> Plan:
    """Needs no memory: works for parameters on the meta device too."""
    residents, weights = classify(named, config)
    moment = 4 if config.moments_dtype == "float32" else 2
    blocks = build_blocks(weights, config)
    state = exchange = device = 0
    for weight in weights:
        size = weight.numel
        state += size * (4 + 2 * moment) + 4 * weight.channels
        selected = weight.selected_count * (12 * weight.length + 4)
        if weight.selected_count:
            exchange += selected + 4 * (weight.selected_count + weight.channels)
        device += selected + weight.selected_count * weight.length * weight.dtype.itemsize + 8 * weight.channels
    on_gpu = any(weight.shard.device.type == "cuda" for weight in weights)
    staging = 2 * ring_bytes([_copied_bytes(block) for block in blocks]) if on_gpu else 0
    resident = sum(item.numel for item in residents)
    return Plan(state, slot_bytes(blocks, config), exchange, device + 12 * resident, staging)


def with_room(named: Sequence[tuple[str, nn.Parameter]], config: ZenFlowConfig) -> ZenFlowConfig:
    """Settings with a `max_update_interval` that host memory has room for, if it is left to be chosen.

    The largest that leaves a tenth of what is available; if none does, the smallest, for `check_fits` to judge.
    """
    if not config.room_is_open:
        return config
    choices = [config.replace(max_update_interval=room) for room in config.rooms]
    available = available_host_bytes()
    fitting = (choice for choice in choices if plan(named, choice).host <= SPARE * available)
    return next(fitting, choices[-1])


def _copied_bytes(block: Block) -> int:
    """The largest copy that a block makes: of its gradients, or of the state of its selected channels."""
    selected = sum(weight.selected_count * (12 * weight.length + 4) for weight in block.weights)
    return max(block.numel * block.dtype.itemsize, selected)


def available_host_bytes() -> int:
    """Memory this process can still take: the machine's, or its control group's if that is less, shared among local ranks."""
    available = _machine_bytes()
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit_file, encoding="ascii") as limit, open(usage_file, encoding="ascii") as usage:
                available = min(available, int(limit.read()) - int(usage.read()))
        except (OSError, ValueError):  # no control group, or no limit ("max")
            continue
    return max(0, available) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _machine_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo}
        return sizes["MemAvailable"]
    except (OSError, KeyError, ValueError):
        return 1 << 62


def check_fits(needed: Plan, least: Callable[[int], int] = int) -> None:
    """Refuse a model whose host state does not fit, before it is allocated. least: of a number on all ranks.

    Ranks of one machine ask the same memory: none may take its share before all have asked, and none may go on alone.
    """
    available = available_host_bytes()
    if least(available - needed.host) < 0:
        raise MemoryError(
            f"the optimizer state needs {needed.host / GIB:.2f} GiB of host memory; {available / GIB:.2f} GiB are available"
            f"{' (on this rank; on another it does not fit)' if needed.host <= available else ''}:\n"
            f"{needed.table()}\n"
            "Ways out: moments_dtype='bfloat16', a smaller update_interval, a larger topk_ratio, or a larger machine"
        )
