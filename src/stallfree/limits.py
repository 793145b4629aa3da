"""What this machine, its control groups and its GPU have left for this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

GIB = 1 << 30
SPARE = 0.9  # of what is available: allocators round and fragment
UNKNOWN = 1 << 62  # bytes, where nobody says
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
# Of version 2 and of version 1: the limit, the usage, and what of the usage is cached files that the system gives up first.
_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_host_bytes() -> int:
    """Memory this process can still take: its share, where ranks train on this machine together."""
    return unshared_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def unshared_host_bytes() -> int:
    """What is left of the machine's memory, or of that of its control groups if one of them has less."""
    available = _machine_bytes()
    for controller, limit, usage, cached in _FILES:
        for directory in _groups(controller):
            available = min(available, _group_bytes(directory, limit, usage, cached))
    return max(0, available)


def quota_cores() -> int:
    """As many cores as the time that control groups allow this process amounts to: those of the tightest, rounded down."""
    cores = UNKNOWN
    for group in _groups(""):
        cores = min(cores, _quota(group / "cpu.max"))
    for group in _groups("cpu"):
        cores = min(cores, _quota(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"))
    return cores


def available_device_bytes(device: torch.device) -> int:
    """Memory that torch can still allocate on a GPU: what is free, and what its allocator holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def lockable_bytes() -> int | None:
    """How much memory this process may lock (`ulimit -l`); None: as much as it likes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _machine_bytes() -> int:
    try:
        lines = (PROC / "meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return UNKNOWN


def _groups(controller: str) -> Iterator[Path]:
    """The directories of this process's control group and of those around it. In a container it sees its own as the root."""
    root = CGROUP / controller
    yield root
    try:
        lines = (PROC / "self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inner = root / path.lstrip("/")
            yield from (place for place in (inner, *inner.parents) if root in place.parents)


def _quota(*files: Path) -> int:
    """Of a control group that says "quota period", in one file or in two."""
    try:
        quota, period = (int(number) for file in files for number in file.read_text().split())
    except (OSError, ValueError):  # no control group, or no quota ("max")
        return UNKNOWN
    return quota // period if quota > 0 and period > 0 else UNKNOWN  # version 1 says -1 for none


def _group_bytes(directory: Path, limit: str, usage: str, cached: str) -> int:
    try:
        left = int((directory / limit).read_text()) - int((directory / usage).read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return UNKNOWN
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
        return left + next((int(line.split()[1]) for line in lines if line.split()[0] == cached), 0)
    except (OSError, ValueError, IndexError):
        return left
