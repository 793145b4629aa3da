"""The host half: the state of deferred channels in host memory, and the thread that replays windows beside training."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import Weight
from stallfree.engine.device import adopt_weights
from stallfree.engine.transfer import Flag, Link
from stallfree.kernels.replay import HostKernel, ReplayJob, SlotGradient

MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HostState:
    """A weight's state, channel-major; rows of selected channels are room that the device half fills when state is saved."""

    def __init__(self, weight: Weight, config: ZenFlowConfig) -> None:
        self.weight, self.config = weight, config
        shape = (weight.channels, weight.length)
        self.master = weight.rows_of(weight.param).to("cpu", torch.float32, copy=True).contiguous()
        self.exp_avg = torch.zeros(shape, dtype=MOMENTS[config.moments_dtype], device="cpu")
        self.exp_avg_sq = torch.zeros(shape, dtype=MOMENTS[config.moments_dtype], device="cpu")
        self.steps = torch.zeros(weight.channels, dtype=torch.int32, device="cpu")
        self.defer_all()

    def defer_all(self) -> None:
        """Every channel is the host's."""
        self.deferred = torch.arange(self.weight.channels, dtype=torch.int64, device="cpu")  # ascending: the open window's rows

    def reset(self) -> None:
        """As at construction, from the weights as they are now."""
        self.master.copy_(self.weight.rows_of(self.weight.param))
        for tensor in (self.exp_avg, self.exp_avg_sq, self.steps):
            tensor.zero_()
        self.defer_all()

    def job(self, slots: Sequence[SlotGradient], lookahead: float, out: Tensor | None, commit: bool = True) -> ReplayJob:
        return ReplayJob(
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            steps=self.steps,
            rows=self.deferred,
            slots=tuple(slots),
            rule=self.config.rule,
            lookahead=lookahead,
            out=out,
            commit=commit,
            key=(self.config.seed << 32 | self.weight.key) & (1 << 64) - 1,
        )

    def read_weights(self) -> None:
        """Take the parameter, written from outside, as the new masters of all channels."""
        adopt_weights(self.master, self.weight.rows_of(self.weight.param).to("cpu").contiguous())

    @property
    def flats(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq

    @property
    def nbytes(self) -> int:
        return self.master.nbytes + self.exp_avg.nbytes + self.exp_avg_sq.nbytes + self.steps.nbytes


class Task(NamedTuple):
    """Some host work."""

    names: str  # whose update it is
    work: Callable[[], None]
    flag: Flag | None = None  # raised to `value` when the work is done
    value: int = 0


class HostError(RuntimeError):
    """Host work failed; the message names the parameters and holds the worker's traceback."""


class HostWorker:
    """Runs host work in order: on a thread beside the training thread, or at once if `overlap` is off."""

    def __init__(self, kernel: HostKernel, overlap: bool, link: Link) -> None:
        self.kernel, self.link = kernel, link
        self.delay: Callable[[str], None] | None = None
        self.error: HostError | None = None  # of the first task that failed; none is begun after it
        self._threads = (
            ThreadPoolExecutor(1, thread_name_prefix="stallfree-host", initializer=link.enter_thread) if overlap else None
        )
        self._process = os.getpid()

    def submit(self, tasks: Sequence[Task]) -> list[Future[None]]:
        """Do some tasks, one after the other. A future's result() raises HostError if its task or an earlier one failed."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "the optimizer was built before a fork and has no threads here; build it in the process that trains"
            )
        futures: list[Future[None]] = [Future() for _ in tasks]
        if self._threads is not None:
            self._threads.submit(self._run, tasks, futures)
        else:
            self._run(tasks, futures)
        return futures

    def _run(self, tasks: Sequence[Task], futures: Sequence[Future[None]]) -> None:
        for task, future in zip(tasks, futures, strict=True):
            if self.error is None:
                self._do(task)
            if self.error is None:
                future.set_result(None)
            else:
                future.set_exception(self.error)

    def _do(self, task: Task) -> None:
        try:
            if self.delay:
                self.delay("worker")
            task.work()
            if task.flag is not None:
                task.flag.release(task.value)
        except BaseException as error:
            self.error = HostError(f"host update of {task.names} failed: {error}\n{traceback.format_exc()}")
            self.error.__cause__ = error
            self.link.release_all()

    def close(self) -> None:
        """Finish what was submitted and end the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        self.kernel.close()


def available_cores() -> list[int]:
    """Cores this process may use: its affinity, cut to the cgroup's quota and shared among the ranks of this machine."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = cores[: max(1, int(quota) // int(period))]
    except (OSError, ValueError):
        pass
    ranks, rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    share = max(1, len(cores) // max(1, ranks))
    return cores[rank * share : (rank + 1) * share] or cores[-1:]


def host_cores(config: ZenFlowConfig, on_gpu: bool) -> tuple[int, list[int] | None]:
    """Threads of the host kernel, and the cores to pin them to (None: not pinned).

    With a GPU the training thread and the data loader keep two cores. Without one, training itself computes on the cores,
    and the host kernel takes half of them.
    """
    cores = available_cores()
    share = max(1, len(cores) - 2 if on_gpu else len(cores) // 2)
    threads = share if config.host_threads == "auto" else config.host_threads
    pin = on_gpu if config.pin_host_threads == "auto" else config.pin_host_threads
    if config.pin_host_threads is True and threads > len(cores):
        raise ValueError(
            f"{threads} host threads cannot be pinned to the {len(cores)} cores this process may use; use fewer threads"
        )
    return threads, cores[-threads:] if pin and len(cores) >= threads else None
