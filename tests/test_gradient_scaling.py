"""Scaling and clipping of gradients between backward and step."""

import pytest
import torch
from gradients import DTYPES, Setting, assert_equal, same_as


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm_of_torch_clips_exactly(device, foreach, max_norm):
    setting = Setting(device)
    grads = setting.backward(setting.draw())
    total = torch.nn.utils.clip_grad_norm_(setting.params, max_norm, foreach=foreach)
    expected = torch.cat([g.flatten() for g in grads]).norm()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    factor = min(1.0, max_norm / (expected.item() + 1e-6))
    for full, g in zip(setting.full(), grads, strict=True):
        torch.testing.assert_close(full, g * factor, rtol=1e-6, atol=0)
    setting.step()
    for a, e in zip(setting.weights(), same_as(device, torch.float32, [g * factor for g in grads]), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_three_ways_of_clipping_agree(device, dtype):
    """Resident parameters' gradients are rounded when torch scales them in half precision; others keep an exact factor."""
    results, norms = [], []
    for way in ("torch", "method", "config"):
        setting = Setting(device, dtype, max_grad_norm=0.5 if way == "config" else None, calls=0)
        for _ in range(6):
            setting.backward(setting.draw())
            if way == "torch":
                norms.append(torch.nn.utils.clip_grad_norm_(setting.params, 0.5).item())
            elif way == "method":
                norms.append(setting.optimizer.clip_grad_norm_(0.5).item())
            setting.step()
            if way == "config":
                norms.append(float(setting.optimizer.metrics()["grad_norm"]))
        results.append(setting.weights())
    precise = dtype == torch.float32
    for by_torch, by_method, by_config in zip(norms[:6], norms[6:12], norms[12:], strict=True):
        assert by_method == pytest.approx(by_config, rel=1e-6)
        assert by_torch == pytest.approx(by_config, rel=1e-6 if precise else 1e-2)
    for by_torch, by_method, by_config in zip(*results, strict=True):
        torch.testing.assert_close(by_method, by_config, rtol=1e-6 if precise else 2**-7, atol=1e-7)
        torch.testing.assert_close(by_torch, by_config, rtol=1e-6 if precise else 2**-7, atol=1e-7 if precise else 1e-3)


def test_clipping_by_method_leaves_a_small_gradient_alone(device):
    setting = Setting(device)
    grads = setting.backward(setting.draw())
    norm = setting.optimizer.clip_grad_norm_(1e6)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in grads]).norm(), rtol=1e-6, atol=0)
    setting.step()
    assert_equal(setting.weights(), same_as(device, torch.float32, grads))


@pytest.mark.parametrize(
    "scale",
    [
        lambda g: g.mul_(0.25),
        lambda g: g.div_(4),
        lambda g: g.mul_(torch.tensor(0.25)),
        lambda g: g.div_(torch.tensor(4.0, device=g.device)),
        lambda g: torch._foreach_mul_([g], 0.25),
        lambda g: g.mul_(0.5).mul_(0.5),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_by_a_number(device, dtype, scale):
    """A quarter is exact in every dtype."""
    setting = Setting(device, dtype)
    grads = setting.backward(setting.draw())
    for p in setting.params:
        scale(p.grad)
    assert_equal(setting.full(), [g / 4 for g in grads])
    assert setting.params[0].grad.norm().item() == pytest.approx(grads[0].float().norm().item() / 4, rel=1e-6)
    setting.step()
    assert_equal(setting.weights(), same_as(device, dtype, [g / 4 for g in grads]))


@pytest.mark.parametrize("scale", [lambda g: g.mul_(0.3), lambda g: g.div_(3)])
def test_one_number_for_all_gradients_is_there_once_and_waits_for_nothing(device, scale):
    """As torch.distributed.pipelining divides each by the number of microbatches."""
    setting = Setting(device)
    setting.backward(setting.draw())
    if str(device) != "cpu":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for p in setting.params[:2]:
            scale(p.grad)
    finally:
        if str(device) != "cpu":
            torch.cuda.set_sync_debug_mode("default")
    first, second = (p.grad.staged.factor for p in setting.params[:2])
    assert first is second


def test_a_number_that_is_too_large_skips_the_call(device):
    """As inf does, which it is in fp32."""
    setting = Setting(device)
    before = setting.weights()
    setting.backward(setting.draw())
    for p in setting.params[:2]:
        p.grad.mul_(1e39)
    setting.step()
    assert setting.optimizer.metrics()["skipped_steps"] == 1
    assert_equal(setting.weights(), before)


def test_a_loss_scaled_by_the_user_and_unscaled_again(device):
    """fp16 without a GradScaler: a thousand times the loss, a thousandth of the gradient."""
    setting = Setting(device, torch.float16)
    grads = setting.draw()
    setting.backward([g * 1024 for g in grads])
    for p in setting.params:
        p.grad.mul_(1 / 1024)
    setting.step()
    assert_equal(setting.weights(), same_as(device, torch.float16, grads))


@pytest.mark.parametrize("inference", [False, True])
def test_a_factor_that_is_another_number_in_the_next_call(inference):
    """Written where no version tells, as a CUDA graph does."""
    setting, scaled = Setting("cpu", calls=0), Setting("cpu", calls=0)
    with torch.inference_mode(inference):
        factor = torch.zeros(())
    for number in (0.5, 0.25, 2.0):
        grads = setting.backward(setting.draw())
        with torch.inference_mode(inference):
            factor.data.fill_(number)
        for p in setting.params[:2]:
            p.grad.mul_(factor)
        scaled.backward([*(g * number for g in grads[:2]), grads[2]])
        setting.step()
        scaled.step()
    assert_equal(setting.weights(), scaled.weights())


def test_a_non_finite_factor_skips_the_call(device):
    setting, untouched = Setting(device), Setting(device)
    setting.backward(setting.draw())
    setting.params[0].grad.mul_(float("nan"))
    setting.step()
    untouched.step()
    assert_equal(setting.weights(), untouched.weights())
