"""The numbers `metrics()` reports are true."""

import copy

import pytest
import torch
from histories import backward
from torch import nn

from stallfree import ZenFlowAdamW

SETTINGS = dict(
    lr=1e-2, topk_ratio=0.25, update_interval=4, lag=1, full_warm_up_rounds=2, select_interval=100, min_numel=0, block_numel=1
)


def run(device, calls: int, dtype: torch.dtype = torch.float32, grads=None, **overrides):
    """Two named weights and a bias; returns the optimizer and the gradients of the last call."""
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in ((64, 48), (32, 64), (5,))]
    names = ("layers.0.up_proj.weight", "layers.1.down_proj.weight", "norm.weight")
    optimizer = ZenFlowAdamW(zip(names, params, strict=True), **SETTINGS | overrides)
    last = []
    for t in range(calls):
        last = [torch.randn(p.shape, generator=generator).to(p) for p in params] if grads is None else grads(t, params)
        backward(params, last)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, last


def test_before_the_first_call():
    optimizer, _ = run("cpu", 0)
    metrics = optimizer.metrics()
    assert {name: metrics[name] for name in ("call", "skipped_steps", "restages", "bytes_down", "bytes_up", "stall_ms")} == {
        "call": 0, "skipped_steps": 0, "restages": 0, "bytes_down": 0, "bytes_up": 0, "stall_ms": 0,
    }  # fmt: skip
    assert metrics["rho"] is None
    assert metrics["retention"] is None
    optimizer.close()


def test_calls_and_intervals_are_reported(device):
    optimizer, _ = run(device, 7, max_update_interval=6)
    assert (optimizer.metrics()["call"], optimizer.metrics()["interval"]) == (7, 4)
    optimizer.set_update_interval(6)
    assert optimizer.metrics()["interval"] == 6
    optimizer.close()


@pytest.mark.parametrize("calls, interval", [(0, 1), (2, 1), (3, 4)])
def test_the_interval_is_one_while_warming_up(device, calls, interval):
    optimizer, _ = run(device, calls)
    metrics = optimizer.metrics()
    assert (metrics["interval"], metrics["warming_up"]) == (interval, interval == 1)
    optimizer.close()


def test_restages_are_gradients_of_the_last_step(device):
    """The second pass of a step that expected one adds to each weight's staged gradient."""
    optimizer, _ = run(device, 3)
    params = optimizer.param_groups[0]["params"]
    found = []
    for passes in (2, 2, 1):
        for _ in range(passes):
            sum(p.sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics = optimizer.metrics()
        found.append((metrics["restages"], metrics["restages_total"]))
    assert found == [(2, 2), (0, 2), (0, 2)]  # of two weights; then the number of passes is learned
    optimizer.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_skipped_call_is_named_with_the_kind_of_parameter(device, value):
    """The last one of them, also calls later and when some parameters had no gradient."""
    where = {2: (0,), 5: (1, 2), 6: (2,)}  # by call from 0, which parameters are not finite

    def grads(t, params):
        made = [torch.ones_like(p) for p in params]
        for place in where.get(t, ()):
            made[place].view(-1)[-1] = value
        return made if t != 6 else [None, None, made[2]]

    kinds = ["up_proj", "down_proj", "norm"]
    for calls, count, last in ((2, 0, None), (4, 1, 2), (6, 2, 5), (9, 3, 6)):
        optimizer, _ = run(device, calls, grads=grads)
        found = optimizer.metrics()
        assert found["skipped_steps"] == count
        assert found["last_skipped_call"] == (None if last is None else last + 1)
        assert set(found["last_skipped_kinds"]) == {kinds[place] for place in where.get(last, ())}
        optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_norm_is_that_of_all_gradients_before_clipping(device, dtype):
    optimizer, grads = run(device, 5, dtype, max_grad_norm=0.1)
    expected = torch.cat([g.double().flatten() for g in grads]).norm().item()
    assert optimizer.metrics()["grad_norm"] == pytest.approx(expected, rel=1e-6)
    optimizer.close()


def test_the_gradient_norm_is_that_of_the_gradients_there_are(device):
    """Of some parameters or all, call by call."""
    shapes = {"a": (40, 8), "b.bias": (5,), "d.bias": (3,), "e.bias": (2, 2)}
    params = {name: torch.nn.Parameter(torch.ones(shape, device=device)) for name, shape in shapes.items()}
    optimizer = ZenFlowAdamW(params.items(), **SETTINGS | dict(min_numel=100))
    for used in ("abde", "abd", "be", "d", "", "a", "bde", "abde"):
        squares = 0.0
        for place, (name, p) in enumerate(params.items(), 1):
            if name[0] in used:
                (p.sum() * place).backward()
                squares += p.numel() * place**2
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.metrics()["grad_norm"] == pytest.approx(squares**0.5, rel=1e-6)
    optimizer.close()


def test_rho_is_the_share_of_the_squared_norm_in_deferred_channels(device):
    """Everything is deferred until the first selection, which takes the largest channels of gradients that do not change."""

    def fixed(t, params):
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(p.shape, generator=generator).to(p) for p in params]

    optimizer, _ = run(device, 2, grads=fixed)
    assert optimizer.metrics()["rho"] == 1.0
    optimizer.close()
    optimizer, grads = run(device, 9, grads=fixed)
    deferred, total, by_kind = 0.0, 0.0, {}
    for kind, g in zip(("up_proj", "down_proj"), grads[:2], strict=True):
        columns = g.double().pow(2).sum(0).sort(descending=True).values
        small = columns[round(0.25 * len(columns)) :].sum().item()
        by_kind[kind] = small / columns.sum().item()
        deferred, total = deferred + small, total + columns.sum().item()
    assert optimizer.metrics()["rho"] == pytest.approx(deferred / total, rel=1e-5)
    assert optimizer.metrics()["rho_by_kind"] == pytest.approx(by_kind, rel=1e-5)
    optimizer.close()


def test_retention_is_the_share_of_a_selection_that_stays(device):
    """Columns 0..11 of 48 are large at first, then 3..14: three quarters of the selection stays."""

    def shifting(t, params):
        grads = [torch.ones_like(p) for p in params]
        grads[0][:, 0 if t < 3 else 3 : 12 if t < 3 else 15] = 100.0 if t < 3 else 10_000.0
        return grads

    optimizer, _ = run(device, 14, grads=shifting, select_interval=8)
    assert optimizer.metrics()["retention_by_kind"] == pytest.approx({"up_proj": 0.75, "down_proj": 1.0})
    assert optimizer.metrics()["retention"] == pytest.approx(0.875)
    assert optimizer.metrics()["reselections_total"] == 2 * len(optimizer.engine.blocks)
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_deferred_channels(device, dtype):
    """Down: each call's deferred gradients. Up: the deferred weights, once in a window. Within 2%: counters and scalars too."""
    optimizer, _ = run(device, 8, dtype)
    before = optimizer.metrics()
    generator = torch.Generator().manual_seed(9)
    params = optimizer.param_groups[0]["params"]
    for _ in range(8):
        backward(params, [torch.randn(p.shape, generator=generator).to(p) for p in params])
        optimizer.step()
        optimizer.zero_grad()
    after = optimizer.metrics()
    deferred = (64 * 36 + 32 * 48) * params[0].element_size()
    assert after["bytes_down_total"] - before["bytes_down_total"] == pytest.approx(8 * deferred, rel=0.02)
    assert after["bytes_up_total"] - before["bytes_up_total"] == pytest.approx(2 * deferred, rel=0.02)
    assert after["bytes_down"] == pytest.approx(deferred, rel=0.02)
    optimizer.close()


def test_nothing_moves_when_the_device_does_it_all(device):
    optimizer, _ = run(device, 8, preset="device", topk_ratio=1.0)
    assert optimizer.metrics()["bytes_up_total"] == 0
    assert optimizer.metrics()["bytes_down_total"] <= 8 * 64  # the skip flag and the clip factor
    optimizer.close()


def test_skipped_calls_are_counted_on_after_a_resume(device):
    def trained(count, before=None):
        p = torch.nn.Parameter(torch.ones(8, 8, device=device))
        optimizer = ZenFlowAdamW([("some.weight", p)], **SETTINGS)
        if before is not None:
            optimizer.load_state_dict(copy.deepcopy(before))
        for t in range(count):
            p.grad = torch.full_like(p, torch.nan if t == 1 else 1.0)
            optimizer.step()
            optimizer.zero_grad()
        skips = {name: optimizer.metrics()[name] for name in ("skipped_steps", "last_skipped_call", "last_skipped_kinds")}
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        return skips, state

    first, state = trained(4)
    assert first == {"skipped_steps": 1, "last_skipped_call": 2, "last_skipped_kinds": ["some"]}
    assert trained(0, state)[0] == first
    assert trained(1, state)[0] == first
    assert trained(3, state)[0] == first | {"skipped_steps": 2, "last_skipped_call": 6}
