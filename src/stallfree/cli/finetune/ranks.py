"""The processes that share a run: who this one is, what all of them agree on, and whose error is shown.

Agreement goes through host memory (gloo), never through a GPU: no launching thread waits for its device. One process without a
launcher is a rank too, of one, for which all of this is nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from stallfree.cli.errors import UsageError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
LAUNCHER = "STALLFREE_LAUNCHER"  # where `--nproc` started this one: a pipe that its process holds open
FAILURES = "stallfree/failures"  # counts them, in the store that the launcher holds
# That a rank may wait for the others; a launcher ends those that wait for a dead one long before.
LONGEST = timedelta(minutes=30)
PATIENCE = 1.0  # seconds that an error waits for one nearer to the cause
LEAVING = 15  # seconds after an error until the process is ended, whatever its libraries still wait for
EXIT_FAILED = 1

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ranks:
    """All calls but the properties are for all ranks, in the same order."""

    rank: int = 0
    world: int = 1
    sharded: bool = False  # whether a launcher started this: then the model is sharded, be it over one

    def __str__(self) -> str:
        return f"{self.world} rank{'s' if self.world > 1 else ''}"

    @property
    def first(self) -> bool:
        """Whether this rank speaks, and writes what is not sharded."""
        return self.rank == 0

    def same(self, value: Value) -> Value:
        """Rank 0's."""
        if not self.sharded:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def largest(self, number: int) -> int:
        return int(self._reduced([float(number)], dist.ReduceOp.MAX)[0]) if self.sharded else number

    def total(self, *numbers: float) -> list[float]:
        return self._reduced(list(numbers), dist.ReduceOp.SUM) if self.sharded else list(numbers)

    def wait(self) -> None:
        """Until all are here."""
        self.largest(0)

    def add_up(self, tensor: Tensor) -> None:
        """In place, on its device, which nobody waits for."""
        if self.sharded:
            dist.all_reduce(tensor)

    def _reduced(self, numbers: list[float], how: Any) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        dist.all_reduce(tensor, op=how)
        return tensor.tolist()


@contextmanager
def joined(*, silence: bool = True) -> Iterator[Ranks]:
    """The ranks, if a launcher started this process; until the context is left.

    Only rank 0 speaks: with `silence`, what libraries of other ranks print, also outside of Python, goes nowhere. Of all errors
    the first is shown, whichever rank it is on; other ranks leave without a word.

    Raises:
        UsageError: if a launcher's variables are incomplete, or ask for more than this command can do.
    """
    if not _launched():
        yield Ranks()
        return
    _end_with_launcher()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(iter(rendezvous("env://", rank, world, timeout=LONGEST)))
    spoken = os.dup(2)
    try:
        if rank and silence:
            _silence()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        group = PrefixStore("group", store)
        dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=LONGEST)
        yield Ranks(rank, world, sharded=True)
    except Exception as error:
        if isinstance(error, typer.Exit):  # an exit code
            dist.destroy_process_group()
            raise
        signal.alarm(LEAVING)
        shown = _shown(error, rank)
        # Rank 0 tells what all ranks say; who misses another rank waits for its reason.
        turn = (rank > 0) if shown is error else 2
        if not _is_first(store, turn * PATIENCE):
            raise typer.Exit(EXIT_FAILED) from None
        sys.stderr.flush()
        os.dup2(spoken, 2)
        raise shown from (None if shown is error else error)
    finally:
        os.close(spoken)
    dist.destroy_process_group()


def _launched() -> bool:
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(f"WORLD_SIZE is set, and {', '.join(missing)} not: start several ranks with --nproc N, or by torchrun")
    if not missing and os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        raise UsageError(
            "stallfree finetune runs on one machine, and this launcher has started ranks on several: start it on one, "
            "or use ZenFlowAdamW with fully_shard (examples/fsdp.py)"
        )
    return not missing


def _end_with_launcher() -> None:
    """However `--nproc`'s process ends, this one is asked to save and end too."""

    def watch(pipe: int) -> None:
        os.read(pipe, 1)  # nothing is ever written: this returns when nobody is left who could
        os.kill(os.getpid(), signal.SIGTERM)

    if pipe := os.environ.get(LAUNCHER):
        threading.Thread(target=watch, args=(int(pipe),), daemon=True, name="stallfree-launcher").start()


def _silence() -> None:
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _shown(error: Exception, rank: int) -> Exception:
    """The error as it is to be shown, which tells whether it is about another rank."""
    text = str(error)
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)):
        reason = " ".join(text.split())[:300]
        return UsageError(
            f"rank {rank} cannot reach the other ranks ({reason}); complete checkpoints stay: go on with --resume"
        )
    if isinstance(error, UsageError) and rank:
        error.args = (f"rank {rank}: {text}",)
    return error


def _is_first(store: Store, patience: float) -> bool:
    """Whether no other rank has failed before, nor does in the next moment."""
    time.sleep(patience)
    try:
        return bool(store.add(FAILURES, 1) == 1)
    except Exception:  # the launcher is gone
        return True
