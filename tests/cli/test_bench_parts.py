"""What a measurement asks beforehand, and what it records afterwards: which modes fit at once, and the trace of some steps."""

import itertools
import json
import os
import shutil
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

from stallfree import channel_dims, planner
from stallfree.cli.bench import fit, trace
from stallfree.cli.bench.environment import commit_of
from stallfree.cli.bench.modes import parse_mode
from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.bench.shapes import build_model, model_config
from stallfree.cli.bench.trace import CLOCK, CLOCK_MARKS, HOST, record_trace
from stallfree.limits import GIB


def test_what_fits_at_once():
    room = fit.Room(device=100 * GIB, host=100 * GIB)
    local, peer = fit.Need(10 * GIB, 40 * GIB, False), fit.Need(10 * GIB, 0, True)
    assert fit.together([local, local], 70 * GIB, room)
    assert not fit.together([local, local], 71 * GIB, room)
    assert not fit.together([local, local, local], 0, room)  # host
    assert fit.together([local, peer], 33 * GIB, room)  # a step's memory twice, and the process
    assert not fit.together([local, peer], 34 * GIB, room)
    assert not fit.together([local], 0, fit.Room(None, 55 * GIB))
    assert fit.why_too_large(local, 90 * GIB, room) == ""
    assert fit.why_too_large(local, 91 * GIB, room).startswith("needs about 101.0 GiB of GPU memory, 100.0 GiB are free")
    assert "of host memory" in fit.why_too_large(local, 0, fit.Room(100 * GIB, 39 * GIB))


def test_a_mode_s_needs_are_the_planner_s():
    settings = BenchSettings.model_validate({"model": "1.5b"})
    model = build_model(model_config(settings), settings, "meta")
    count = sum(param.numel() for param in model.parameters())
    assert fit.needs(parse_mode("floor"), model, "cuda") == fit.Need(2 * count, 0, False)
    assert fit.needs(parse_mode("adamw"), model, "cuda").device == 6 * count
    mode = parse_mode("stallfree:moments_dtype=bfloat16,max_update_interval=8")  # else it depends on the machine
    plan = planner.plan(list(model.named_parameters()), mode.config.replace(channel_dim=channel_dims(model)), "cuda")
    assert plan.device_staging > 512 << 20
    assert fit.needs(mode, model, "cuda") == fit.Need(2 * count + plan.device_state + plan.device_staging, plan.host, False)
    assert fit.needs(parse_mode("deepspeed-zenflow"), model, "cuda") == fit.Need(2 * count, 50 * count, True)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_trace_has_a_track_of_the_host(interrupted, tmp_path, monkeypatch):
    spans = []
    readings = itertools.count()

    def clock():  # interrupted: 5 ms pass between the first reading and the event that it marks
        return time.monotonic_ns() - 5_000_000 * (next(readings) == 0 and interrupted)

    monkeypatch.setattr(trace, "time", SimpleNamespace(monotonic_ns=clock))

    def step():
        begin = time.monotonic_ns()
        torch.ones(64, 64) @ torch.ones(64, 64)
        time.sleep(0.002)
        spans.append((len(spans), begin - 500_000, begin, time.monotonic_ns()))

    spans.append((0, 0, 1, 2))  # long before: left out
    worker = SimpleNamespace(history=lambda: list(spans))
    record_trace(tmp_path / "t.json", step, 3, SimpleNamespace(engine=SimpleNamespace(worker=worker)), on_gpu=False)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    host = [event for event in events if event.get("cat") == HOST]
    assert [event["name"] for event in host] == [f"{ticket}, ready 0.50 ms before" for ticket in (1, 2, 3)]
    steps = [event for event in events if event.get("name") == "step" and event.get("cat") == "user_annotation"]
    assert len(steps) == 3
    for own, around in zip(host, sorted(steps, key=lambda event: event["ts"]), strict=True):
        assert own["pid"] == HOST
        assert own["dur"] >= 2000  # microseconds
        assert around["ts"] - 200 <= own["ts"] <= own["ts"] + own["dur"] <= around["ts"] + around["dur"] + 200
    assert sum(event.get("name") == CLOCK for event in events) == CLOCK_MARKS


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_commit_is_that_of_the_tree_that_a_file_is_tracked_in(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # of a hook that runs this
        monkeypatch.delenv(name)

    def git(*words):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *settings, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    file, other = tmp_path / "tracked.py", tmp_path / "other.py"
    for path in (file, other):
        path.write_text("a = 1\n")
    assert commit_of(file) is None
    git("init")
    git("add", "tracked.py")
    git("commit", "-m", "first")
    assert commit_of(file) == git("rev-parse", "--short", "HEAD")
    assert commit_of(other) is None
    file.write_text("a = 2\n")
    assert commit_of(file) == git("rev-parse", "--short", "HEAD") + "-dirty"
