"""Gradients that are discarded, and gradients that are set to zero, which is not the same."""

import pytest
import torch
from gradients import Setting, assert_equal, same_as
from torch import nn


@pytest.mark.parametrize(
    "zero",
    [
        lambda s: s.optimizer.zero_grad(),
        lambda s: s.optimizer.zero_grad(set_to_none=True),
        lambda s: [setattr(p, "grad", None) for p in s.params],
        lambda s: nn.ParameterList(s.params).zero_grad(),
    ],
)
def test_zero_grad_before_step_discards_what_is_staged(device, zero):
    setting = Setting(device)
    setting.backward([100 * g for g in setting.draw()])
    zero(setting)
    assert all(p.grad is None for p in setting.params)
    assert setting.full() == [None] * 3
    grads = setting.backward([g.clone() for g in Setting(device).draw()])
    setting.step()
    assert_equal(setting.weights(), same_as(device, torch.float32, grads))


@pytest.mark.parametrize("settings", [dict(topk_ratio=0.0), dict(calls=0)], ids=["never", "before the first selection"])
def test_zero_grad_lets_go_of_what_is_staged_when_nothing_is_selected(device, settings):
    setting = Setting(device, **settings)
    setting.backward(setting.draw())
    engine = setting.optimizer.engine
    assert any(any(block.staged) for block in engine.blocks)
    setting.optimizer.zero_grad()
    assert not any(any(block.staged) for block in engine.blocks)
    assert not engine.sending.later


def test_zero_grad_and_step_is_a_call_without_gradients(device):
    setting, without = Setting(device), Setting(device)
    setting.backward(setting.draw())
    setting.optimizer.zero_grad()
    setting.step()
    without.step()
    assert_equal(setting.weights(), without.weights())
    assert setting.optimizer.metrics()["call"] == 4


@pytest.mark.parametrize(
    "zero",
    [
        lambda s: s.optimizer.zero_grad(set_to_none=False),
        lambda s: [p.grad.zero_() for p in s.params],
        lambda s: nn.ParameterList(s.params).zero_grad(set_to_none=False),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_gradients_set_to_zero_are_zero_not_missing(device, zero, again):
    """As in torch: moments decay and the step counts. What a further pass adds is all there is."""
    setting = Setting(device)
    setting.backward(setting.draw())
    zero(setting)
    grads = setting.draw() if again else [torch.zeros_like(p) for p in setting.params]
    if again:
        setting.backward(grads)
    assert_equal(setting.full(), grads)
    assert setting.params[0].grad.norm().item() == pytest.approx(grads[0].norm().item(), rel=1e-6)
    setting.step()
    assert_equal(setting.weights(), same_as(device, torch.float32, grads))
