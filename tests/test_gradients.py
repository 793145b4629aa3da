"""What stands in `.grad` between backward and step, and what user code may do with it."""

import copy
import pickle
import weakref

import pytest
import torch
from histories import backward
from torch import nn

from stallfree import ZenFlowAdamW
from stallfree.engine.gradient import StagedGradient

SETTINGS = dict(lr=1e-2, topk_ratio=0.25, update_interval=2, full_warm_up_rounds=1, select_interval=3, min_numel=0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Setting:
    """Two channelled parameters and a resident one, after `calls` calls; gradients come from a generator."""

    def __init__(self, device, dtype: torch.dtype = torch.float32, calls: int = 3, **overrides) -> None:
        self.generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(6, 8, generator=self.generator), torch.randn(5, 4, 3, generator=self.generator)]
        self.params = [nn.Parameter(w.to(device, dtype)) for w in [*weights, torch.zeros(7)]]
        self.optimizer = ZenFlowAdamW(zip(("a.weight", "b.weight", "c.bias"), self.params, strict=True), **SETTINGS | overrides)
        for _ in range(calls):
            self.backward(self.draw())
            self.step()

    def draw(self) -> list[torch.Tensor]:
        return [torch.randn(p.shape, generator=self.generator).to(p) for p in self.params]

    def backward(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        backward(self.params, grads)
        return grads

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        self.optimizer.flush()
        return [p.detach().cpu().clone() for p in self.params]

    def full(self) -> list[torch.Tensor]:
        return [self.optimizer.full_gradient(p) for p in self.params]


def same_as(device, dtype: torch.dtype, grads: list[torch.Tensor], **overrides) -> list[torch.Tensor]:
    """The weights of a setting whose fourth call saw these gradients in one plain backward pass."""
    plain = Setting(device, dtype, **overrides)
    plain.draw()
    plain.backward(grads)
    plain.step()
    return plain.weights()


def assert_equal(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e), (a.double() - e.double()).abs().max()


# Reading


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


# Scaling and clipping


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


# Zeroing


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


# Accumulation


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
        before = setting.optimizer.metrics()["restages"]
        for _ in range(passes):
            setting.backward(setting.draw())
        setting.step()
        counts.append(setting.optimizer.metrics()["restages"] - before)
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


# Handles that are not this optimizer's gradient of this parameter in this call


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
