"""A rank that dies takes the others along, soon and with a message, and leaves the last checkpoint whole."""

import multiprocessing
import os
import signal
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from nets import PRESETS, Run, equal, near, weights
from ranks import DEVICE
from test_checkpoints import load, save
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="what gloo does; with NCCL the others wait for the group's timeout")

PROCESSES = multiprocessing.get_context("forkserver")  # has imported what takes long
PROCESSES.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "stallfree"])
WHERE = {"backward": "run_backward", "step": "all_reduce", "save": "gather_object"}  # rank 1 dies, and the others notice
SETTINGS = PRESETS["deferred"]  # the same weights on any number of ranks


def trains(rank, directory, where):
    """Until rank 1 is killed in its tenth call, or in the save before. Why the others end, they write down."""
    torch.set_num_threads(1)
    rendezvous = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=3, timeout=timedelta(seconds=40))
    run = Run.of("sharded", SETTINGS)
    run.play(6)
    run.optimizer.flush()
    save(run, directory / "whole")
    run.play(9)
    if rank == 1 and where == "backward":  # one layer's gradients are there: the others wait for the next one's
        dict(run.model.named_parameters())["layers.2.gate"].register_post_accumulate_grad_hook(die)
    if rank == 1 and where == "save":  # its file is written: nobody hears of it
        write = FileSystemWriter.write_data
        FileSystemWriter.write_data = lambda *args: die(write(*args).wait())
    try:
        if where == "save":
            run.optimizer.flush()
            save(run, directory / "torn")
        run.backward()
        if rank == 1:
            die()
        run.step()
    except BaseException:
        (directory / f"{rank}.txt").write_text(traceback.format_exc())
        raise


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def goes_on(rank, directory):
    """From what is whole. What is torn is refused, and changes nothing."""
    run = Run.of("sharded", SETTINGS)
    if (directory / "torn").exists():
        before = weights(run.model)
        with pytest.raises(CheckpointException, match="metadata"):
            load(run, directory / "torn")
        equal([weights(run.model)], [before])
    load(run, directory / "whole")
    run.call = run.optimizer.metrics()["call"]
    seen = [weights(run.model), *run.play(9)]
    run.optimizer.close()
    return seen


def undisturbed():
    run = Run.of("plain", SETTINGS)
    run.play(6)
    seen = [run.flushed(), *run.play(9)]
    run.optimizer.close()
    return seen


@pytest.mark.parametrize("where", WHERE)
def test_when_a_rank_is_killed_the_others_fail_and_the_checkpoint_is_whole(two, tmp_path, where):
    ranks = [PROCESSES.Process(target=trains, args=(rank, tmp_path, where)) for rank in range(3)]
    for process in ranks:
        process.start()
    try:
        ranks[1].join(120)
        start = time.monotonic()
        for rank in (0, 2):
            ranks[rank].join(60 - (time.monotonic() - start))
            assert ranks[rank].exitcode == 1
            message = (tmp_path / f"{rank}.txt").read_text()
            assert "onnection" in message or "imed out" in message, message
            assert WHERE[where] in message
    finally:
        for process in ranks:
            process.kill()
    assert ranks[1].exitcode == -signal.SIGKILL
    assert (tmp_path / "torn").exists() == (where == "save")
    for seen in two.run(goes_on, tmp_path):
        near(seen, undisturbed())
