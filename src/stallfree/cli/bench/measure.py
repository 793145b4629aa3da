"""One mode in this process: what it takes to build, and the times of its steps."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from stallfree.cli.bench.modes import FLOOR, Mode, Training, WithStallfree, build_training
from stallfree.cli.bench.records import Footprint, Round
from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.bench.shapes import build_model, random_batch
from stallfree.cli.bench.trace import record_trace

LEAD_IN = 3  # steps before the clock starts: at both ends of a round as much host work is on its way, with staggered closes
REHEARSAL = 2  # steps after which libraries and kernels are loaded


class LocalRunner:
    """A mode's model and optimizer, built, stepped and given up again."""

    def __init__(self, mode: Mode, config: Any, settings: BenchSettings, *, with_children: bool = False) -> None:
        """config: of the model. with_children: processes that this one started belong to the mode."""
        self.with_children = with_children
        self.mode, self.config, self.settings = mode, config, settings
        self.on_gpu = settings.device == "cuda"
        self.training: Training | None = None

    def build(self, warm_up: int | None = None) -> Footprint:
        """Model, optimizer and warm-up."""
        host, machine, device = self._host(), psutil.virtual_memory().available, self._allocated()
        self._reset_peak()
        self.training, parameters = self._prepare()
        for _ in range(self.settings.warm_up if warm_up is None else warm_up):
            self.training.step()
        self._synchronize()
        self.resting = self._allocated() - device
        return Footprint(
            parameters=parameters,
            host_bytes=self._host() - host,
            machine_bytes=machine - psutil.virtual_memory().available,
            device_peak_bytes=torch.cuda.max_memory_allocated() - device if self.on_gpu else None,
            warming_up=self.training.warming_up,
        )

    def _prepare(self) -> tuple[Training, int]:
        """The mode, and how many parameters this process holds of its model."""
        model = build_model(self.config, self.settings, self.settings.device)
        ids = random_batch(self.config, self.settings)
        parameters = sum(param.numel() for param in model.parameters())
        return build_training(self.mode, model, ids, self.settings), parameters

    def round(self) -> Round:
        """Some measured steps."""
        training, steps = self.training, self.settings.steps
        assert training is not None
        host, reserved = self._host(), torch.cuda.memory_reserved() if self.on_gpu else 0
        others = self._allocated() - self.resting
        self._reset_peak()
        for _ in range(LEAD_IN):
            training.step()
        before = training.totals()
        seconds, step_ms = self._timed(training.step, steps)
        counted = {name: value - before[name] for name, value in training.totals().items()}
        self._synchronize()  # other modes have the machine to themselves
        self.resting = self._allocated() - others
        return Round(
            seconds=seconds,
            step_ms=step_ms,
            counted=counted,
            chosen=training.chosen(),
            host_bytes=self._host() - host,
            device_peak_bytes=torch.cuda.max_memory_allocated() - others if self.on_gpu else None,
            device_bytes=torch.cuda.memory_reserved() - reserved if self.on_gpu else None,
        )

    def trace(self, path: Path) -> None:
        """Record one window of a Stallfree mode, and a step more at least."""
        assert isinstance(self.training, WithStallfree)
        optimizer = self.training.optimizer
        steps = max(4, optimizer.metrics()["interval"] + 1)
        record_trace(path, self.training.step, steps, optimizer, on_gpu=self.on_gpu)

    def close(self) -> None:
        """Give all memory back."""
        if self.training is not None:
            self.training.close()
        self.training = None
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _timed(self, step: Callable[[], None], steps: int) -> tuple[float, list[float]]:
        """(seconds of all steps, ms of each), from the end of one step's computation to the end of another's.

        Only there anybody waits for the device, and not for what runs beside computation: it goes on at both ends. Single steps
        are timed by events.
        """
        if not self.on_gpu:
            marks = [time.perf_counter()]
            for _ in range(steps):
                step()
                marks.append(time.perf_counter())
            return marks[-1] - marks[0], [1e3 * (end - start) for start, end in pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        events[0].synchronize()
        start = time.perf_counter()
        for event in events[1:]:
            step()
            event.record()
        events[-1].synchronize()
        return time.perf_counter() - start, [first.elapsed_time(second) for first, second in pairwise(events)]

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _host(self) -> int:
        return host_bytes(children=self.with_children)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def _reset_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()


def rehearse(config: Any, settings: BenchSettings) -> Footprint:
    """The floor, built and given up: afterwards no mode's memory or time has a library's first use in it."""
    runner = LocalRunner(Mode(FLOOR, FLOOR), config, settings)
    try:
        return runner.build(REHEARSAL)
    finally:
        runner.close()


def host_bytes(*, children: bool) -> int:
    """Resident memory of this process, and what its children have for themselves."""
    process = psutil.Process()
    own: int = process.memory_info().rss
    for child in process.children(recursive=True) if children else ():
        with contextlib.suppress(psutil.Error):  # it has ended
            own += child.memory_full_info().uss
    return own
