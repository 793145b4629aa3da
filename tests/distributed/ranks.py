"""Processes that run functions together, as ranks of a gloo group: started once, used by many tests."""

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LONGEST = 120  # seconds that a function may take


class Ranks:
    """`run(function, ...)` calls it on every rank, as `function(rank, ...)`; the answers come back in the ranks' order."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._directory = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, f"file://{self._directory.name}/rendezvous", theirs)
            self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self._processes[-1].start()
            self._pipes.append(ours)

    def run(self, function: Callable, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(LONGEST), f"rank {rank} does not answer"
            done, answer = pipe.recv()
            answers.append((rank, done, answer))
        failed = [f"rank {rank}:\n{answer}" for rank, done, answer in answers if not done]
        assert not failed, "\n".join(failed)
        return [answer for _, _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._directory.cleanup()


def _serve(rank: int, world: int, rendezvous: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=LONGEST / 2))
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
