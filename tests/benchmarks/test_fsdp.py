"""The benchmark over ranks, in small."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = dict(model="tiny", device="cpu", batch=1, seq=16, rounds=2, steps=3, peer_steps=1, warm_up=4)
MODES = ["stallfree:update_interval=2", "cpu-offload"]


def test_two_ranks_measure_every_mode_beside_the_floor_and_count_what_they_send(tmp_path):
    output = tmp_path / "fsdp.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    command = [*torchrun, str(ROOT / "benchmarks" / "fsdp.py"), *settings, "--output", str(output), *MODES]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("round 2: ") == 3, "one voice"

    report = json.loads(output.read_text())
    assert report["environment"]["ranks"] == len(report["memory_by_rank"]) == 2
    assert str(tmp_path) not in output.read_text()
    floor, ours, peer = report["modes"]
    assert [mode["mode"] for mode in report["modes"]] == ["floor", *MODES]
    assert [mode["steps"] for mode in report["modes"]] == [6, 6, 2]
    assert floor["ratio"] == 1
    assert peer["floor_round_ms"] == ours["floor_round_ms"] == floor["round_ms"]
    assert ours["parameters"] == report["parameters"] / 2
    assert report["parameters"] == 361_600
    assert ours["all_gather_bytes"] == 2 * 361_600
    assert 0 < ours["all_reduce_bytes"] < 0.02 * ours["all_gather_bytes"]
    assert "all_reduce_bytes" not in peer
    assert 0 < ours["up_bytes_per_parameter"] < 2
