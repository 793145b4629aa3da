"""Processes that run functions together, as ranks of one group: started once, used by many tests.

With gloo on the CPU, or, with STALLFREE_RANKS_ON=cuda, with NCCL and no other backend, one rank per GPU.
"""

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

LONGEST = 120  # seconds that a function may take
AFTER_A_FAILURE = 10  # that the other ranks have left
DEVICE = os.environ.get("STALLFREE_RANKS_ON", "cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
assert DEVICE in BACKENDS, f"STALLFREE_RANKS_ON={DEVICE}: choose one of {', '.join(BACKENDS)}"
MOST = torch.cuda.device_count() if DEVICE == "cuda" else 4  # ranks of a group here


class Ranks:
    """`run(function, ...)` calls it on every rank, as `function(rank, ...)`; the answers come back in the ranks' order, tensors
    in host memory. After a failure ranks may be out of step: the next run starts new ones."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._start()

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, f"file://{self._directory.name}/rendezvous", theirs)
            self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def run(self, function: Callable, *args: Any) -> list[Any]:
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers, failed = {}, {}
        while waiting := [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers and rank not in failed]:
            ready = connection.wait(waiting, AFTER_A_FAILURE if failed else LONGEST)
            for pipe in ready or waiting:
                rank = self._pipes.index(pipe)
                try:
                    done, answer = pipe.recv() if ready else (False, "does not answer")
                except EOFError:
                    done, answer = False, "ended"
                (answers if done else failed)[rank] = answer
        if failed:
            self.close(kill=True)
        assert not failed, "\n".join(f"rank {rank}: {reason}" for rank, reason in failed.items())
        return [answers[rank] for rank in range(self.world)]

    def close(self, kill: bool = False) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._pipes, self._processes = [], []
        self._directory.cleanup()


def on_host(answer: Any) -> Any:
    """A function's answer with its tensors in host memory, where they are compared across ranks."""
    if isinstance(answer, Tensor):
        return answer.cpu()
    if isinstance(answer, dict):
        return {key: on_host(item) for key, item in answer.items()}
    if isinstance(answer, (list, tuple)):
        return type(answer)(on_host(item) for item in answer)
    return answer


def _serve(rank: int, world: int, rendezvous: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    options = dict(init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=LONGEST / 2))
    if DEVICE == "cuda":
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}  # each pins threads to its own cores
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(BACKENDS[DEVICE], **options)
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            pipe.send((True, on_host(function(rank, *args))))
        except BaseException:
            pipe.send((False, "\n" + traceback.format_exc()))
    dist.destroy_process_group()
