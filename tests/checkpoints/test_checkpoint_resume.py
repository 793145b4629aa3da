"""Resuming through files, ours and those of torch.distributed.checkpoint, is bit-identical to no interruption."""

import dataclasses
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from histories import History, Player, assert_identical, histories, run
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_runs import saved, small_history
from test_state import CASES
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from stallfree import ZenFlowAdamW, ZenFlowConfig, load_checkpoint

FEWER = settings(max_examples=max(8, settings().max_examples // 4))
CALLS = 22


def history_of(case: str, dtype: str = "fp32") -> History:
    """With skipped calls and missing gradients, where the case can skip."""
    config = ZenFlowConfig(min_numel=0, block_numel=50, **CASES[case])
    calls = small_history(CALLS).calls
    if case == "stronghold":
        calls = tuple(dataclasses.replace(call, bad=None) for call in calls)
    return dataclasses.replace(small_history(CALLS), config=config, dtypes=(dtype,) * 4, calls=calls)


class Model(nn.Module):
    """A player's parameters with names, as torch.distributed.checkpoint wants them."""

    def __init__(self, player: Player) -> None:
        super().__init__()
        self.weights = nn.ParameterList(player.params)


def through_file(player: Player, fresh: Player, directory: Path) -> None:
    saved(player, directory)
    load_checkpoint(directory, fresh.optimizer)


def through_dcp(player: Player, fresh: Player, directory: Path) -> None:
    dcp.save({"optimizer": get_optimizer_state_dict(Model(player), player.optimizer)}, checkpoint_id=directory, no_dist=True)
    state = {"optimizer": get_optimizer_state_dict(Model(fresh), fresh.optimizer)}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    set_optimizer_state_dict(Model(fresh), fresh.optimizer, state["optimizer"])


def through_dcp_with_model(player: Player, fresh: Player, directory: Path) -> None:
    model, optimizer = get_state_dict(Model(player), player.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory, no_dist=True)
    model, optimizer = get_state_dict(Model(fresh), fresh.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    set_state_dict(Model(fresh), fresh.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def through_memory(player: Player, fresh: Player, directory: Path) -> None:
    """Without files, copied to the host as for asynchronous saving."""
    options = StateDictOptions(cpu_offload=True, full_state_dict=True)
    state = get_optimizer_state_dict(Model(player), player.optimizer, options=options)
    set_optimizer_state_dict(Model(fresh), fresh.optimizer, state)


WAYS = [through_file, through_dcp, through_dcp_with_model, through_memory]


def rest_of(player: Player) -> list:
    rest = [player.weights(), *player.play(), player.flushed()]
    player.close()
    return rest


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_resumed_at_any_call_a_run_is_bit_identical(device, tmp_path, case, way):
    """Mid-window, in the warm-up, at a reselection, after a skipped call, with slots and windows in flight; into an optimizer
    that has just been built, and now and then into one that has trained something else."""
    history = history_of(case)
    expected = run(history, device)
    player = Player(history, device)
    step = 1 if way is through_file else 3
    for t in range(1, CALLS):
        player.step()
        if t % step:
            continue
        fresh = Player(dataclasses.replace(history, seed=1), device)
        if t % 4 == 0:
            fresh.play(t % 7)
        way(player, fresh, tmp_path / str(t))
        fresh.history, fresh.t = history, t
        assert_identical(rest_of(fresh), expected[t - 1 :], f"resumed after call {t}")
    assert_identical([*player.play(), player.flushed()], expected[-2:], "the run that was saved from")
    player.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_has_not_begun_resumes(tmp_path, way):
    history = history_of("stallfree")
    player, fresh = Player(history), Player(history)
    way(player, fresh, tmp_path)
    player.close()
    assert_identical(rest_of(fresh)[1:], run(history))


@given(history=histories(dtypes=("fp32", "bf16")), rule=st.sampled_from(["replay", "mean"]), data=st.data())
@FEWER
def test_any_run_resumed_anywhere_is_bit_identical(device, tmp_path_factory, history, rule, data):
    history = dataclasses.replace(history, config=history.config.replace(rule=rule))
    t, way = data.draw(st.integers(0, len(history.calls))), data.draw(st.sampled_from(WAYS))
    expected, player = run(history, device), Player(history, device)
    player.play(t)
    fresh = Player(history, device)
    way(player, fresh, tmp_path_factory.mktemp("saved"))
    player.close()
    fresh.t = t
    assert_identical(rest_of(fresh)[1:], expected[t:], f"resumed after call {t}")


def test_with_a_slow_host_what_is_saved_is_the_same(tmp_path, seed):
    """Saving waits for work that is under way, and for nothing to be read before it is there."""
    history, times = history_of("stallfree"), random.Random(seed)
    expected, player = run(history), Player(history)
    player.optimizer.engine.delay = lambda place: times.uniform(0, 0.004)
    for t in range(1, CALLS, 3):
        player.play(t)
        fresh = Player(history)
        through_file(player, fresh, tmp_path)
        fresh.t = t
        assert_identical(rest_of(fresh), expected[t - 1 :], f"resumed after call {t}")
    player.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("calls", [0, 13])
def test_a_full_state_is_set_as_one_after_a_flush(dtype, calls):
    """With the option, torch takes apart what is in flight; without, as above, it is carried whole."""
    history = history_of("zero-offload-dpu", dtype)
    player, fresh = Player(history), Player(dataclasses.replace(history, seed=1))
    options = StateDictOptions(cpu_offload=True, full_state_dict=True)
    player.play(calls)
    player.flushed()
    state = get_optimizer_state_dict(Model(player), player.optimizer, options=options)
    if not calls:  # then there are no weights in it
        fresh.close()
        fresh = Player(history)
    set_optimizer_state_dict(Model(fresh), fresh.optimizer, state, options=options)
    fresh.history, fresh.t = history, calls
    assert_identical(rest_of(fresh), rest_of(player))


def test_a_new_process_continues_bit_identically(tmp_path):
    history, t = small_history(24), 16
    expected, player = run(history), Player(history)
    player.play(t)
    saved(player, tmp_path / "checkpoints")
    program = """
import torch
from pathlib import Path
from saved_runs import resumed, small_history
player = resumed(Path("checkpoints"), small_history(24))
torch.save([*player.play(), player.flushed()], "rest")
"""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent), *sys.path])
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | dict(PYTHONPATH=path), check=True)
    assert_identical(torch.load(tmp_path / "rest"), expected[t:])


# What torch.distributed.checkpoint asks of an optimizer


def test_reading_the_state_of_a_new_optimizer_takes_no_step():
    """Where there is no state yet, it makes one by a step with zero gradients; ours is there from construction on."""
    history = history_of("stallfree")
    player = Player(history)
    get_optimizer_state_dict(Model(player), player.optimizer)
    assert player.optimizer.metrics()["call"] == 0
    assert_identical([*player.play(), player.flushed()], run(history))
    player.close()


def test_the_same_names_and_shapes_are_there_from_construction_on():
    history = history_of("bf16 moments")
    player = Player(history)

    def form():
        return [
            {name: value.shape if isinstance(value, torch.Tensor) else type(value) for name, value in entry.items()}
            for entry in player.optimizer.state_dict()["state"].values()
        ]

    first = form()
    for entry in first:
        entry.pop("passes", None)
    for _ in history.calls:
        player.step()
        now = form()
        for entry in now:
            entry.pop("passes", None)  # None, then a number
        assert now == first
    player.close()


def test_state_is_parameter_shaped():
    player = Player(history_of("stallfree"))
    player.play(9)
    entries = player.optimizer.state_dict()["state"]
    params = [param for group in player.optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        for name in ("master", "exp_avg", "exp_avg_sq", "published"):
            assert name not in entries[number] or entries[number][name].shape == param.shape
    player.close()


def test_a_slot_in_a_file_does_not_bring_its_neighbours(tmp_path):
    """A block's slot is one memory; what one weight saves of it is its own part."""
    params = [(f"w{i}", nn.Parameter(torch.ones(64, 64))) for i in range(16)]
    optimizer = ZenFlowAdamW(params, update_interval=4, full_warm_up_rounds=0, min_numel=0, block_numel=1 << 20)
    for _ in range(3):
        sum(param.sum() for _, param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    (first, *_) = optimizer.state_dict()["state"].values()
    torch.save(first["slots"], tmp_path / "slots")
    grads = [slot["grad"] for slot in first["slots"]]
    assert grads
    assert (tmp_path / "slots").stat().st_size < sum(grad.nbytes for grad in grads) + 4096 * len(grads)
    optimizer.close()
