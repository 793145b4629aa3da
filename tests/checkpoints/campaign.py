"""Random histories with everything that may happen to a run, and processes that play one until they are killed."""

from __future__ import annotations

import dataclasses
import random
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from histories import Call, History, Player
from saved_runs import state_of
from torch import nn

from stallfree import CheckpointError, ZenFlowConfig, load_checkpoint, save_checkpoint

MOST_KILLS = 6
Outcome = tuple[str, str]  # digests of all state and weights: at the end, and after a flush


def random_history(choice: random.Random) -> History:
    """A few weights, settings of any kind, and calls: skipped ones, other rates, other S, flushes, missing gradients."""
    others = [(6, 8), (8, 6), (9, 3), (3, 4, 2), (5,), (2,)]
    shapes = ((7, 5), *(choice.choice(others) for _ in range(choice.randint(0, 4))))
    early = choice.random() < 0.1  # update_in_backward can neither skip nor clip
    settings = dict(preset="stronghold") if early else _settings(choice)
    config = ZenFlowConfig(
        **settings,
        min_numel=choice.choice([0, 0, 20]),
        block_numel=choice.choice([1, 50, 1000]),
        moments_dtype=choice.choice(["float32", "float32", "bfloat16"]),
        host_kernel=choice.choice(["auto", "auto", "torch"]),
        host_threads=1,
    )
    room = config.max_update_interval
    befores = ["flush", "exact", *(range(1, room + 1) if not early else ())]
    calls = tuple(_call(choice, len(shapes), befores, skips=not early) for _ in range(choice.randint(6, 28)))
    return History(
        shapes=shapes,
        calls=calls,
        config=config,
        dtypes=tuple(choice.choice(["bf16", "fp32", "fp16"]) for _ in shapes),
        groups=tuple(choice.randint(0, 1) for _ in shapes),
        seed=choice.randrange(1 << 16),
    )


def _settings(choice: random.Random) -> dict:
    return dict(
        topk_ratio=choice.choice([0.0, 0.1, 0.25, 0.25, 0.5]),
        update_interval=choice.choice([1, 2, 3, 4, 6]),
        max_update_interval=6,
        lag=choice.choice([0, 1, 1, 2, 3]),
        rule=choice.choice(["replay", "replay", "replay", "mean"]),
        stagger=choice.random() < 0.7,
        full_warm_up_rounds=choice.choice(["auto", 0, 1, 3]),
        select_interval=choice.choice([1, 2, 3, 5]),
        max_grad_norm=choice.choice([None, 1.0]),
        overlap_step=choice.random() < 0.8,
    )


def _call(choice: random.Random, params: int, befores: list, skips: bool) -> Call:
    bad = (choice.randrange(params), choice.choice([float("inf"), -float("inf"), float("nan")]))
    return Call(
        scale=choice.choice([0.01, 1.0, 1.0, 30.0]),
        lr_factor=choice.choice([0.0, 0.1, 0.5, 1.0, 1.0]),
        missing=frozenset([choice.randrange(params)]) if choice.random() < 0.15 else frozenset(),
        bad=bad if skips and choice.random() < 0.15 else None,
        before=choice.choice(befores) if choice.random() < 0.2 else None,
    )


def outcome(player: Player) -> Outcome:
    """Of a player at the end of its history, which is closed."""
    before = state_of(player)
    player.optimizer.flush()
    after = state_of(player)
    player.close()
    return before, after


def undisturbed(history: History) -> Outcome:
    player = Player(history)
    player.play()
    return outcome(player)


def save(player: Player, directory: Path) -> None:
    save_checkpoint(directory, player.optimizer, model=nn.ParameterList(player.params), extra={"t": player.t})


def resume(directory: Path, history: History) -> Player:
    """From the newest checkpoint, in a model that began with other weights; without one, from the beginning."""
    player = Player(dataclasses.replace(history, seed=history.seed + 1))
    try:
        player.t = load_checkpoint(directory, player.optimizer, model=nn.ParameterList(player.params))["t"]
    except CheckpointError:
        return Player(history)
    player.history = history
    return player


def disturb(player: Player, directory: Path, choice: random.Random) -> None:
    """A call, or something that is no part of the history."""
    event = choice.random()
    if event < 0.2:
        save(player, directory)
    elif event < 0.3:
        with player.optimizer.exact_weights():
            pass
    else:
        player.step()


def disturbed(history: History, directory: Path, choice: random.Random) -> tuple[Outcome, int]:
    """The same with saves, looks at exact weights, and kills: nothing is closed, and some that were dropped live on."""
    player, kills, undead = Player(history), 0, []
    while player.t < len(history.calls):
        disturb(player, directory, choice)
        if kills < MOST_KILLS and player.t < len(history.calls) and choice.random() < 0.12:
            kills += 1
            if choice.random() < 0.5:  # in the middle of a call
                player.set_lr()
                player.before()
                player.backward()
            if choice.random() < 0.3:
                undead.append(player)
            player = resume(directory, history)
    found = outcome(player)
    for other in undead:
        other.close()
    return found, kills


def play_in_process(directory: str, name: str, number: int, ready: Connection) -> None:
    """For a process that will be killed: resume, say so, go on to the end, and send what came of it."""
    torch.set_num_threads(1)
    history, choice = random_history(random.Random(name)), random.Random(f"{name} {number}")
    player = resume(Path(directory), history)
    ready.send(player.t)
    while player.t < len(history.calls):
        disturb(player, Path(directory), choice)
    ready.send(outcome(player))
