"""What gradients add up to: over several backward passes, and by addition in place."""

import pytest
import torch
from gradients import DTYPES, Setting, assert_equal, same_as
from histories import backward


def accumulated(grads: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """As torch adds them: one after the other, in the gradient's dtype."""
    total = [g.clone() for g in grads[0]]
    for more in grads[1:]:
        total = [a + b for a, b in zip(total, more, strict=True)]
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("passes", [[2], [3, 3, 3], [1, 4, 2, 1], [2, 1, 1, 3, 3]])
def test_any_number_of_passes_adds_up_in_the_gradient_s_dtype(device, dtype, passes):
    """The number of passes is learned; a wrong guess costs a restaging, never a gradient."""
    setting, plain = Setting(device, dtype, calls=0), Setting(device, dtype, calls=0)
    for count in passes:
        grads = [setting.backward(setting.draw()) for _ in range(count)]
        assert_equal(setting.full(), accumulated(grads))
        setting.step()
        plain.backward(accumulated(grads))
        plain.step()
    assert_equal(setting.weights(), plain.weights())


def test_passes_are_learned_from_the_last_step(device):
    setting = Setting(device, calls=1)
    counts = []
    for passes in (1, 4, 4, 4, 1, 1):
        for _ in range(passes):
            setting.backward(setting.draw())
        setting.step()
        counts.append(setting.optimizer.metrics()["restages"])
    assert counts[0] == 0
    assert counts[1] > 0  # four passes where one was expected
    assert counts[2:4] == [0, 0]  # learned
    assert counts[5] == 0


def test_a_parameter_may_take_part_in_some_passes_only(device):
    """Passes are counted per parameter."""
    setting, plain = Setting(device, calls=0), Setting(device, calls=0)
    for t in range(6):
        grads = [setting.draw() for _ in range(3)]
        for m, micro in enumerate(grads):
            backward(setting.params, [micro[0], micro[1] if m != 1 else None, micro[2] if t % 2 else None])
        setting.step()
        total = accumulated(grads)
        plain.draw(), plain.draw(), plain.draw()
        backward(plain.params, [total[0], grads[0][1] + grads[2][1], total[2] if t % 2 else None])
        plain.step()
    assert_equal(setting.weights(), plain.weights())


def test_accumulation_then_clipping(device):
    setting = Setting(device)
    grads = accumulated([setting.backward(setting.draw()) for _ in range(3)])
    total = torch.nn.utils.clip_grad_norm_(setting.params, 0.5)
    torch.testing.assert_close(total, torch.cat([g.flatten() for g in grads]).norm(), rtol=1e-6, atol=0)
    setting.step()
    factor = 0.5 / (total.item() + 1e-6)
    for a, e in zip(setting.weights(), same_as(device, torch.float32, [g * factor for g in grads]), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-7)


def test_scaling_between_passes(device):
    """A pass after mul_ adds to the scaled gradient."""
    setting = Setting(device)
    first = setting.backward(setting.draw())
    for p in setting.params:
        p.grad.mul_(0.5)
    second = setting.backward(setting.draw())
    assert_equal(setting.full(), [a * 0.5 + b for a, b in zip(first, second, strict=True)])
    setting.step()
    assert_equal(setting.weights(), same_as(device, torch.float32, [a * 0.5 + b for a, b in zip(first, second, strict=True)]))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    "add",
    [
        lambda g, more: g.add_(1.0),
        lambda g, more: g.add_(more),
        lambda g, more: g.add_(more.flatten()[0]),
        lambda g, more: g.add_(more, alpha=0.5),
        lambda g, more: g.sub_(more),
        lambda g, more: g.sub_(2.0),
        lambda g, more: g.sub_(more[..., :1], alpha=2),
        lambda g, more: g.add_(more.double()),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_in_place_is_torch_s(device, dtype, add, zero):
    setting = Setting(device, dtype)
    grads = [g.clone() for g in setting.backward(setting.draw())]
    if zero:
        setting.optimizer.zero_grad(set_to_none=False)
        grads = [torch.zeros_like(g) for g in grads]
    for p, g in zip(setting.params, grads, strict=True):
        more = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p)
        add(p.grad, more)
        add(g, more)
    assert_equal(setting.full(), grads)
    setting.step()
    assert_equal(setting.weights(), same_as(device, dtype, grads))


def test_adding_a_larger_tensor_is_refused_as_by_torch():
    setting = Setting("cpu")
    grads = setting.backward(setting.draw())
    with pytest.raises(RuntimeError, match="shape"):
        setting.params[0].grad.add_(torch.ones(3, 6, 8))
    assert_equal(setting.full(), grads)


def test_a_pass_after_step_without_zero_grad_is_refused(device):
    """Torch would add to the gradient of the last call; here that has been used up, and adding to nothing would hide it."""
    setting = Setting(device)
    setting.backward(setting.draw())
    setting.optimizer.step()
    with pytest.raises(RuntimeError, match="zero_grad"):
        setting.backward(setting.draw())
