"""A rank that dies takes the others along, soon and with a message, and leaves the last checkpoint whole."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nets import PRESETS, Run
from ranks import DEVICE
from test_checkpoints import load

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="what gloo does; with NCCL the others wait for the group's timeout")

PROGRAM = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from nets import PRESETS, Run
from test_checkpoints import save

rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=3, timeout=timedelta(seconds=40)
)
run = Run.of("sharded", PRESETS["stallfree"])
run.play(6)
run.optimizer.flush()
save(run, directory / "checkpoint")
run.play(9)
if rank == 1:
    if sys.argv[2] == "step":
        run.backward()  # the others wait for it in step()
    os.kill(os.getpid(), signal.SIGKILL)
run.play(12)
"""


def begin(rank: int, directory: Path, where: str) -> subprocess.Popen:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "RANK": str(rank), "WORLD_SIZE": "3"}
    command = [sys.executable, "-c", PROGRAM, str(directory), where]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def continues(rank, directory):
    run = Run.of("sharded", PRESETS["stallfree"])
    load(run, directory)
    assert run.optimizer.metrics()["call"] == 6
    run.play(3)
    run.optimizer.close()


def test_when_a_rank_is_killed_the_others_fail_and_the_checkpoint_is_whole(two, tmp_path):
    ranks = [begin(rank, tmp_path, "step") for rank in range(3)]
    ranks[1].wait(120)
    start = time.monotonic()
    try:
        for rank in (0, 2):
            _, message = ranks[rank].communicate(timeout=60 - (time.monotonic() - start))
            assert ranks[rank].returncode not in (0, None)
            assert "Error" in message
            assert "onnection" in message or "imed out" in message, message
    finally:
        for process in ranks:
            process.kill()
    two.run(continues, tmp_path / "checkpoint")
