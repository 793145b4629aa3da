"""What reading a staged `.grad` gives or refuses, and what becomes of a handle that somebody has kept."""

import copy
import pickle
import weakref

import pytest
import torch
from gradients import DTYPES, Setting, assert_equal, same_as
from torch import nn

from stallfree import ZenFlowAdamW
from stallfree.engine.gradient import StagedGradient


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_gradient_is_the_gradient_bit_for_bit(device, dtype):
    setting = Setting(device, dtype)
    grads = setting.backward(setting.draw())
    assert_equal(setting.full(), grads)
    for p in setting.params[:2]:
        assert isinstance(p.grad, StagedGradient)
        assert (p.grad.shape, p.grad.dtype, p.grad.device) == (p.shape, p.dtype, p.device)
        assert type(setting.optimizer.full_gradient(p)) is torch.Tensor
    assert_equal(setting.full(), grads)  # reading it does not use it up
    setting.step()
    assert_equal(setting.weights(), same_as(device, dtype, grads))


def test_full_gradient_without_a_gradient_is_none(device):
    setting = Setting(device)
    assert setting.full() == [None] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_the_gradient_s(device, dtype):
    setting = Setting(device, dtype)
    grads = setting.backward(setting.draw())
    for p, g in zip(setting.params, grads, strict=True):
        expected = torch.linalg.vector_norm(g.float())
        for norm in (p.grad.norm(), torch.linalg.vector_norm(p.grad), torch.linalg.vector_norm(p.grad, dtype=torch.float32)):
            torch.testing.assert_close(
                norm.float(), expected, rtol=1e-6 if p.dim() > 1 or dtype == torch.float32 else 1e-2, atol=0
            )
    total = torch.nn.utils.get_total_norm([p.grad for p in setting.params])
    expected = torch.cat([g.float().flatten() for g in grads]).norm()
    torch.testing.assert_close(total.float(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)


@pytest.mark.parametrize(
    "read",
    [
        lambda g: g + 1,
        lambda g: g.sum(),
        lambda g: g[0],
        lambda g: g.norm(1),
        lambda g: g.double(),
        lambda g: g.bfloat16(),
        lambda g: g.clone(),
        lambda g: g.copy_(g),
        lambda g: torch.isfinite(g),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_what_a_handle_cannot_answer_names_the_way_out(read):
    setting = Setting("cpu")
    grads = setting.backward(setting.draw())
    with pytest.raises(RuntimeError, match=r"(?s)a\.weight.*full_gradient"):
        read(setting.params[0].grad)
    assert_equal(setting.full(), grads)


def in_another_grad(grad):
    other = nn.Parameter(torch.zeros(grad.shape))
    other.grad = grad
    return other


KEEPERS = {
    "nobody": lambda grad: None,
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "weakly": weakref.ref,
    "in another .grad": in_another_grad,
    "marked": lambda grad: setattr(grad, "mark", 1),
}


@pytest.mark.parametrize("keep", KEEPERS)
def test_a_handle_is_used_again_unless_somebody_has_kept_it(keep):
    params = [nn.Parameter(torch.ones(6, 6)) for _ in range(2)]
    optimizer = ZenFlowAdamW(params, min_numel=0)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    kept = KEEPERS[keep](params[0].grad)
    before = id(params[0].grad), id(params[0].grad.staged)
    optimizer.zero_grad()
    sum(param.sum() for param in params).backward()
    assert ((id(params[0].grad), id(params[0].grad.staged)) == before) is (keep == "nobody")
    assert not hasattr(params[0].grad, "mark")
    params[0].grad.norm()
    for old in (kept, getattr(kept, "grad", None)):
        if isinstance(old, StagedGradient):
            with pytest.raises(RuntimeError, match="applied by step"):
                old.mul_(2)
    optimizer.close()


def test_printing_a_handle_works():
    setting = Setting("cpu")
    setting.backward(setting.draw())
    assert "a.weight" in repr(setting.params[0].grad)
    assert "a.weight" in f"{setting.params[0].grad}"


def test_the_norm_of_an_applied_gradient_can_still_be_read(device):
    """To log it after step()."""
    setting = Setting(device)
    grads = setting.backward(setting.draw())
    setting.optimizer.step()
    for p, g in zip(setting.params, grads, strict=True):
        torch.testing.assert_close(p.grad.norm(), g.norm(), rtol=1e-6, atol=0)


def test_the_way_out_speaks_of_what_is_the_case():
    setting = Setting("cpu")
    setting.backward(setting.draw())
    with pytest.raises(RuntimeError) as error:
        setting.params[0].grad.sum()
    assert "DistributedDataParallel" not in str(error.value)
    with pytest.raises(RuntimeError, match="clip by norm instead"):
        torch.nn.utils.clip_grad_value_(setting.params, 0.1)
