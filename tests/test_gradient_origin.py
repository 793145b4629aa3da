"""A `.grad` that is not what this call's backward passes staged for this parameter: used if plain, otherwise refused."""

import copy

import pytest
import torch
from gradients import SETTINGS, Setting, assert_equal, same_as
from histories import backward
from torch import nn

from stallfree import ZenFlowAdamW


def test_a_gradient_assigned_by_hand_is_used(device):
    """No backward pass, so no hook: step() takes what stands in .grad."""
    setting = Setting(device)
    grads = setting.draw()
    for p, g in zip(setting.params, grads, strict=True):
        p.grad = g.clone()
    assert_equal(setting.full(), grads)
    setting.step()
    assert_equal(setting.weights(), same_as(device, torch.float32, grads))


def test_a_plain_gradient_assigned_over_a_staged_one_is_used(device):
    """The way out: take the plain tensor, change it, put it back."""
    setting = Setting(device)
    setting.backward(setting.draw())
    grads, handle = [], setting.params[0].grad
    for p in setting.params:
        grads.append(setting.optimizer.full_gradient(p).clamp(-0.5, 0.5))
        p.grad = grads[-1].clone()
    setting.step()
    with pytest.raises(RuntimeError, match="discarded"):
        handle.norm()
    assert_equal(setting.weights(), same_as(device, torch.float32, grads))


def restored(setting):
    saved = setting.params[0].grad
    setting.optimizer.zero_grad()
    setting.backward(setting.draw())
    setting.params[0].grad = saved


def restored_after_a_step(setting):
    saved = setting.params[0].grad
    setting.optimizer.zero_grad()
    setting.optimizer.step()
    setting.params[0].grad = saved


def restored_after_loading(setting):
    saved = setting.params[0].grad
    setting.optimizer.load_state_dict(copy.deepcopy(setting.optimizer.state_dict()))
    setting.params[0].grad = saved


@pytest.mark.parametrize("change", [restored, restored_after_a_step, restored_after_loading])
def test_a_gradient_that_was_discarded_is_refused(device, change):
    setting = Setting(device)
    setting.backward(setting.draw())
    change(setting)
    with pytest.raises(RuntimeError, match=r"(?s)a\.weight was (discarded|applied).*zero_grad.*full_gradient"):
        setting.optimizer.step()
    for use in (torch.Tensor.norm, lambda g: g.mul_(2), lambda g: g.add_(1), lambda g: g.staged.full()):
        with pytest.raises(RuntimeError, match=r"discarded|applied"):
            use(setting.params[0].grad)
    setting.optimizer.zero_grad()
    setting.backward(setting.draw())
    setting.step()
    setting.optimizer.close()


def test_gradients_of_two_parameters_that_were_swapped_are_refused(device):
    params = [nn.Parameter(torch.randn(6, 8, device=device)) for _ in range(2)]
    optimizer = ZenFlowAdamW(zip("ab", params, strict=True), **SETTINGS)
    backward(params, [torch.ones_like(p) for p in params])
    params[0].grad, params[1].grad = params[1].grad, params[0].grad
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=r"(?s)\.grad of a .*another parameter or optimizer.*zero_grad"):
        optimizer.step()
    assert_equal(params, before)
    assert optimizer.metrics()["call"] == 0
    optimizer.close()


def test_a_gradient_of_an_optimizer_that_is_gone_is_refused(device):
    """Rebuilt between backward and step."""
    setting = Setting(device)
    setting.backward(setting.draw())
    setting.optimizer.close()
    optimizer = ZenFlowAdamW(zip(("a.weight", "b.weight", "c.bias"), setting.params, strict=True), **SETTINGS)
    with pytest.raises(RuntimeError, match=r"(?s)a\.weight.*another parameter or optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    setting.backward(setting.draw())
    optimizer.step()
    optimizer.close()


def test_the_newest_optimizer_takes_over_its_parameters():
    """A notebook cell that builds the optimizer is run again; who holds on to the old one is told."""
    setting = Setting("cpu")
    old = setting.optimizer
    setting.optimizer = ZenFlowAdamW(zip(("a.weight", "b.weight", "c.bias"), setting.params, strict=True), **SETTINGS)
    before = [p.detach().clone() for p in setting.params]
    with pytest.raises(RuntimeError, match="newer ZenFlowAdamW took over"):
        old.step()
    assert_equal(setting.params, before)
    setting.backward(setting.draw())
    setting.step()
    assert all((p.detach() != q).any() for p, q in zip(setting.params, before, strict=True))
    setting.optimizer.close()


def test_a_gradient_with_a_graph_is_refused_with_the_way_out(device):
    setting = Setting(device)
    before = [p.detach().clone() for p in setting.params]
    with pytest.raises(RuntimeError, match=r"(?s)create_graph.*torch\.autograd\.grad"):
        sum(p.pow(2).sum() for p in setting.params).backward(create_graph=True)
    assert_equal(setting.params, before)
    setting.optimizer.zero_grad()
    loss = sum(p.pow(2).sum() for p in setting.params)  # its gradient is 2 p, and of the squared norm of that, 8 p
    penalty = sum(g.pow(2).sum() for g in torch.autograd.grad(loss, setting.params, create_graph=True))
    (loss + penalty).backward()
    for full, p in zip(setting.full(), before, strict=True):
        torch.testing.assert_close(full, 10 * p)
    setting.optimizer.close()


def test_a_model_can_be_converted_after_step(device):
    """Applied gradients are no obstacle. The optimizer belongs to the model as it was."""
    setting = Setting(device, calls=0)
    model = nn.ParameterList(setting.params)
    setting.backward(setting.draw())
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) before model\.to"):
        setting.params[0].grad.bfloat16()
    setting.optimizer.step()
    model.bfloat16()
    assert all(p.dtype == torch.bfloat16 for p in model)
    model.float()
    setting.optimizer.zero_grad()
    setting.backward(setting.draw())
    setting.step()
    model.bfloat16()
    with pytest.raises(RuntimeError, match="changed its dtype"):
        setting.backward(setting.draw())
    setting.optimizer.close()
