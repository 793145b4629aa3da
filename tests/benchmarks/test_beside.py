"""The floor beside a replaying host, in small."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import beside


def test_each_load_takes_its_turn_and_is_told(tmp_path, monkeypatch, capsys):
    options = "--model tiny --batch 1 --seq 16 --threads 1 --slots 2 --elements 65536 --rounds 2 --steps 2 --warm-up 1"
    monkeypatch.setattr("sys.argv", ["beside", *options.split(), "--output", str(tmp_path / "out.json")])
    beside.main()
    written = json.loads((tmp_path / "out.json").read_text())
    assert [entry["beside"] for entry in written["lines"]] == ["nothing", "memory", "cache"] * 2
    for entry in written["lines"]:
        assert entry["step_ms"] >= entry["forward_ms"] + entry["backward_ms"] > 0
        assert (entry["gradients_per_s"] > 0) == (entry["beside"] != "nothing")
    assert "mean step, by that beside nothing" in capsys.readouterr().out


def test_the_summary_divides_by_the_step_beside_nothing():
    steps = [("nothing", 0, 10.0), ("memory", 4, 13.0), ("nothing", 0, 10.0), ("memory", 4, 12.0)]
    lines = [{"beside": kind, "threads": threads, "step_ms": ms} for kind, threads, ms in steps]
    assert [row.split() for row in beside.summary(lines).splitlines()] == [["nothing", "0", "1.000"], ["memory", "4", "1.250"]]


def test_what_fits_into_a_cache_does():
    job = beside.job_of(beside.CACHED, 8)
    tensors = [job.master, job.exp_avg, job.exp_avg_sq, *(slot.grad for slot in job.slots)]
    assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(458_752)
