"""To torch.optim.AdamW and back: whoever goes on, on either side, gets the same weights up to fp32 rounding."""

import dataclasses

import pytest
import torch
from histories import Call, History, Player, assert_identical, assert_rounds_to, clipped, histories, run, synchronous, tolerance
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stallfree import ZenFlowAdamW, ZenFlowConfig, from_adamw_state, to_adamw_state

FEWER = settings(max_examples=max(10, settings().max_examples // 3))
SETTINGS = {
    "zero-offload": dict(preset="zero-offload"),
    "default": dict(),
    "long windows": dict(topk_ratio=0.25, update_interval=4, lag=2, full_warm_up_rounds=2, select_interval=5),
    "device": dict(preset="device"),
    "stronghold": dict(preset="stronghold"),
}


def history_of(name: str, dtype: str = "fp32", calls: int = 24) -> History:
    config = ZenFlowConfig(min_numel=0, block_numel=50, **SETTINGS[name])
    cycle = (Call(), Call(lr_factor=0.5), Call(missing=frozenset([1])), Call(lr_factor=0.1))
    return History(
        shapes=((6, 8), (5,), (8, 6), (3, 4, 2), (), (2, 3, 64)),
        calls=(cycle * calls)[:calls],
        config=config,
        dtypes=(dtype,) * 6,
        groups=(0, 1, 1, 0, 0, 1),
    )


class Theirs:
    """torch.optim.AdamW on fp32 masters, playing a history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.params = [nn.Parameter(weight.float()) for weight in history.weights()]
        self.optimizer = torch.optim.AdamW(history.param_groups(self.params))
        self.order = [param for group in self.optimizer.param_groups for param in group["params"]]
        self.first_lr = [group["lr"] for group in self.optimizer.param_groups]

    def play(self, start: int, end: int) -> None:
        stored = self.history.weights()
        for t in range(start, end):
            call = self.history.calls[t]
            for group, lr in zip(self.optimizer.param_groups, self.first_lr, strict=True):
                group["lr"] = lr * call.lr_factor
            for param, grad in zip(self.params, clipped(self.history.grads(t, stored), call), strict=True):
                param.grad = grad
            if all(param.grad is None or torch.isfinite(param.grad).all() for param in self.params):
                if self.history.config.max_grad_norm is not None and any(param.grad is not None for param in self.params):
                    nn.utils.clip_grad_norm_(self.params, self.history.config.max_grad_norm)
                self.optimizer.step()

    def enter(self, player: Player) -> None:
        """Go on where ours stopped."""
        state, masters = to_adamw_state(player.optimizer)
        self.optimizer.load_state_dict(state)
        with torch.no_grad():
            for param, master in zip(self.order, masters, strict=True):
                param.copy_(master)

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.params]


def assert_close(history: History, actual: list[torch.Tensor], what: str) -> None:
    expected = synchronous(history)[-1]
    calls = len(history.calls)
    assert_rounds_to(actual, expected, [tolerance(history, e, calls) for e in expected], what)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adamw_goes_on_from_our_state(device, name, dtype):
    """Left at any call: with windows open, on their way, or handed over. Ours trains on as if nobody had asked."""
    history = history_of(name, dtype)
    undisturbed, player = run(history, device), Player(history, device)
    for t in range(1, len(history.calls)):
        player.step()
        theirs = Theirs(history)
        theirs.enter(player)
        theirs.play(t, len(history.calls))
        assert_close(history, theirs.weights(), f"left after call {t}")
    assert_identical([*player.play(), player.flushed()], undisturbed[-2:])
    player.close()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_we_go_on_from_adamw_s_state(device, name, dtype):
    history = history_of(name, dtype)
    theirs = Theirs(history)
    for t in range(0, len(history.calls), 3):
        player = Player(dataclasses.replace(history, seed=9), device)
        player.play(t % 5)  # what was trained before is given up
        masters = [param.detach().clone() for param in theirs.order]
        from_adamw_state(player.optimizer, theirs.optimizer.state_dict(), masters)
        player.history, player.t = history, t
        shown = [weight.to(param.dtype) for weight, param in zip(theirs.weights(), player.params, strict=True)]
        assert_identical([player.weights()], [shown], "the model shows the masters")
        player.play()
        assert_close(history, player.flushed(), f"entered after call {t}")
        player.close()
        theirs.play(t, t + 3)


@given(history=histories(dtypes=("fp32", "bf16"), clips=False, befores=("flush", 1, 3, 6)), data=st.data())
@FEWER
def test_there_and_back_at_random(device, history, data):
    ends = sorted(data.draw(st.integers(0, len(history.calls))) for _ in range(2))
    player, theirs = Player(history, device), Theirs(history)
    player.play(ends[0])
    theirs.enter(player)
    theirs.play(*ends)
    from_adamw_state(player.optimizer, theirs.optimizer.state_dict(), [param.detach() for param in theirs.order])
    player.t = ends[1]
    player.play()
    assert_close(history, player.flushed(), f"away from call {ends[0]} to {ends[1]}")
    player.close()


def test_what_was_entered_survives_a_checkpoint(device):
    """Also before the first step here."""
    history = history_of("long windows")
    theirs = Theirs(history)
    theirs.play(0, 7)
    first, second = Player(history, device), Player(history, device)
    from_adamw_state(first.optimizer, theirs.optimizer.state_dict(), [param.detach() for param in theirs.order])
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    first.t = second.t = 7
    assert_identical(second.play(), first.play())
    first.close(), second.close()


def test_without_masters_the_model_s_weights_are_theirs():
    model = nn.Linear(6, 8)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, 6)).sum().backward()
    theirs.step()
    model.zero_grad()
    before = model.weight.detach().clone()
    ours = ZenFlowAdamW(model.named_parameters(), lr=1.0, min_numel=0)
    from_adamw_state(ours, theirs.state_dict())
    assert torch.equal(model.weight, before)
    assert ours.param_groups[0]["lr"] == 1e-2
    state, masters = to_adamw_state(ours)
    assert torch.equal(masters[0], before)
    assert state["state"][0]["step"] == 1
    assert torch.equal(state["state"][0]["exp_avg"], theirs.state_dict()["state"][0]["exp_avg"])
    assert set(state["param_groups"][0]) >= set(theirs.state_dict()["param_groups"][0])
    ours.close()


def test_masters_of_what_is_frozen_here_are_taken_too():
    theirs, ours = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    theirs(torch.ones(1, 6)).sum().backward()
    adamw.step()
    ours[0].requires_grad_(False)
    optimizer = ZenFlowAdamW(ours.named_parameters(), lr=1e-2, min_numel=0)
    masters = [param.detach() for param in theirs.parameters()]
    with pytest.raises(ValueError, match="needs master of shape"):
        from_adamw_state(optimizer, adamw.state_dict(), [masters[0].T, *masters[1:]])
    from_adamw_state(optimizer, adamw.state_dict(), masters)
    for mine, his in zip(ours.parameters(), masters, strict=True):
        assert torch.equal(mine, his)
    optimizer.close()


def test_in_the_middle_of_a_call_what_was_asked_for_is_named():
    model = nn.Linear(8, 8, bias=False)
    optimizer = ZenFlowAdamW(model.named_parameters(), preset="stronghold", min_numel=0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^to_adamw_state\(\) between backward and step\(\) is not possible"):
        to_adamw_state(optimizer)
    optimizer.step()
    to_adamw_state(optimizer)
    optimizer.close()


def test_steps_that_differ_by_channel_are_refused_with_the_reason():
    history = dataclasses.replace(
        history_of("long windows"), config=ZenFlowConfig(preset="zenflow", min_numel=0, topk_ratio=0.25)
    )
    player = Player(history)
    player.play()
    with pytest.raises(ValueError, match=r"have taken .* AdamW steps, as under the rule mean.* one count per parameter"):
        to_adamw_state(player.optimizer)
    player.close()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad=True is not supported"),
        (lambda s: s["param_groups"][0].update(maximize=True), "maximize=True is not supported"),
        (lambda s: s["param_groups"][0].update(decoupled_weight_decay=False), "decoupled_weight_decay=False is not supported"),
        (lambda s: s["param_groups"][0]["params"].pop(), "another model: its groups hold"),
        (lambda s: s["param_groups"].pop(), "another model: its groups hold"),
        (lambda s: s["state"][0].pop("exp_avg"), "torch.optim.AdamW's has step"),
        (lambda s: s["state"][0].update(exp_avg=torch.ones(3, 3)), "needs exp_avg of shape"),
        (lambda s: s["state"][0].update(step=torch.tensor(1.5)), "no number of steps"),
        (lambda s: s["state"][0].update(momentum_buffer=1), "torch.optim.AdamW's has step"),
    ],
)
def test_a_state_that_is_not_adamw_s_is_refused_and_nothing_is_changed(change, message):
    history = history_of("default")
    theirs, player = Theirs(history), Player(history)
    theirs.play(0, 3)
    player.play(5)
    before = player.weights()
    state = theirs.optimizer.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        from_adamw_state(player.optimizer, state)
    assert_identical([player.weights()], [before])
    assert_identical([*player.play(), player.flushed()], run(history)[5:])
    player.close()
