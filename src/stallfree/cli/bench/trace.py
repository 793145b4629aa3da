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

CLOCK = "stallfree: clock"  # an event whose time is known by both clocks
HOST = "host"


def record_trace(path: Path, step: Callable[[], None], steps: int, optimizer: Any, *, on_gpu: bool) -> None:
    """Profile `steps` calls of `step` and write them to `path`, a .json file for chrome://tracing or ui.perfetto.dev."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        start = time.monotonic_ns()
        with record_function(CLOCK):
            pass
        for _ in range(steps):
            with record_function("step"):
                step()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    add_host_track(path, [span for span in host_spans(optimizer) if span[2] >= start], start)


def host_spans(optimizer: Any) -> list[Span]:
    """What the optimizer's worker remembers of its work: none where it keeps no history."""
    history = getattr(optimizer.engine.worker, "history", None)
    if history is None:
        return []
    return [
        (f"{ticket}, ready {(begin - gates_open) / 1e6:.2f} ms before", begin, end)
        for ticket, gates_open, begin, end in history()
    ]


def add_host_track(path: Path, spans: Sequence[Span], start: int) -> None:
    """Add a process "host" to a trace that torch wrote. `start`: when its event `CLOCK` began, by time.monotonic_ns()."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = trace["traceEvents"]
    zero = next(event["ts"] for event in events if event.get("name") == CLOCK and event.get("cat") == "user_annotation")
    place = {"pid": HOST, "tid": "updates"}
    events.append({"ph": "M", "name": "process_name", **place, "args": {"name": HOST}})
    events += [
        {"ph": "X", "cat": HOST, "name": name, "ts": zero + (begin - start) / 1e3, "dur": (end - begin) / 1e3, **place}
        for name, begin, end in spans
    ]
    path.write_text(json.dumps(trace), encoding="utf-8")
