"""The oracle is right (against torch.optim.AdamW), and the engine gives the oracle's weights, call by call."""

import dataclasses
import math
import random

import pytest
import torch
from histories import (
    Call,
    History,
    Player,
    assert_rounds_to,
    clipped,
    histories,
    hypers,
    synchronous,
    tolerance,
)
from hypothesis import given
from hypothesis import strategies as st
from oracle import Oracle, axis_of, oracle_of, selected_count

from stallfree import ZenFlowAdamW, ZenFlowConfig

ADAMW = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


# The oracle by itself, in float64


def oracle_for(history: History, *, per_block: int = 2, dtype: torch.dtype = torch.float64, phases=None) -> Oracle:
    weights, config = history.weights(), history.config
    count = len(weights)
    members = [list(range(i, min(i + per_block, count))) for i in range(0, count, per_block)]
    blocks = [((phases[b] if phases else b) if config.stagger else 0, held) for b, held in enumerate(members)]
    dims = [axis_of(weight, config) for weight in weights]
    selected = [selected_count(w, d, config) for w, d in zip(weights, dims, strict=True)]
    return Oracle(weights, blocks, dims=dims, selected=selected, config=config, dtype=dtype)


def play_oracle(oracle: Oracle, history: History) -> None:
    groups = history.param_groups(list(range(len(history.shapes))))
    defaults = dict(betas=(0.9, 0.999), eps=1e-8)
    groups = [defaults | group for group in groups]
    weights = history.weights()
    for t, call in enumerate(history.calls):
        if call.before == "flush":
            oracle.flush()
        elif call.before == "exact":
            oracle.exact()
        elif call.before is not None:
            oracle.interval = call.before
        oracle.step(clipped(history.grads(t, weights), call), hypers(history, t, groups))


@given(histories(most_calls=40), st.integers(1, 3))
def test_oracle_with_replay_equals_adamw_after_a_flush(history, per_block):
    oracle = oracle_for(history, per_block=per_block)
    play_oracle(oracle, history)
    oracle.flush()
    expected = synchronous(history)[-1]  # fp32, so this is torch's own rounding
    allowed = [tolerance(history, e, len(history.calls)) for e in expected]
    assert_rounds_to([w.float() for w in oracle.weights()], expected, allowed)
    assert not any(torch.isnan(w).any() for w in oracle.weights())


@pytest.mark.parametrize("seed", range(20))
def test_oracle_in_float64_equals_float64_adamw_to_the_last_digits(seed):
    """Without fp32 in the way: any difference in the rule itself would show here at 1e-12."""
    rnd, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    config = ZenFlowConfig(
        topk_ratio=0.4,
        update_interval=rnd.choice([1, 2, 4, 7]),
        lag=rnd.choice([0, 1, 3]),
        min_numel=0,
        select_interval=rnd.choice([1, 3, 5]),
        full_warm_up_rounds=rnd.choice([0, 3]),
        max_update_interval=8,
    )
    weights = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    oracle = Oracle(weights, [(0, [0, 1]), (1, [2])], dims=[1, 0, 1], selected=[2, 2, None], config=config)
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    theirs = torch.optim.AdamW([dict(params=[p], **ADAMW) for p in params])
    for t in range(30):
        grads = [None if rnd.random() < 0.1 else torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in weights]
        oracle.interval = rnd.choice([1, 2, 4, 7]) if t % 9 == 8 else oracle.interval
        oracle.step(grads, [ADAMW] * 3)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        theirs.step()
    for ours, p in zip(oracle.exact(), params, strict=True):
        torch.testing.assert_close(ours, p.detach(), rtol=1e-12, atol=1e-14)


def test_oracle_mean_is_one_adamw_step_on_the_mean_of_each_window():
    """Three windows of 4; call 6 has no gradient and call 11 is skipped: their windows average what is there."""
    config = ZenFlowConfig(preset="zenflow-star", topk_ratio=0.0, full_warm_up_rounds=0, min_numel=0)
    weight, generator = torch.randn(3, 5, dtype=torch.float64), torch.Generator().manual_seed(1)
    oracle = Oracle([weight], [(0, [0])], dims=[1], selected=[0], config=config)
    p = torch.nn.Parameter(weight.clone())
    theirs = torch.optim.AdamW([p], **ADAMW)
    window = []
    for t in range(1, 14):
        grad = None if t == 6 else torch.randn(3, 5, generator=generator, dtype=torch.float64)
        hyper = ADAMW | dict(lr=1e-2 / t)
        if t == 11:
            grad[0, 0] = math.inf
        elif grad is not None:
            window.append((grad, hyper["lr"]))
        oracle.step([grad], [hyper])
        # Block 0 of an oracle closes its first window at call 1 (it starts with S=1), then at 4, 8 and 12.
        if t in (1, 4, 8, 12):
            p.grad = torch.stack([g for g, _ in window]).mean(0)
            theirs.param_groups[0]["lr"] = window[-1][1]
            theirs.step()
            window = []
        torch.testing.assert_close(oracle.weights()[0], p.detach(), rtol=1e-12, atol=1e-14)
    assert oracle.parameters[0].sides["host"]["steps"].tolist() == [4.0] * 5


def test_oracle_mean_counts_the_steps_of_each_channel():
    """Selected channels step at every call, deferred ones once a window."""
    config = ZenFlowConfig(preset="zenflow-star", topk_ratio=0.5, full_warm_up_rounds=1, select_interval=100, min_numel=0)
    oracle = Oracle([torch.ones(2, 4)], [(0, [0])], dims=[1], selected=[2], config=config)
    grad = torch.tensor([[1.0, 4.0, 2.0, 3.0]]).expand(2, 4)
    for _ in range(9):
        oracle.step([grad], [ADAMW])
    device, host = (oracle.parameters[0].sides[side]["steps"].nan_to_num(-1).tolist() for side in ("device", "host"))
    assert device == [-1, 9, -1, 9]  # the warm-up call, then eight more on the device
    assert host == [3, -1, 3, -1]  # the warm-up call, and the windows that closed at calls 4 and 8


def test_oracle_deferred_lr_scale_is_adamw_with_that_lr():
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=3, deferred_lr_scale=0.5, full_warm_up_rounds=0, min_numel=0)
    weight = torch.randn(3, 5, dtype=torch.float64)
    oracle = Oracle([weight], [(0, [0])], dims=[1], selected=[0], config=config)
    p = torch.nn.Parameter(weight.clone())
    theirs = torch.optim.AdamW([p], **ADAMW | dict(lr=0.5e-2))
    for _ in range(7):
        grad = torch.randn(3, 5, dtype=torch.float64)
        oracle.step([grad], [ADAMW])
        p.grad = grad
        theirs.step()
    torch.testing.assert_close(oracle.exact()[0], p.detach(), rtol=1e-12, atol=1e-14)


def test_oracle_look_ahead_adds_the_expected_drift_to_what_is_published():
    """With a constant gradient every direction is 1: after t calls of lr each the master has moved by t * lr."""
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=4, lag=1, full_warm_up_rounds=0, min_numel=0, stagger=False)
    oracle = Oracle([torch.zeros(2, 3)], [(0, [0])], dims=[1], selected=[0], config=config)
    hyper = dict(lr=0.5, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0)
    moved = []
    for _ in range(10):
        oracle.step([torch.ones(2, 3)], [hyper])
        moved.append(round(-oracle.weights()[0][0, 0].item() / 0.5, 9))
    # Windows {1}, {2..4}, {5..8} close at 1, 4, 8 and are published a call later, each (4 - 1 + 1) / 2 steps ahead.
    assert moved == [0, 3, 3, 3, 6, 6, 6, 6, 10, 10]
    assert round(-oracle.exact()[0][0, 0].item() / 0.5, 9) == 10


# The engine against the oracle


def follow(history: History, device, dtype: torch.dtype = torch.float64) -> None:
    """Play on both; compare what the model holds after every call, and after a flush."""
    player = Player(history, device)
    try:
        oracle = oracle_of(player.optimizer, history.config, dtype=dtype)
        order = history.order()
        groups = [dict(group) for group in player.optimizer.param_groups]
        extra = 8.0 if history.config.lookahead else 0.0

        def compare(what: str) -> None:
            expected = oracle.weights()
            allowed = [tolerance(history, e, oracle.call, extra) for e in expected]
            actual = player.weights()
            assert_rounds_to([actual[i] for i in order], expected, allowed, what)

        for t, call in enumerate(history.calls):
            if call.before == "flush":
                oracle.flush()
            elif isinstance(call.before, int):
                oracle.interval = call.before
            grads, settings = clipped(history.grads(t, history.weights()), call), hypers(history, t, groups)
            oracle.step([grads[i] for i in order], [settings[i] for i in order])
            player.step()
            compare(f"call {t + 1}")
        oracle.flush()
        player.optimizer.flush()
        compare("flushed")
    finally:
        player.close()


@given(history=histories(rule="replay"))
def test_replay_equals_the_oracle_at_every_call(device, history):
    follow(history, device)


@given(history=histories(rule="mean"))
def test_mean_equals_the_oracle_at_every_call(device, history):
    follow(history, device)


@given(history=histories(), scale=st.sampled_from([0.25, 0.5, 2.0]))
def test_deferred_lr_scale_equals_the_oracle_at_every_call(device, history, scale):
    follow(dataclasses.replace(history, config=history.config.replace(deferred_lr_scale=scale)), device)


@given(history=histories(dtypes=("bf16", "fp16", "fp32")))
def test_half_precision_weights_are_rounded_masters_at_every_call(device, history):
    follow(history, device)


@pytest.mark.parametrize("preset", ["stallfree", "zenflow", "zenflow-star", "zero-offload", "zero-offload-dpu", "device"])
def test_presets_equal_the_oracle_at_every_call(device, preset):
    config = ZenFlowConfig(preset=preset, full_warm_up_rounds=3, select_interval=6, min_numel=0, block_numel=60)
    config = config.replace(topk_ratio=0.25) if config.topk_ratio == 0.1 else config
    config = config.replace(update_interval=4) if config.update_interval == "auto" else config
    follow(History(shapes=((6, 8), (9,), (8, 6), (4, 3, 3)), calls=(Call(),) * 24, config=config, groups=(0, 0, 1, 1)), device)


def test_stacks_of_matrices_by_rows_equal_the_oracle_at_every_call(device):
    config = ZenFlowConfig(
        topk_ratio=0.25, update_interval=3, channel_dim=0, full_warm_up_rounds=2, select_interval=3, min_numel=0
    )
    follow(History(shapes=((3, 5, 64), (6, 8), (2, 3, 65)), calls=(Call(),) * 16, config=config), device)


def test_stronghold_equals_the_oracle_at_every_call(device):
    config = ZenFlowConfig(preset="stronghold", full_warm_up_rounds=0, min_numel=0, block_numel=60)
    follow(History(shapes=((6, 8), (9,), (8, 6), (4, 3, 3)), calls=(Call(),) * 10, config=config), device)


@pytest.mark.parametrize(
    "factors", [[0.25, 0.5, 0.75, 1.0, 1.0], [1.0] * 5, [0.1 * i for i in range(1, 10)] + [0.9, 0.8], [1.0, 0.5]]
)
def test_automatic_warm_up_lasts_while_the_learning_rate_rises(device, factors):
    config = ZenFlowConfig(topk_ratio=0.25, update_interval=3, lag=2, select_interval=4, min_numel=0, block_numel=40)
    calls = tuple(Call(lr_factor=f) for f in factors + [factors[-1] / 2] * 12)
    follow(History(shapes=((6, 8), (8, 6)), calls=calls, config=config), device)


def test_scores_are_of_the_gradient_as_the_user_scaled_it(device):
    """A channel that is large only before it is scaled down (a loss scale, undone by mul_) is not chosen for it."""
    config = ZenFlowConfig(topk_ratio=0.5, update_interval=2, lag=0, full_warm_up_rounds=2, select_interval=100, min_numel=0)
    p = torch.nn.Parameter(torch.zeros(3, 2, device=device))
    optimizer = ZenFlowAdamW([p], config=config)
    for loss_scale, column in ((1024.0, 0), (1.0, 1)):  # the second gradient is the larger one
        grad = torch.tensor([[1.0, 0.0]] if column == 0 else [[0.0, 4.0]], device=device)
        (p * grad * loss_scale).sum().backward()
        p.grad.mul_(1 / loss_scale)
        optimizer.step()
        optimizer.zero_grad()
    before = p.detach().clone()
    p.sum().backward()
    optimizer.step()  # inside a window: only the selected channel moves
    optimizer.close()
    assert (p.detach() != before).any(0).tolist() == [False, True]


def test_channels_with_equal_scores_are_chosen_from_the_lowest_index(device):
    """Columns of one absolute value: every score ties exactly, so the first ones win, at every selection."""
    config = ZenFlowConfig(
        topk_ratio=0.5, update_interval=2, lag=0, stagger=False, full_warm_up_rounds=1, select_interval=2, min_numel=0
    )
    history = History(shapes=((4, 8),), calls=(Call(),) * 6, config=config)
    player = Player(history, device)
    (p,) = player.params
    for _ in history.calls:
        before = p.detach().clone()
        (p * torch.ones_like(p)).sum().backward()
        player.optimizer.step()
        player.optimizer.zero_grad()
        moved = (p.detach() != before).any(0).tolist()
        assert moved[:4] == [True] * 4 or player.optimizer.metrics()["call"] == 1
    # Call 7 is inside a window of two: only the selected channels move.
    before = p.detach().clone()
    (p * torch.ones_like(p)).sum().backward()
    player.optimizer.step()
    assert (p.detach() != before).any(0).tolist() == [True] * 4 + [False] * 4
    player.close()
