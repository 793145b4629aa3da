"""What the modes will need, before any is built: which fit, and whether all fit at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stallfree import limits, planner
from stallfree.cli.bench.modes import ADAMW, Mode
from stallfree.engine.blocks import by_modules
from stallfree.limits import GIB, SPARE

PROCESS_BYTES = 4 * GIB  # of device memory that another library takes in a process of its own: kernels, communication buffers


@dataclass(frozen=True)
class Need:
    """Bytes of one mode, estimated."""

    device: int  # held between its turns
    host: int
    own_process: bool  # keeps what a step takes for itself


@dataclass(frozen=True)
class Room:
    """Bytes that are available. Without a GPU all is host memory."""

    device: int | None
    host: int


def needs(mode: Mode, model: nn.Module, device: str) -> Need:
    """model: on the meta device. device: that it will be on."""
    params = list(model.named_parameters())
    weights = sum(param.nbytes for _, param in params)
    if mode.config is not None:
        config = by_modules(mode.config, model)
        plan = planner.plan(params, planner.with_room(params, config), device)
        return Need(weights + plan.device_state + plan.device_staging, plan.host, False)
    if mode.peer is not None:
        count = sum(param.numel() for _, param in params)
        return Need(weights, int(mode.peer.host_bytes_per_parameter * count), True)
    return Need(3 * weights if mode.name == ADAMW else weights, 0, False)


def together(all_needs: Sequence[Need], step: int, room: Room) -> bool:
    """Whether all fit at once. step: bytes that a step takes beyond what is held, which one mode after the other does."""
    own = [need for need in all_needs if need.own_process]
    device = sum(need.device for need in all_needs) + step + len(own) * (step + PROCESS_BYTES)
    host = sum(need.host for need in all_needs)
    if room.device is None:
        return device + host <= SPARE * room.host
    return device <= SPARE * room.device and host <= SPARE * room.host


def why_too_large(need: Need, step: int, room: Room) -> str:
    """Why a mode cannot run even alone; empty if it can."""
    device, host = need.device + step, need.host
    if room.device is None:
        device, host = 0, device + host
    elif device > room.device:
        return (
            f"needs about {device / GIB:.1f} GiB of GPU memory, {room.device / GIB:.1f} GiB are free: lower --batch or --seq, "
            f"or add --gradient-checkpointing"
        )
    if host > room.host:
        return f"needs about {host / GIB:.1f} GiB of host memory, {room.host / GIB:.1f} GiB are free: take a smaller --model"
    return ""


def room(device: str) -> Room:
    """What this machine has left now."""
    return Room(torch.cuda.mem_get_info()[0] if device == "cuda" else None, limits.available_host_bytes())
