"""What must hold whatever the shapes, settings and events: docs/update-rule.md, "Invariants"."""

import dataclasses
import random

import pytest
import torch
from histories import (
    Call,
    History,
    Player,
    assert_identical,
    assert_rounds_to,
    histories,
    run,
    synchronous,
    tolerance,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree import ZenFlowAdamW, ZenFlowConfig

ALL_DTYPES = ("fp32", "fp32", "bf16", "fp16")
FEWER = settings(max_examples=max(4, settings().max_examples // 2))  # for tests that play a history several times
OFFLOADING = ["stallfree", "zenflow", "zenflow-star", "zero-offload", "zero-offload-dpu", "stronghold"]


def assert_adamw(history: History, seen: list[list[torch.Tensor]], calls: list[int]) -> None:
    """After these calls (-1: after the flush) the weights are torch.optim.AdamW's, rounded to their dtypes."""
    expected = synchronous(history)
    for t in calls:
        allowed = [tolerance(history, e, len(history.calls)) for e in expected[t]]
        assert_rounds_to(seen[t], expected[t], allowed, f"call {t + 1}" if t >= 0 else "flushed")


# 1. Exactness


@given(history=histories(dtypes=ALL_DTYPES))
def test_a_flush_leaves_the_weights_of_adamw(device, history):
    """Any windows, phases, lags, selections, groups, schedules, skips, missing gradients, clipping, flushes, changes of S."""
    assert_adamw(history, run(history, device), [-1])


@given(history=histories(befores=("exact", 1, 2, 5)), every=st.integers(1, 5))
@FEWER
def test_flushing_regularly_follows_adamw(device, history, every):
    """After every flush, not only the last one."""
    expected, player = synchronous(history), Player(history, device)
    while player.t < len(history.calls):
        player.play(min(player.t + every, len(history.calls)))
        now = expected[player.t - 1]
        assert_rounds_to(player.flushed(), now, [tolerance(history, e, player.t) for e in now], f"call {player.t}")
    player.close()


# 2. Timing independence


@given(history=histories(dtypes=ALL_DTYPES, most_calls=12, overlap_step=True), seed=st.integers(0, 100))
@FEWER
def test_random_delays_change_no_bit(device, history, seed):
    """Threads, copies and hooks sleep up to a millisecond, at random."""
    rnd = random.Random(seed)

    def slowly(player: Player) -> None:
        player.optimizer.engine.delay = lambda where: rnd.random() * rnd.choice([0.0, 0.0, 1e-3])

    assert_identical(run(history, device, slowly), run(history, device))


def test_delays_reach_worker_copies_and_hooks(device):
    """The test above is worth as much as the places where it interferes."""
    config, places = ZenFlowConfig(topk_ratio=0.25, update_interval=2, full_warm_up_rounds=1, min_numel=0), set()
    history = History(shapes=((6, 8), (8, 6)), calls=(Call(),) * 6, config=config)
    run(history, device, lambda player: setattr(player.optimizer.engine, "delay", lambda where: places.add(where) or 0.0))
    assert len(places) >= 3, places


@given(history=histories(dtypes=ALL_DTYPES))
@FEWER
def test_overlapping_the_host_work_changes_no_bit(device, history):
    assert_identical(run(history, device, overlap_step=True), run(history, device, overlap_step=False))


@given(history=histories(host_kernel="auto", moments_dtype="bfloat16"), threads=st.integers(2, 3))
@FEWER
def test_the_number_of_host_threads_changes_no_bit(device, history, threads):
    assert_identical(run(history, device, host_threads=1), run(history, device, host_threads=threads))


@given(history=histories(dtypes=ALL_DTYPES))
@FEWER
def test_a_second_run_is_bit_identical(device, history):
    for rule, moments in (("replay", "float32"), ("mean", "bfloat16")):
        first, second = (run(history, device, rule=rule, moments_dtype=moments) for _ in range(2))
        assert_identical(first, second, f"{rule}, {moments}")


# 3. Bounded staleness


@pytest.mark.parametrize("S, lag", [(1, 0), (1, 1), (2, 1), (4, 1), (4, 0), (4, 4), (7, 2)])
def test_a_gradient_appears_at_most_s_plus_lag_minus_one_calls_late(device, S, lag):
    """A single gradient in a run of zeros, at each place of the rotation; weights move when it is published, not before."""
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=S, lag=lag, full_warm_up_rounds=2, min_numel=0, block_numel=1)
    delays = []
    for impulse in range(3 + 2 * S, 3 + 3 * S):
        params = [torch.nn.Parameter(torch.ones(3, 4, device=device)) for _ in range(5)]
        optimizer = ZenFlowAdamW(params, lr=1e-2, weight_decay=0.0, config=config)
        moved: dict[int, int] = {}
        for t in range(1, impulse + S + lag + 2):
            sum((p * float(t == impulse)).sum() for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
            for i, p in enumerate(params):
                share = (p.detach() != 1).float().mean().item()
                assert share in (0.0, 1.0)
                if share and i not in moved:
                    moved[i] = t - impulse
        delays.extend(moved[i] for i in range(5))
        optimizer.close()
    assert min(delays) == lag
    assert max(delays) == S + lag - 1
    assert sum(delays) / len(delays) == (S - 1) / 2 + lag


def test_staleness_stays_bounded_when_channels_change_hands(device):
    """Selected channels at once, deferred and arriving ones within the bound, whatever is selected."""
    S, lag, channels = 4, 2, 12
    config = ZenFlowConfig(topk_ratio=0.25, update_interval=S, lag=lag, full_warm_up_rounds=2, select_interval=4, min_numel=0)
    for impulse in range(9, 15):
        p = torch.nn.Parameter(torch.ones(3, channels, device=device))
        optimizer = ZenFlowAdamW([p], lr=1e-2, weight_decay=0.0, config=config)
        waits = torch.full((channels,), -1)
        for t in range(1, impulse + S + lag):
            grad = torch.zeros(channels)  # equal scores: the first channels are selected
            if t == impulse:
                grad = torch.arange(1.0, channels + 1)  # the last channels become the important ones
            before = p.detach().clone()  # on a GPU, what is due may be shown during backward
            (p * grad.to(device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            changed = (p.detach() != before).any(0).cpu()
            if t >= impulse:
                waits[changed & (waits < 0)] = t - impulse
        assert waits.min() == 0
        assert waits.max() <= S + lag - 1
        optimizer.close()


def test_phases_spread_the_bytes_evenly(device):
    """At S=4 no call closes more than its share and one block."""
    shapes = [(8, 8)] * 6 + [(16, 16)] * 5 + [(4, 8)] * 7
    params = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
    optimizer = ZenFlowAdamW(params, topk_ratio=0.0, update_interval=4, min_numel=0, block_numel=1)
    numel = [0] * 4
    for block in optimizer.engine.blocks:
        numel[block.phase % 4] += sum(p.numel() for p in block.params)
    optimizer.close()
    assert sum(numel) == sum(p.numel() for p in params)
    assert max(numel) <= sum(numel) / 4 + 256


# 4. Reductions


@given(history=histories(dtypes=ALL_DTYPES))
@FEWER
def test_everything_selected_is_the_device_preset(device, history):
    base = dict(max_grad_norm=history.config.max_grad_norm, max_update_interval=8)
    ours = run(dataclasses.replace(history, config=history.config.replace(topk_ratio=1.0)), device)
    preset = run(dataclasses.replace(history, config=ZenFlowConfig(preset="device", **base)), device)
    assert_identical(ours, preset)
    assert_adamw(history, ours, list(range(len(history.calls))))


@given(history=histories(dtypes=ALL_DTYPES, befores=("flush", "exact")))
@FEWER
def test_nothing_selected_and_no_waiting_is_zero_offload(device, history):
    config = history.config
    names = ("max_grad_norm", "min_numel", "block_numel", "host_kernel", "max_update_interval", "channel_dim")
    same = {name: getattr(config, name) for name in names}
    reduced = config.replace(topk_ratio=0.0, update_interval=1, lag=0, lookahead="auto")
    ours = run(dataclasses.replace(history, config=reduced), device)
    preset = run(dataclasses.replace(history, config=ZenFlowConfig(preset="zero-offload", **same)), device)
    assert_identical(ours, preset)
    assert_adamw(history, ours, list(range(len(history.calls))))


@pytest.mark.parametrize("preset", OFFLOADING)
def test_warm_up_calls_are_synchronous(device, preset):
    """Until the first selection every preset is AdamW, call by call."""
    warm_up = {} if preset == "stronghold" else dict(full_warm_up_rounds=6)
    config = ZenFlowConfig(preset=preset, min_numel=0, block_numel=60, lookahead=0.0, **warm_up)
    history = History(shapes=((6, 8), (9,), (8, 6)), calls=(Call(),) * 6, config=config)
    assert_adamw(history, run(history, device), list(range(6)))


# 8. Skips


@given(history=histories(dtypes=ALL_DTYPES, skips=False), data=st.data())
def test_a_skipped_call_is_a_call_without_gradients(device, history, data):
    t = data.draw(st.integers(0, len(history.calls) - 1))
    i = data.draw(st.integers(0, len(history.shapes) - 1))
    value = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    here = dataclasses.replace(history.calls[t], missing=frozenset())

    def with_call(call: Call) -> History:
        return dataclasses.replace(history, calls=(*history.calls[:t], call, *history.calls[t + 1 :]))

    skipped = run(with_call(dataclasses.replace(here, bad=(i, value))), device)
    empty = run(with_call(dataclasses.replace(here, missing=frozenset(range(len(history.shapes))))), device)
    assert_identical(skipped, empty)


@pytest.mark.parametrize("preset", [p for p in OFFLOADING if p != "stronghold"] + ["device"])
def test_skipped_steps_are_counted(device, preset):
    """A run of skips, one in the warm-up and one as the last call included."""
    bad = {1, 5, 6, 7, 11}
    config = ZenFlowConfig(preset=preset, full_warm_up_rounds=3, min_numel=0, block_numel=60)
    calls = tuple(Call(bad=(t % 2, float("inf"))) if t in bad else Call() for t in range(12))
    player = Player(History(shapes=((6, 8), (8, 6)), calls=calls, config=config), device)
    player.play()
    player.flushed()
    metrics = player.optimizer.metrics()
    assert (metrics["skipped_steps"], metrics["call"]) == (len(bad), 12)
    assert all(torch.isfinite(p).all() for p in player.params)
    player.close()


# Reading weights


@given(history=histories(dtypes=ALL_DTYPES, befores=()), seed=st.integers(0, 100))
@FEWER
def test_looking_at_exact_weights_changes_nothing(device, history, seed):
    rnd, watched = random.Random(seed), Player(history, device)
    seen = []
    while watched.t < len(history.calls):
        watched.step()
        seen.append(watched.weights())
        if rnd.random() < 0.5:
            with watched.optimizer.exact_weights():
                shown = watched.weights()
            assert_identical([watched.weights()], [seen[-1]], "after the context")
            other = Player(history, device)
            other.play(watched.t)
            assert_identical([shown], [other.flushed()], "exact_weights against flush")
            other.close()
    seen.append(watched.flushed())
    watched.close()
    assert_identical(seen, run(history, device), "looked at")


def test_exact_weights_restores_after_an_exception(device):
    config = ZenFlowConfig(topk_ratio=0.25, update_interval=3, full_warm_up_rounds=0, min_numel=0)
    player = Player(History(shapes=((6, 8),), calls=(Call(),) * 5, config=config), device)
    (*_, before) = player.play()

    def fail():
        with player.optimizer.exact_weights():
            assert not torch.equal(player.weights()[0], before[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_identical([player.weights()], [before])
    player.close()


@given(history=histories(dtypes=ALL_DTYPES))
@FEWER
def test_a_second_flush_has_nothing_to_do(device, history):
    player = Player(history, device)
    player.play()
    once, twice = player.flushed(), player.flushed()
    with player.optimizer.exact_weights():
        shown = player.weights()
    assert_identical([twice, shown], [once, once])
    player.close()


# bfloat16 moments


def test_bfloat16_moments_stay_close_to_float32_ones(device):
    """100 calls of gradients with a mean: exp_avg_sq must not stick. Rounding noise stays below 2% of the way travelled."""
    config = ZenFlowConfig(preset="zero-offload", full_warm_up_rounds=0, min_numel=0, moments_dtype="bfloat16")
    weights = {}
    for moments in ("float32", "bfloat16"):
        generator = torch.Generator().manual_seed(3)
        p = torch.nn.Parameter(torch.zeros(32, 64, device=device))
        optimizer = ZenFlowAdamW([p], lr=1e-2, weight_decay=0.0, config=config.replace(moments_dtype=moments))
        for t in range(100):
            scale = 10.0 if t < 10 else 1.0  # the second moment has to come down again
            (p * (scale * (0.5 + torch.randn(32, 64, generator=generator))).to(device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights[moments] = p.detach().cpu()
        optimizer.close()
    travelled = weights["float32"].abs().mean()
    assert (weights["bfloat16"] - weights["float32"]).mean().abs() < 0.005 * travelled
    assert (weights["bfloat16"] - weights["float32"]).abs().mean() < 0.02 * travelled
