"""The host half: the state of deferred channels in host memory, and the threads that replay windows beside training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import STATE, Weight
from stallfree.engine.calls import Mark
from stallfree.engine.cores import host_cores
from stallfree.engine.ledger import adopt_weights
from stallfree.engine.memory import host_memory
from stallfree.engine.pace import Pace
from stallfree.engine.streams import Point, Timeline
from stallfree.kernels import host_kernel, host_queue
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.queue import HostError, WindowTimes
from stallfree.kernels.replay import ReplayJob, SlotGradient
from stallfree.kernels.windows import HostWeight, WindowWork

MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HostState:
    """A weight's state, channel-major; rows of selected channels are room that the device half fills when state is saved."""

    def __init__(self, weight: Weight, config: ZenFlowConfig) -> None:
        self.weight, self.config = weight, config
        shape = (weight.channels, weight.length)
        moments = MOMENTS[config.moments_dtype]
        self.master, self.exp_avg, self.exp_avg_sq = (
            host_memory(weight.numel * dtype.itemsize).view(dtype).view(shape) for dtype in (torch.float32, moments, moments)
        )
        self.master.copy_(weight.rows_of(weight.shard))
        self.steps = torch.zeros(weight.channels, dtype=torch.int32, device="cpu")
        self.every = torch.arange(weight.channels, dtype=torch.int64, device="cpu")
        self.deferred = self.every[weight.selected_count :].clone()  # ascending; whose they are says the last hand-over
        self.kept = HostWeight(self.master, self.exp_avg, self.exp_avg_sq, self.steps, self.deferred, self.every, self._key)

    @property
    def _key(self) -> int:
        return (self.config.seed << 32 | self.weight.key) & (1 << 64) - 1

    def rows(self, divided: bool) -> Tensor:
        """The host's channels, before the first selection and after it."""
        return self.deferred if divided else self.every

    def scaled(self, hyper: Hyper) -> Hyper:
        """Settings as deferred channels have them."""
        return hyper._replace(lr=hyper.lr * self.config.deferred_lr_scale)

    def reset(self) -> None:
        """As at construction, from the weights as they are now."""
        self.master.copy_(self.weight.rows_of(self.weight.shard))
        for tensor in (self.exp_avg, self.exp_avg_sq, self.steps):
            tensor.zero_()

    def job(
        self, slots: Sequence[SlotGradient], divided: bool, lookahead: float, out: Tensor | None, commit: bool = True
    ) -> ReplayJob:
        return ReplayJob(
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            steps=self.steps,
            rows=self.rows(divided),
            slots=tuple(slots),
            rule=self.config.rule,
            lookahead=lookahead,
            out=out,
            commit=commit,
            key=self._key,
        )

    def read_weights(self) -> None:
        """Take the parameter, written from outside, as the new masters of all channels."""
        adopt_weights(self.master, self.weight.rows_of(self.weight.shard).to("cpu").contiguous())

    @property
    def flats(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in STATE)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats) + self.steps.nbytes


class HostWorker:
    """Runs host work in order: beside the training thread, or at once if `overlap_step` is off."""

    def __init__(self, config: ZenFlowConfig, timeline: Timeline, on_gpu: bool) -> None:
        threads, self.cores = host_cores(config, on_gpu)  # that the threads are bound to; None: to none
        self.timeline = timeline
        self.kernel = host_kernel(config.host_kernel, threads, self.cores, config.pin_host_threads)
        self.queue = host_queue(self.kernel, timeline.memory, config.overlap_step)
        self.pace = Pace(threads)

    def submit(self, works: Sequence[WindowWork]) -> list[Point]:
        """Do some windows, one after the other. Returns when each is done."""
        points = [Point(self.timeline, ticket) for ticket in self.queue.submit(works)]
        if points:
            self.timeline.value = points[-1].value
        return points

    def keep_pace(self, stalled: float, interval: int, held: bool) -> None:
        """After a call: work with as many threads as keep up, or with all of them if `held`. stalled: seconds so far."""
        threads = self.pace.threads
        mark = Mark(time.perf_counter(), self.busy_seconds, stalled)
        if self.pace.after_call(mark, interval, held) != threads:
            self.kernel.limit(self.pace.threads)

    @property
    def busy_seconds(self) -> float:
        """Of work on windows so far, the one that is under way included."""
        stats = self.queue.stats()
        return stats.busy_seconds + stats.running_seconds

    @property
    def threads(self) -> int:
        """That work now."""
        return self.pace.threads

    def wait(self, point: Point) -> None:
        """Raises `HostError` if the work or an earlier one failed."""
        self.queue.wait(point.value)

    def run(self, job: ReplayJob, name: str) -> None:
        """Do one job now, after whatever there is still to do."""
        self.queue.drain()
        try:
            self.kernel.replay(job)
        except Exception as error:
            raise HostError(f"host update of {name} failed: {error}") from error

    @property
    def error(self) -> HostError | None:
        """Of the first work that failed; none is begun after it."""
        return self.queue.error

    def finish(self) -> None:
        """Wait for what was submitted, unless something failed."""
        with suppress(HostError):
            self.queue.drain()

    def history(self) -> list[WindowTimes]:
        """When the last windows were worked on."""
        return self.queue.history()

    def close(self) -> None:
        """End the threads; what waits for the device still is given up. Idempotent."""
        self.queue.close()
        self.kernel.close()
