"""A small run with everything in flight, its state at every call, and processes that save it until they are killed."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # slow, and otherwise imported at the first step of every process that is forked from one with this
from histories import Call, History, Player

from stallfree import ZenFlowConfig, load_checkpoint, save_checkpoint
from stallfree.checkpoints import CheckpointError

CALLS = 120
BAD = Call(bad=(0, float("inf")))
CYCLE = (Call(), Call(lr_factor=0.5), Call(missing=frozenset([1])), BAD, Call(), Call(scale=30.0), Call(before="flush"))


def small_history(calls: int = CALLS) -> History:
    """S=3 and lag 2 with reselections, skipped calls and missing gradients: at most calls something is under way."""
    config = ZenFlowConfig(
        min_numel=0,
        block_numel=50,
        topk_ratio=0.25,
        update_interval=3,
        lag=2,
        full_warm_up_rounds=3,
        select_interval=5,
        max_grad_norm=1.0,
        host_threads=1,
    )
    return History(
        shapes=((6, 8), (5,), (8, 6), (3, 4, 2)),
        calls=(CYCLE * (calls // len(CYCLE) + 1))[:calls],
        config=config,
        dtypes=("bf16", "fp32", "fp32", "bf16"),
        groups=(0, 1, 1, 0),
    )


def digest(value: Any) -> str:
    """Of a nested state, every bit of it."""
    found = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                found.update(repr(key).encode())
                take(item)
        elif isinstance(value, (list, tuple)):
            found.update(type(value).__name__.encode())
            for item in value:
                take(item)
        elif isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(bytes(value.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()) if value.numel() else b"")
        else:
            found.update(repr(value).encode())

    take(value)
    return found.hexdigest()


def state_of(player: Player) -> str:
    return digest((player.optimizer.state_dict(), player.weights()))


def saved(player: Player, directory: Path, **options: Any) -> Path:
    return save_checkpoint(directory, player.optimizer, extra={"t": player.t}, **options)


def resumed(directory: Path, history: History) -> Player:
    player = Player(history)
    player.t = load_checkpoint(directory, player.optimizer)["t"]
    return player


def save_for_ever(directory: str) -> None:
    """Resume if there is something, then train, and save after every call; for a process that will be killed."""
    torch.set_num_threads(1)
    history, path = small_history(), Path(directory)
    try:
        player = resumed(path, history)
    except CheckpointError:
        player = Player(history)
    while True:
        if player.t < CALLS:
            player.step()
        saved(player, path)


def save_and_die(directory: str, moment: int) -> None:
    """Resume, train one call and save, but die at the n-th time that something is done to a file; else exit with 0."""
    torch.set_num_threads(1)
    player = resumed(Path(directory), small_history())
    player.step()
    events = 0

    def count(event: str, arguments: tuple) -> None:
        nonlocal events
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "fcntl.flock"):
            events += 1
            if events == moment:
                os._exit(9)

    sys.addaudithook(count)
    saved(player, Path(directory))
    os._exit(0)


def names(directory):
    return sorted(path.name for path in directory.iterdir())
