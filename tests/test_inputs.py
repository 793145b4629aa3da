"""Bad input: a clear error that names the culprit and the way out, before anything is changed."""

import copy
import gc
import math
import os
import pickle

import pytest
import torch
from histories import backward
from torch import nn

import stallfree.limits
from stallfree import ZenFlowAdamW, ZenFlowConfig

NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SMALL = dict(min_numel=0, full_warm_up_rounds=0, update_interval=2)


def needs_cuda(test):
    return NEEDS_CUDA[0](NEEDS_CUDA[1](test))


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_an_optimizer_of_parameters_that_nobody_trains_says_so_once(caplog, trained):
    """As one that was built before fully_shard, which replaces them. trained: how many of two do have gradients."""
    params = [parameter(4, 6), parameter(3)]
    optimizer = ZenFlowAdamW([*params], **SMALL)
    for _ in range(6):
        backward(params[2 - trained :], [torch.ones_like(param) for param in params[2 - trained :]])
        optimizer.step()
        optimizer.zero_grad()
    warned = [record.getMessage() for record in caplog.records if "has a gradient in call 3" in record.getMessage()]
    assert len(warned) == (not trained)
    assert all("built before fully_shard" in message for message in warned)
    optimizer.close()


def parameter(*shape: int, dtype: torch.dtype = torch.float32, device="cpu") -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (4, 6), dtype=dtype, device=device))


def stepped(optimizer: ZenFlowAdamW, calls: int = 3) -> ZenFlowAdamW:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for t in range(calls):
        backward(params, [torch.full_like(p, t + 1.0) for p in params])
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# Parameters


def test_no_parameters():
    with pytest.raises(ValueError, match="no parameters"):
        ZenFlowAdamW([])


def test_all_parameters_frozen():
    with pytest.raises(ValueError, match="requires_grad"):
        ZenFlowAdamW([parameter().requires_grad_(False), parameter(3).requires_grad_(False)])


def test_a_parameter_twice():
    p = parameter()
    for params in ([p, p], [dict(params=[p]), dict(params=[p], lr=0.1)]):
        with pytest.raises(ValueError, match="twice"):
            ZenFlowAdamW(params, **SMALL)


def test_a_tensor_instead_of_a_list():
    with pytest.raises(TypeError, match="iterable"):
        ZenFlowAdamW(parameter(), **SMALL)


def test_a_tensor_that_is_no_leaf():
    with pytest.raises(ValueError, match="leaf"):
        ZenFlowAdamW([parameter() * 2], **SMALL)


def test_inference_mode_is_no_place_to_build_in():
    param = parameter()
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"outside of torch\.inference_mode\(\)"):
        ZenFlowAdamW([param])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_a_dtype_that_is_not_trained_names_the_parameter(dtype):
    with pytest.raises((TypeError, ValueError), match=r"proj\.weight.*" + str(dtype).removeprefix("torch.")):
        ZenFlowAdamW([("fine", parameter()), ("proj.weight", parameter(dtype=dtype))], **SMALL)


def test_a_frozen_parameter_may_have_any_dtype():
    """A quantised base beside adapters; what cannot be trained is refused when it is unfrozen."""
    base = nn.Parameter(torch.ones(4, 4, dtype=torch.uint8), requires_grad=False)
    wide, adapter = parameter(dtype=torch.float64).requires_grad_(False), parameter()
    optimizer = ZenFlowAdamW([("base", base), ("wide", wide), ("adapter", adapter)], **SMALL)
    backward([adapter], [torch.ones_like(adapter)])
    optimizer.step()
    optimizer.zero_grad()
    wide.requires_grad_()
    backward([adapter, wide], [torch.ones_like(adapter), torch.ones_like(wide)])
    before = adapter.detach().clone()
    with pytest.raises(TypeError, match=r"wide.*float64"):
        optimizer.step()
    assert torch.equal(adapter.detach(), before)
    wide.grad = None
    optimizer.step()
    optimizer.close()


def test_parameters_without_an_order_are_refused():
    with pytest.raises(TypeError, match="order"):
        ZenFlowAdamW([dict(params={parameter(), parameter()})], **SMALL)
    optimizer = ZenFlowAdamW([parameter()], **SMALL)
    with pytest.raises(TypeError, match="order"):
        optimizer.add_param_group(dict(params={parameter(3)}))
    assert len(optimizer.param_groups) == 1
    optimizer.close()


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_a_parameter_without_elements_is_no_obstacle(shape):
    others = [[parameter(), parameter(5)] for _ in range(2)]
    stepped(ZenFlowAdamW(others[0], **SMALL)).flush()
    stepped(ZenFlowAdamW([nn.Parameter(torch.ones(shape)), *others[1]], **SMALL)).flush()
    for with_it, alone in zip(others[1], others[0], strict=True):
        assert torch.equal(with_it, alone)


@needs_cuda
def test_parameters_on_several_devices():
    with pytest.raises(ValueError, match=r"(?s)device.*second"):
        ZenFlowAdamW([("first", parameter(device="cuda")), ("second", parameter())], **SMALL)


def test_meta_parameters_must_be_materialised_first():
    with pytest.raises(ValueError, match="meta"):
        ZenFlowAdamW([("late", parameter(device="meta"))], **SMALL)


def test_sparse_gradients_name_the_parameter_and_the_way_out():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = ZenFlowAdamW(table.named_parameters(), **SMALL)
    before = table.weight.detach().clone()
    with pytest.raises(TypeError, match=r"(?s)weight.*sparse=False"):
        table(torch.tensor([1, 2])).sum().backward()
    assert torch.equal(table.weight.detach(), before)
    optimizer.close()


# Settings


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_hyperparameters_must_be_finite_and_not_negative(name, value):
    with pytest.raises(ValueError, match=rf"(?i){name.replace('_', '.')}"):
        ZenFlowAdamW([parameter()], **{name: value}, **SMALL)


@pytest.mark.parametrize("betas", [(math.nan, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.inf)])
def test_betas_must_be_in_range(betas):
    with pytest.raises(ValueError, match=r"(?i)beta"):
        ZenFlowAdamW([parameter()], betas=betas, **SMALL)


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_text_is_no_number(name):
    """YAML reads 2e-5 as text."""
    with pytest.raises(TypeError, match=rf"^{name} must be a number; got the text '2e-5'$"):
        ZenFlowAdamW([parameter()], **SMALL | {name: "2e-5"})


@pytest.mark.parametrize("value", [None, torch.ones(2)])
def test_a_setting_is_one_number(value):
    with pytest.raises(TypeError, match=r"^lr must be one number; got "):
        ZenFlowAdamW([parameter()], **SMALL | dict(lr=value))


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999), "ab", ZenFlowConfig()])
def test_betas_are_two_numbers(betas):
    with pytest.raises(TypeError, match=r"^betas must be two numbers; got "):
        ZenFlowAdamW([parameter()], 1e-3, betas, **SMALL)


def test_a_group_s_own_settings_are_checked():
    with pytest.raises(ValueError, match=r"(?i)lr|learning rate"):
        ZenFlowAdamW([dict(params=[parameter()], lr=math.nan)], **SMALL)


@pytest.mark.parametrize(
    "name, value", [("lr", math.nan), ("weight_decay", math.inf), ("betas", (0.9, math.nan)), ("eps", -1.0)]
)
def test_a_setting_that_goes_bad_in_mid_run_stops_the_step_before_it_changes_anything(name, value):
    p = parameter()
    optimizer = stepped(ZenFlowAdamW([p], topk_ratio=0.5, **SMALL))
    before, good = p.detach().clone(), optimizer.param_groups[0][name]
    backward([p], [torch.ones_like(p)])
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=rf"(?i){name.replace('_', '.')}"):
        optimizer.step()
    assert torch.equal(p.detach(), before)
    assert optimizer.metrics()["call"] == 3
    optimizer.param_groups[0][name] = good
    optimizer.step()
    assert optimizer.metrics()["call"] == 4
    optimizer.close()


def test_a_cpu_tensor_as_learning_rate_is_read():
    p, q = parameter(), parameter()
    ours = stepped(ZenFlowAdamW([p], lr=torch.tensor(0.25), **SMALL))
    same = stepped(ZenFlowAdamW([q], lr=0.25, **SMALL))
    ours.flush(), same.flush()
    assert torch.equal(p, q)


@needs_cuda
def test_a_cuda_tensor_as_learning_rate_is_refused():
    with pytest.raises(ValueError, match=r"(?s)lr.*(float|CPU)"):
        ZenFlowAdamW([parameter(device="cuda")], lr=torch.tensor(0.1, device="cuda"), **SMALL)


@pytest.mark.parametrize("overrides", [dict(topk_ratio=1.5), dict(topk_ratio=-0.1), dict(update_interval=0), dict(lag=-1)])
def test_settings_out_of_range_are_named(overrides):
    with pytest.raises(ValueError, match=next(iter(overrides))):
        ZenFlowAdamW([parameter()], **overrides)


def test_an_unknown_setting_is_named_with_the_nearest_one():
    with pytest.raises((TypeError, ValueError), match=r"(?s)topk_ration.*topk_ratio"):
        ZenFlowAdamW([parameter()], topk_ration=0.1)


def test_overrides_go_on_top_of_a_config():
    config = ZenFlowConfig(topk_ratio=0.5, full_warm_up_rounds=0)
    optimizer = stepped(ZenFlowAdamW([parameter()], config=config, update_interval=3, min_numel=0))
    assert optimizer.metrics()["interval"] == 3
    with pytest.raises(TypeError, match="config"):
        ZenFlowAdamW([parameter()], config=dict(topk_ratio=0.5))
    optimizer.close()


def test_stronghold_refuses_clipping():
    with pytest.raises(ValueError, match=r"(?s)max_grad_norm.*zero-offload"):
        ZenFlowAdamW([parameter()], preset="stronghold", max_grad_norm=1.0)
    p = parameter()
    optimizer = ZenFlowAdamW([p], preset="stronghold", min_numel=0)
    backward([p], [torch.ones_like(p)])
    with pytest.raises((RuntimeError, ValueError), match=r"stronghold|update_in_backward"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.close()


@pytest.mark.parametrize("interval", [0, -1, 2.5, 9])
def test_a_new_interval_must_fit_what_was_reserved(interval):
    optimizer = ZenFlowAdamW([parameter()], **SMALL, max_update_interval=8)
    with pytest.raises((ValueError, TypeError), match="interval"):
        optimizer.set_update_interval(interval)
    optimizer.set_update_interval(8)
    assert stepped(optimizer, 5).metrics()["interval"] == 8
    optimizer.close()


@pytest.mark.parametrize("max_norm", [math.nan, -1.0])
def test_a_bad_max_norm_is_refused(max_norm):
    p = parameter()
    optimizer = ZenFlowAdamW([p], **SMALL)
    backward([p], [torch.ones_like(p)])
    with pytest.raises(ValueError, match="max_norm"):
        optimizer.clip_grad_norm_(max_norm)
    optimizer.close()


# Memory


def test_too_little_host_memory_is_said_before_it_is_allocated(monkeypatch):
    """The message says how much is needed and how much there is."""
    monkeypatch.setattr(stallfree.limits, "available_host_bytes", lambda: 10 << 20)
    with pytest.raises((MemoryError, ValueError, RuntimeError), match=r"(?s)host memory.*\d.*(MiB|GiB|MB|GB)"):
        ZenFlowAdamW([nn.Parameter(torch.ones(2048, 1024))], topk_ratio=0.1)
    p = parameter()
    stepped(ZenFlowAdamW([p], **SMALL)).close()  # a small one still fits
    assert not torch.equal(p.detach(), torch.ones(4, 6))


# What changes under the optimizer


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda p: setattr(p, "data", torch.ones(6, 4)), "shape"),
        (lambda p: setattr(p, "data", p.data.bfloat16()), "dtype|bfloat16"),
        pytest.param(lambda p: setattr(p, "data", p.data.cuda()), "cuda", marks=NEEDS_CUDA),
    ],
)
def test_a_parameter_that_moves_to_another_shape_dtype_or_device_is_named(change, word):
    a, b = parameter(), parameter()
    optimizer = stepped(ZenFlowAdamW([("stays", a), ("moves", b)], topk_ratio=0.5, **SMALL))
    before = a.detach().clone()
    change(b)
    backward([a], [torch.ones_like(a)])
    with pytest.raises(RuntimeError, match=rf"(?s)moves.*({word})"):
        optimizer.step()
    assert torch.equal(a.detach(), before)
    optimizer.close()


@pytest.mark.parametrize("taken", [0, 1])
def test_a_parameter_that_was_taken_out_of_its_group_is_named_if_it_has_a_gradient(taken):
    params = [parameter(), parameter(5), parameter()]
    optimizer = stepped(ZenFlowAdamW(zip(("a", "b", "c"), params, strict=True), lr=1e-2, **SMALL))
    group = optimizer.param_groups[0]
    del group["params"][taken], group["param_names"][taken]
    backward(params, [torch.ones_like(p) for p in params])
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=rf"{'ab'[taken]} .*in no group"):
        optimizer.step()
    assert all(torch.equal(p, then) for p, then in zip(params, before, strict=True))
    params[taken].grad = None
    optimizer.step()
    optimizer.close()


def test_a_closed_optimizer_says_so():
    p = parameter()
    optimizer = stepped(ZenFlowAdamW([p], **SMALL))
    optimizer.close()
    optimizer.close()
    backward([p], [torch.ones_like(p)])
    assert type(p.grad) is torch.Tensor  # the hooks are gone
    with pytest.raises(RuntimeError, match="close"):
        optimizer.step()


def test_a_deleted_optimizer_leaves_no_thread_and_no_hook():
    gc.collect()  # what earlier tests left behind
    p, before = parameter(), len(os.listdir("/proc/self/task"))
    optimizer = stepped(ZenFlowAdamW([p], **SMALL))
    assert len(os.listdir("/proc/self/task")) > before
    del optimizer
    gc.collect()
    assert len(os.listdir("/proc/self/task")) <= before
    backward([p], [torch.ones_like(p)])
    assert type(p.grad) is torch.Tensor
    assert torch.equal(p.grad, torch.ones_like(p))


def test_an_optimizer_cannot_be_copied():
    optimizer = ZenFlowAdamW([parameter()], **SMALL)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            attempt(optimizer)
    optimizer.close()
