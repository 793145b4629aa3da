"""Which cores are whose: the host's threads' and training's, on a machine that several ranks may share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from stallfree.config import ZenFlowConfig
from stallfree.limits import quota_cores

SYSTEM = Path("/sys/devices/system")


def available_cores() -> list[int]:
    """Cores this process may use: its affinity, cut to its share of what the ranks of this machine have together.

    A launcher that binds ranks has more cores itself, and what a rank is bound to is its own, or that of a few ranks. A share
    is of one NUMA node as far as may be, and the first ranks' of the first node, as their GPUs mostly are.
    """
    ranks, rank = _local_ranks(), int(os.environ.get("LOCAL_RANK", 0))
    cores = _in_order(_affinity(0))
    together = len(cores) if ranks == 1 else max(len(cores), len(_affinity(os.getppid())))
    share = max(1, min(len(cores), min(together, quota_cores()) // ranks))
    apart = max(share, len(cores) // ranks)  # under a quota, shares have gaps between them
    first = rank % (len(cores) // apart) * apart
    return sorted(cores[first : first + share])


def _in_order(cores: Sequence[int]) -> list[int]:
    """Cores of a NUMA node together, and threads of a core: numbers may alternate between nodes, or begin anew."""
    nodes: dict[int, int] = {}
    for place in SYSTEM.glob("node/node[0-9]*/cpulist"):
        nodes |= dict.fromkeys(_numbers(place), int(place.parent.name.removeprefix("node")))
    threads = {core: _numbers(SYSTEM / f"cpu/cpu{core}/topology/thread_siblings_list") or [core] for core in cores}
    return sorted(cores, key=lambda core: (nodes.get(core, 0), min(threads[core]), core))


def _numbers(path: Path) -> list[int]:
    """Of a list like "0-7,16-23"; none where there is no such list."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        for run in path.read_text().strip().split(","):
            first, _, last = run.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


def _local_ranks() -> int:
    """Processes on this machine that train together."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _affinity(process: int) -> list[int]:
    """The cores of a process, 0: of this one."""
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):  # the parent is gone
            return sorted(os.sched_getaffinity(process))
    return list(range(os.cpu_count() or 1)) if process == 0 else []


def host_cores(config: ZenFlowConfig, on_gpu: bool) -> tuple[int, list[int] | None]:
    """Threads of the host kernel, and the cores to bind them to (None: to none).

    With a GPU the training thread and the data loader keep two cores. Without one, training itself computes on the cores,
    and the host kernel takes half of them. With host_kernel="torch" one thread calls torch, which has threads of its own.

    Ranks beside others stay on their share, where their memory is (`near`). No thread is bound to one core unless
    somebody says so: one that sleeps leaves it idle, training moves there, and has to share it when the thread wakes up.
    """
    if config.host_kernel == "torch":
        return 1, None
    cores = available_cores()
    share = max(1, len(cores) - 2 if on_gpu else len(cores) // 2)
    threads = share if config.host_threads == "auto" else config.host_threads
    if config.pin_host_threads and threads > len(cores):
        raise ValueError(
            f"{threads} host threads cannot be pinned to the {len(cores)} cores this process may use; use fewer threads"
        )
    if config.pin_host_threads:
        return threads, cores[-threads:]
    return threads, cores if on_gpu and _local_ranks() > 1 else None


@contextmanager
def near(cores: Sequence[int] | None) -> Iterator[None]:
    """What this thread touches first inside gets memory of these cores' node. None: of wherever the thread runs."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # others are elsewhere, or would be begun here and stay
        with suppress(OSError):  # not allowed here
            os.sched_setaffinity(0, cores)
        yield
    finally:
        try:
            with suppress(OSError):
                os.sched_setaffinity(0, before)
        finally:
            torch.set_num_threads(threads)
