"""A Chrome trace of some steps, with what the host did beside them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Span = tuple[str, int, int]  # name, begin and end by time.monotonic_ns()

CLOCK = "stallfree: clock"  # events whose times are known by both clocks
CLOCK_MARKS = 16  # the tightest counts: a thread may be interrupted between two readings
HOST = "host"


def record_trace(path: Path, step: Callable[[], None], steps: int, optimizer: Any, *, on_gpu: bool) -> None:
    """Profile `steps` calls of `step` and write them to `path`, a .json file for chrome://tracing or ui.perfetto.dev."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        marks = [_mark_clock() for _ in range(CLOCK_MARKS)]
        for _ in range(steps):
            with record_function("step"):
                step()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    add_host_track(path, [span for span in host_spans(optimizer) if span[2] >= marks[0][0]], marks)


def _mark_clock() -> tuple[int, int]:
    """Record an event `CLOCK`; returns the readings of time.monotonic_ns() around it."""
    before = time.monotonic_ns()
    with record_function(CLOCK):
        pass
    return before, time.monotonic_ns()


def host_spans(optimizer: Any) -> list[Span]:
    """What the optimizer's worker remembers of its work."""
    return [
        (f"{ticket}, ready {(begin - gates_open) / 1e6:.2f} ms before", begin, end)
        for ticket, gates_open, begin, end in optimizer.engine.worker.history()
    ]


def add_host_track(path: Path, spans: Sequence[Span], marks: Sequence[tuple[int, int]]) -> None:
    """Add a process "host" to a trace that torch wrote. `marks`: what time.monotonic_ns() read around its events `CLOCK`."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = trace["traceEvents"]
    clocks = [event for event in events if event.get("name") == CLOCK and event.get("cat") == "user_annotation"]
    clocks.sort(key=lambda event: event["ts"])
    offset = _clock_offset([event["ts"] + event["dur"] / 2 for event in clocks], marks)
    place = {"pid": HOST, "tid": "updates"}
    events.append({"ph": "M", "name": "process_name", **place, "args": {"name": HOST}})
    events += [
        {"ph": "X", "cat": HOST, "name": name, "ts": offset + begin / 1e3, "dur": (end - begin) / 1e3, **place}
        for name, begin, end in spans
    ]
    path.write_text(json.dumps(trace), encoding="utf-8")


def _clock_offset(middles: Sequence[float], marks: Sequence[tuple[int, int]]) -> float:
    """What to add to time.monotonic_ns(), in microseconds, for the time of the trace."""
    _, middle, (before, after) = min(
        (after - before, middle, (before, after)) for middle, (before, after) in zip(middles, marks, strict=True)
    )
    return middle - (before + after) / 2e3
