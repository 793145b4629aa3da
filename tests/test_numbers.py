"""Numbers at the edge of what the types hold: the weights are those of torch.optim.AdamW on fp32 masters."""

import math

import pytest
import torch
from histories import backward

from stallfree import ZenFlowAdamW

SHAPES = ((6, 8), (8, 6), (5,))
CALLS = 9
SETTINGS = {
    "zero-offload": dict(preset="zero-offload", min_numel=0),
    "stallfree": dict(topk_ratio=0.25, update_interval=3, select_interval=2, full_warm_up_rounds=2, min_numel=0),
}


@pytest.fixture(params=list(SETTINGS))
def settings(request):
    return SETTINGS[request.param]


def drawn(seed: int, scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]


def trained(device, settings, weights, grads_at, **hyper) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights after a flush, and the fp32 masters of AdamW of torch on the same gradients."""
    params = [torch.nn.Parameter(w.to(device, copy=True)) for w in weights]
    masters = [torch.nn.Parameter(w.to(torch.float32, copy=True)) for w in weights]
    ours, theirs = ZenFlowAdamW(params, **hyper, **settings), torch.optim.AdamW(masters, **hyper)
    for t in range(CALLS):
        grads = grads_at(t)
        backward(params, [g.to(device) for g in grads])
        ours.step()
        ours.zero_grad()
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        theirs.step()
    ours.flush()
    assert ours.metrics()["skipped_steps"] == 0
    ours.close()
    return [p.detach().cpu() for p in params], [m.detach() for m in masters]


def assert_close(ours, masters, dtype, atol=0.0) -> None:
    for mine, master in zip(ours, masters, strict=True):
        expected = master.to(dtype)
        rtol = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_zeros_decay_and_nothing_else(device, settings, dtype):
    weights = drawn(0, 1.0, dtype)
    ours, masters = trained(device, settings, weights, lambda t: drawn(t, 0.0, dtype), lr=0.1, weight_decay=0.1)
    assert_close(ours, masters, dtype)
    for mine, weight in zip(ours, weights, strict=True):
        torch.testing.assert_close(mine.float(), weight.float() * 0.99**CALLS, rtol=CALLS * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1e-40), (torch.bfloat16, 1e-39), (torch.float16, 1e-7)])
def test_subnormal_gradients(device, settings, dtype, scale):
    """Their squares vanish; what is left moves weights of zero by what AdamW makes of it."""
    zeros = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    ours, masters = trained(device, settings, zeros, lambda t: drawn(t, scale, dtype), lr=1.0, weight_decay=0.0)
    assert any(mine.any() for mine in ours) or (device.type == "cuda" and dtype != torch.float16)
    assert_close(ours, masters, dtype, atol=1e-3 if dtype == torch.float16 else 1e-30)


@pytest.mark.parametrize("lr", [0.0, 1e-30, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learning_rates_at_the_ends(device, settings, dtype, lr):
    weights = drawn(0, 1.0, dtype)
    ours, masters = trained(device, settings, weights, lambda t: drawn(1 + t, 1.0, dtype), lr=lr)
    assert_close(ours, masters, dtype, atol=lr * 1e-3)
    if lr < 1:
        assert all(torch.equal(mine, weight) for mine, weight in zip(ours, weights, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_too_large_for_the_weight_is_shown_as_infinity_and_comes_back(device, settings, dtype):
    """What torch's copy_ makes of it; the master stays finite, and smaller weights follow when gradients turn."""
    largest, step = torch.finfo(dtype).max, {torch.bfloat16: 1e35, torch.float16: 15.0}[dtype]
    weights = [torch.full(shape, largest, dtype=dtype) for shape in SHAPES]
    away, back = ([torch.full(shape, sign, dtype=dtype) for shape in SHAPES] for sign in (-1.0, 1.0))
    ours, masters = trained(device, settings, weights, lambda t: away, lr=step, weight_decay=0.0)
    assert all(math.isfinite(master.max()) for master in masters)
    assert all(torch.equal(mine, master.to(dtype)) and mine.isinf().all() for mine, master in zip(ours, masters, strict=True))
    ours, masters = trained(device, settings, weights, lambda t: away if t < 2 else back, lr=step, weight_decay=0.0)
    assert all(mine.isfinite().all() for mine in ours)
    assert_close(ours, masters, dtype)


def test_gradients_at_the_largest_number_are_a_skip(device, settings):
    """Their norm is not finite in fp32. Nothing has been changed."""
    params = [torch.nn.Parameter(w.to(device)) for w in drawn(0, 1.0, torch.float32)]
    optimizer = ZenFlowAdamW(params, **settings)
    backward(params, [torch.full_like(p, torch.finfo(torch.float32).max) for p in params])
    optimizer.step()
    optimizer.flush()
    assert optimizer.metrics()["skipped_steps"] == 1
    for param, weight in zip(params, drawn(0, 1.0, torch.float32), strict=True):
        assert torch.equal(param.detach().cpu(), weight)
    optimizer.close()
