"""state_dict: complete, harmless to save, and a resumed run is bit-identical to one that was never interrupted."""

import copy
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from histories import Call, History, Player, assert_identical, backward, histories, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stallfree import ZenFlowAdamW, ZenFlowConfig

FEWER = settings(max_examples=max(4, settings().max_examples // 2))
BAD = Call(bad=(0, float("inf")))


def saved(player: Player) -> bytes:
    """A checkpoint as users write it: weights and optimizer."""
    file = io.BytesIO()
    torch.save(dict(weights=player.weights(), optimizer=player.optimizer.state_dict()), file)
    return file.getvalue()


def resumed(checkpoint: bytes, history: History, t: int, device, *, model_first: bool = True, **overrides) -> Player:
    """A fresh player, as a new process would build it, at call t of the history; its own weights are nonsense at first."""
    loaded = torch.load(io.BytesIO(checkpoint), weights_only=True)
    player = Player(dataclasses.replace(history, seed=history.seed + 1), device, **overrides)
    player.history, player.t = history, t

    def load_model() -> None:
        with torch.no_grad():
            for p, w in zip(player.params, loaded["weights"], strict=True):
                p.copy_(w)

    if model_first:
        load_model()
    player.optimizer.load_state_dict(loaded["optimizer"])
    if not model_first:
        load_model()
    return player


def finish(player: Player) -> list[list[torch.Tensor]]:
    rest = [player.weights(), *player.play(), player.flushed()]
    player.close()
    return rest


CASES = {
    # S=4 staggered, lag 1: in every second checkpoint some window is open, another replayed and not yet published.
    "stallfree": dict(topk_ratio=0.25, update_interval=4, lag=1, full_warm_up_rounds=3, select_interval=5),
    "automatic warm-up": dict(topk_ratio=0.25, update_interval=3, lag=2, full_warm_up_rounds="auto", select_interval=4),
    "zenflow": dict(preset="zenflow", topk_ratio=0.25, full_warm_up_rounds=2, select_interval=4),
    "zero-offload-dpu": dict(preset="zero-offload-dpu", full_warm_up_rounds=0),
    "stronghold": dict(preset="stronghold", full_warm_up_rounds=0),
    "device": dict(preset="device"),
    "bf16 moments": dict(
        topk_ratio=0.25, update_interval=3, full_warm_up_rounds=2, select_interval=3, moments_dtype="bfloat16"
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resumed_at_any_call_a_run_is_bit_identical(device, case, dtype):
    """At every call: in the warm-up, mid-window, at a reselection, after a skipped call, with slots and windows in flight."""
    config = ZenFlowConfig(min_numel=0, block_numel=50, **CASES[case])
    skip = () if case == "stronghold" else (BAD,)
    rising = (Call(lr_factor=0.25), Call(lr_factor=0.5), Call(lr_factor=0.75), Call(), Call())
    calls = (*rising, *skip, Call(missing=frozenset([1])), Call(lr_factor=0.5), *skip, Call(), Call(), Call(), Call())
    history = History(
        shapes=((6, 8), (5,), (8, 6), (3, 4, 2)), calls=calls, config=config, dtypes=(dtype,) * 4, groups=(0, 1, 1, 0)
    )
    expected = run(history, device)
    player = Player(history, device)
    for t in range(1, len(calls)):
        player.step()
        assert_identical(finish(resumed(saved(player), history, t, device)), expected[t - 1 :], f"resumed after call {t}")
    assert_identical([*player.play(), player.flushed()], expected[-2:], "the run that was saved from")
    player.close()


@given(history=histories(dtypes=("fp32", "bf16")), rule=st.sampled_from(["replay", "mean"]), data=st.data())
def test_any_run_resumed_anywhere_is_bit_identical(device, history, rule, data):
    history = dataclasses.replace(history, config=history.config.replace(rule=rule))
    t = data.draw(st.integers(0, len(history.calls)))
    expected, player = run(history, device), Player(history, device)
    player.play(t)
    again = resumed(saved(player), history, t, device)
    player.close()
    assert_identical(finish(again)[1:], expected[t:], f"resumed after call {t}")


def simple(t: int = 7) -> History:
    return History(
        shapes=((6, 8), (5,), (8, 6)),
        calls=(Call(),) * (2 * t),
        config=ZenFlowConfig(min_numel=0, block_numel=50, **CASES["stallfree"]),
    )


def test_weights_loaded_after_the_optimizer_do_not_disturb_it(device):
    """The order of the two loads does not matter: what is written equals what the state says is there."""
    history, player = simple(), None
    expected, player = run(history, device), Player(history, device)
    player.play(7)
    assert_identical(finish(resumed(saved(player), history, 7, device, model_first=False)), expected[6:])
    player.close()


def test_the_state_brings_its_weights(device):
    """Published weights are part of the state: loading the optimizer alone restores the parameters too."""
    history = simple()
    player = Player(history, device)
    player.play(7)
    other = Player(dataclasses.replace(history, seed=9), device)
    other.optimizer.load_state_dict(copy.deepcopy(player.optimizer.state_dict()))
    assert_identical([other.weights()], [player.weights()])
    assert_identical([other.flushed()], [player.flushed()])


@pytest.mark.parametrize("case", CASES)
def test_in_inference_mode_a_state_can_be_loaded_and_trained_on(device, case):
    """As in an evaluation that goes back to the best state so far."""
    history = dataclasses.replace(simple(), config=ZenFlowConfig(min_numel=0, block_numel=50, **CASES[case]))
    expected, player = run(history, device), Player(history, device)
    player.play(7)
    checkpoint = saved(player)
    player.play(2)
    with torch.inference_mode():
        player.optimizer.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=True)["optimizer"])
    player.t = 7
    assert_identical(finish(player), expected[6:])


@given(history=histories(dtypes=("fp32", "bf16"), most_calls=12))
@FEWER
def test_saving_at_every_call_changes_nothing(device, history):
    player, seen = Player(history, device), []
    while player.t < len(history.calls):
        player.set_lr()
        player.before()
        player.backward()
        player.optimizer.state_dict()  # between backward and step, too
        player.clip()
        player.optimizer.step()
        player.optimizer.state_dict()
        player.optimizer.zero_grad()
        player.t += 1
        seen.append(player.weights())
    seen.append(player.flushed())
    player.close()
    assert_identical(seen, run(history, device))


def flat(value, path="") -> dict:
    """Leaves of nested containers by path, tensors as (dtype, values)."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}/{i}").items()}
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, value.shape, value.cpu().reshape(-1).view(torch.uint8).tolist() if value.numel() else [])}
    return {path: value}


def test_saving_what_was_loaded_gives_the_same_state(device):
    history = simple()
    player = Player(history, device)
    player.play(6)
    other = resumed(saved(player), history, 6, device)
    assert flat(other.optimizer.state_dict()) == flat(player.optimizer.state_dict())


def test_state_has_the_form_of_torch_optimizers(device):
    """`state` by parameter number, `param_groups` with numbers, settings and names."""
    history = simple()
    player = Player(history, device)
    player.play(6)
    state = player.optimizer.state_dict()
    reference = torch.optim.AdamW(history.param_groups(player.params)).state_dict()
    assert set(state["state"]) == {0, 1, 2}
    for ours, theirs in zip(state["param_groups"], reference["param_groups"], strict=True):
        assert ours["params"] == theirs["params"]
        assert {k: ours[k] for k in ("lr", "betas", "eps", "weight_decay")} == {
            k: theirs[k] for k in ("lr", "betas", "eps", "weight_decay")
        }


def test_groups_settings_are_restored(device):
    """As torch's optimizers do: lr and the rest come from the checkpoint."""
    p, q = (nn.Parameter(torch.ones(4, 6, device=device)) for _ in range(2))
    first = ZenFlowAdamW([dict(params=[p], lr=0.5, betas=(0.7, 0.8), initial_lr=2.0)], min_numel=0)
    other = ZenFlowAdamW([q], lr=0.1, min_numel=0)
    other.load_state_dict(first.state_dict())
    (group,) = other.param_groups
    assert (group["lr"], tuple(group["betas"]), group["initial_lr"]) == (0.5, (0.7, 0.8), 2.0)
    assert group["params"][0] is q


def test_masters_are_in_the_state_exactly(device):
    """bf16 weights lose what the masters keep: a resumed run must not start from rounded weights."""
    config = ZenFlowConfig(preset="zero-offload", full_warm_up_rounds=0, min_numel=0)
    history = History(shapes=((6, 8),), calls=(Call(lr_factor=1e-3),) * 40, config=config, dtypes=("bf16",))
    expected, player = run(history, device), Player(history, device)
    player.play(20)
    assert_identical(finish(resumed(saved(player), history, 20, device))[1:], expected[20:])


def test_pending_gradients_are_not_saved_as_in_torch(device):
    """A checkpoint between backward and step resumes before the backward pass."""
    history = simple()
    expected, player = run(history, device), Player(history, device)
    player.play(6)
    player.backward()
    assert_identical(finish(resumed(saved(player), history, 6, device))[1:], expected[6:])


def test_a_new_process_continues_bit_identically(tmp_path):
    history, t = simple(), 6
    expected, player = run(history), Player(history)
    player.play(t)
    (tmp_path / "checkpoint").write_bytes(saved(player))
    program = f"""
import torch
from test_state import finish, resumed, simple
rest = finish(resumed(open("checkpoint", "rb").read(), simple(), {t}, "cpu"))
torch.save(rest, "rest")
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | dict(PYTHONPATH=path), check=True)
    assert_identical(torch.load(tmp_path / "rest"), expected[t - 1 :])


# What does not fit


def refused(state, params, match, **config) -> None:
    """Loading fails with a clear message and leaves the optimizer as it was."""
    optimizer = ZenFlowAdamW(params, min_numel=0, full_warm_up_rounds=0, **config)
    before, weights = flat(optimizer.state_dict()), [p.detach().clone() for p in params]
    with pytest.raises((ValueError, RuntimeError), match=match):
        optimizer.load_state_dict(state)
    assert flat(optimizer.state_dict()) == before
    assert all(torch.equal(p.detach(), w) for p, w in zip(params, weights, strict=True))
    backward(params, [torch.ones_like(p) for p in params])
    optimizer.step()  # still works
    optimizer.close()


def ones(*shapes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


@pytest.fixture
def state():
    params = ones((4, 6), (6, 4))
    optimizer = ZenFlowAdamW(params, topk_ratio=0.5, update_interval=2, min_numel=0, full_warm_up_rounds=0)
    for _ in range(3):
        backward(params, [torch.ones_like(p) for p in params])
        optimizer.step()
        optimizer.zero_grad()
    yield copy.deepcopy(optimizer.state_dict())
    optimizer.close()


def test_a_state_of_another_model_is_refused(state):
    settings = dict(topk_ratio=0.5, update_interval=2)
    refused(state, ones((4, 6)), "param|group", **settings)
    refused(state, ones((4, 6), (6, 5)), "shape|size", **settings)


@pytest.mark.parametrize(
    "change",
    [
        dict(topk_ratio=0.25),
        dict(rule="mean"),
        dict(lag=3),
        dict(channel_dim=0),
        dict(moments_dtype="bfloat16"),
        dict(block_numel=1),
    ],
)
def test_a_state_of_another_configuration_is_refused_by_name(state, change):
    """What would change the run must be the same; `refused` also checks that nothing was half loaded."""
    refused(state, ones((4, 6), (6, 4)), next(iter(change)), **dict(topk_ratio=0.5, update_interval=2) | change)


def test_room_for_another_interval_is_refused_with_ways_that_work(state):
    wanted = dict(topk_ratio=0.5, update_interval=4)
    refused(
        state,
        ones((4, 6), (6, 4)),
        "give max_update_interval=2, and an update_interval up to that, or carry.*from_adamw",
        **wanted,
    )
    few = dict(update_interval=1, max_update_interval=2)
    optimizer = ZenFlowAdamW(ones((4, 6), (6, 4)), topk_ratio=0.5, min_numel=0, full_warm_up_rounds=0, **few)
    optimizer.load_state_dict(state)
    assert optimizer.metrics()["call"] == 3
    optimizer.close()


def test_settings_that_change_no_result_may_differ(device):
    history = simple()
    expected, player = run(history, device), Player(history, device)
    player.play(6)
    other = resumed(saved(player), history, 6, device, overlap_step=False, host_threads=1)
    assert_identical(finish(other)[1:], expected[6:])


def test_a_state_of_a_later_version_is_refused(state):
    def later(value):
        if isinstance(value, dict):
            return {k: v + 1000 if "version" in str(k) and isinstance(v, int) else later(v) for k, v in value.items()}
        return type(value)(map(later, value)) if isinstance(value, (list, tuple)) else value

    assert flat(later(state)) != flat(state), "the state names its version"
    refused(later(state), ones((4, 6), (6, 4)), "version", topk_ratio=0.5, update_interval=2)


def test_a_state_of_torch_adamw_is_refused(state):
    params = ones((4, 6), (6, 4))
    theirs = torch.optim.AdamW(params)
    backward(params, [torch.ones_like(p) for p in params])
    theirs.step()
    refused(
        theirs.state_dict(),
        ones((4, 6), (6, 4)),
        r"from_adamw_state\(optimizer, state_dict\) takes torch.optim.AdamW's",
        topk_ratio=0.5,
        update_interval=2,
    )
