"""Things that go wrong while training: the error says what, and what is left is whole."""

import math
import time

import pytest
import torch
from histories import backward
from torch import nn
from training import LR, PRESETS, mlp, regression

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.kernels.queue import HostError

SETTINGS = dict(topk_ratio=0.25, update_interval=2, full_warm_up_rounds=0, min_numel=0, block_numel=1)


# In the host's work


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize("overlap_step", [False, True])
def test_a_failure_on_the_host_surfaces_in_the_next_step_and_names_the_parameter(device, kernel, overlap_step):
    """Here a step count that is full. The queue's tests have other causes."""
    params = [
        ("fine", nn.Parameter(torch.ones(4, 6, device=device))),
        ("layer.bad", nn.Parameter(torch.ones(6, 4, device=device))),
    ]
    optimizer = ZenFlowAdamW(params, host_kernel=kernel, overlap_step=overlap_step, **SETTINGS)
    optimizer.engine.weights[params[1][1]].host.steps.fill_(2**31 - 1)

    def train() -> None:
        for _ in range(6):
            backward([p for _, p in params], [torch.ones_like(p) for _, p in params])
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)

    with pytest.raises(HostError, match=r"host update of layer\.bad failed"):
        train()
    assert optimizer.metrics()["call"] <= 5
    for call in (optimizer.step, optimizer.flush, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"resume from a checkpoint|host update"):
            call()
    optimizer.close()


# In step(), and where parameters join


@pytest.mark.parametrize("way", ["add_param_group", "a frozen one trains"])
def test_memory_that_is_gone_while_parameters_join_fails_the_optimizer_for_good(way, monkeypatch):
    frozen = nn.Parameter(torch.ones(6, 4), requires_grad=False)
    optimizer = ZenFlowAdamW([nn.Parameter(torch.ones(4, 6)), frozen], **SETTINGS)
    backward([optimizer.param_groups[0]["params"][0]], [torch.ones(4, 6)])
    optimizer.step()
    optimizer.zero_grad()

    def reserve(blocks):
        raise torch.OutOfMemoryError("fragmented")

    monkeypatch.setattr(optimizer.engine.link, "reserve", reserve)
    if way == "add_param_group":
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(4, 4))]))
    else:
        backward([frozen.requires_grad_()], [torch.ones(6, 4)])
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    monkeypatch.undo()
    assert len(optimizer.param_groups) == 1
    for call in (optimizer.step, optimizer.flush, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="resume from a checkpoint"):
            call()
    optimizer.close()


def linear(model, t):
    """A loss whose gradients do not depend on the weights."""
    generator = torch.Generator().manual_seed(t)
    return sum((p * torch.randn(p.shape, generator=generator).to(p)).sum() for p in model.parameters())


class Twins:
    """Two runs alike, of which one has accidents that raise; they must end alike.

    On a GPU weights that are due are shown during backward, so a backward pass that counts for nothing leaves newer weights
    for the next forward pass; gradients there must not depend on them.
    """

    def __init__(self, device, settings) -> None:
        self.loss = regression if device.type == "cpu" else linear
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(mlp(device))
            self.optimizers.append(ZenFlowAdamW(self.models[-1].named_parameters(), lr=LR, config=ZenFlowConfig(**settings)))
        self.t = 0

    def steps(self, calls: int = 4) -> None:
        for _ in range(calls):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                self.loss(model, self.t).backward()
                optimizer.step()
                optimizer.zero_grad()
            self.t += 1

    def assert_alike(self) -> None:
        self.steps(5)
        for optimizer in self.optimizers:
            optimizer.flush()
        for mine, other in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.equal(mine, other)
        assert self.optimizers[0].metrics()["call"] == self.optimizers[1].metrics()["call"]
        for optimizer in self.optimizers:
            optimizer.close()


def a_gradient_of_the_wrong_parameter(model, optimizer) -> None:
    model[0].weight.grad, model[3].weight.grad = model[3].weight.grad, model[0].weight.grad
    try:
        optimizer.step()
    finally:
        model[0].weight.grad, model[3].weight.grad = model[3].weight.grad, model[0].weight.grad


def a_setting_that_is_no_number(model, optimizer) -> None:
    group, lr = optimizer.param_groups[0], optimizer.param_groups[0]["lr"]
    group["lr"] = math.nan
    try:
        optimizer.step()
    finally:
        group["lr"] = lr


def a_closure_that_raises(model, optimizer) -> None:
    def closure():
        raise ZeroDivisionError("in the closure")

    optimizer.step(closure)


def a_closure_that_raises_after_backward(model, optimizer) -> None:
    def closure():
        optimizer.zero_grad()
        regression(model, 99).backward()
        raise ZeroDivisionError("in the closure")

    optimizer.step(closure)


def a_hook_that_raises(model, optimizer) -> None:
    def hook(*_):
        raise ZeroDivisionError("in the hook")

    handle = optimizer.register_step_pre_hook(hook)
    try:
        optimizer.step()
    finally:
        handle.remove()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "accident",
    [
        a_gradient_of_the_wrong_parameter,
        a_setting_that_is_no_number,
        a_closure_that_raises,
        a_closure_that_raises_after_backward,
        a_hook_that_raises,
    ],
)
def test_after_a_step_that_raised_training_goes_on(device, preset, accident):
    """The step counts for nothing: the gradients are still there, or can be made again."""
    twins = Twins(device, PRESETS[preset])
    model, optimizer = twins.models[0], twins.optimizers[0]
    for _ in range(4):
        twins.steps(3)
        twins.loss(model, twins.t).backward()
        with pytest.raises((RuntimeError, TypeError, ValueError, ZeroDivisionError)):
            accident(model, optimizer)
        optimizer.zero_grad()
    twins.assert_alike()


def test_an_exception_in_backward_leaves_a_whole_optimizer(device):
    """After some blocks have been staged, and some not."""
    twins = Twins(device, PRESETS["stallfree"])
    model, optimizer = twins.models[0], twins.optimizers[0]

    def fail(grad):
        raise ZeroDivisionError("in backward")

    for layer in (model[0], model[3], model[5]):
        twins.steps(3)
        handle = layer.weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            twins.loss(model, 99).backward()
        handle.remove()
        optimizer.zero_grad()
    twins.assert_alike()
