"""Training loops that are unusual at the wrong moment: what is published during backward, failures, and what must not grow."""

import gc
import os
import resource
import threading
from collections.abc import Callable

import pytest
import torch
from histories import assert_identical
from stress import (
    CALLS,
    PLACES,
    WIDTH,
    Branches,
    Deep,
    Late,
    batch,
    build,
    data,
    device_of,
    gradients,
    late,
    linear,
    squares,
    trained,
    weights,
)
from torch import Tensor, nn
from training import LR, Mirror

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine.transfer import Link

HASTY = dict(score_decay=0.0, select_interval=1, update_interval=2, stagger=False)  # channels change hands all the time


@pytest.fixture(params=PLACES)
def place(request):
    return request.param


@pytest.fixture
def device(place, monkeypatch):
    return device_of(place, monkeypatch)


# Publishes during backward


class Loop:
    """A loop that is linear in the weights, and AdamW beside it."""

    def __init__(self, device: torch.device, **settings) -> None:
        self.model, self.optimizer = build(Branches, device, **settings)
        self.mirror, self.t = Mirror(self.optimizer.param_groups), 0
        self.grads: list[Tensor | None] = [None] * len(self.model.branches)

    def backward(self) -> None:
        """One more micro-batch."""
        linear(self.model, self.t).backward()
        drawn = gradients(self.model, self.t)
        self.grads = [g if old is None else old + g for old, g in zip(self.grads, drawn, strict=True)]
        self.t += 1

    def discard(self) -> None:
        self.optimizer.zero_grad()
        self.grads = [None] * len(self.model.branches)

    def step(self) -> None:
        self.mirror.step(self.grads)
        self.optimizer.step()
        self.discard()


def plain(loop: Loop) -> None:
    loop.backward()
    loop.step()


def accumulate(loop: Loop) -> None:
    loop.backward()
    loop.backward()
    loop.step()


def accumulate_sometimes(loop: Loop) -> None:
    for _ in range(1 + loop.t % 3):
        loop.backward()
    loop.step()


def look_before_step(loop: Loop) -> None:
    loop.backward()
    with torch.no_grad():
        squares(loop.model, loop.t)
    loop.step()


def discard_one(loop: Loop) -> None:
    loop.backward()
    loop.discard()
    loop.backward()
    loop.step()


def discard_all(loop: Loop) -> None:
    loop.backward()
    if loop.t % 3:
        loop.discard()
    loop.step()


def read_state(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.state_dict()
    loop.step()


def read_state_after_step(loop: Loop) -> None:
    loop.backward()
    loop.step()
    if loop.t % 3 == 0:
        loop.optimizer.state_dict()


def show_exact_weights(loop: Loop) -> None:
    loop.backward()
    with loop.optimizer.exact_weights():
        pass
    loop.step()
    if loop.t % 3 == 0:
        with loop.optimizer.exact_weights():
            pass


def flush_before_step(loop: Loop) -> None:
    loop.backward()
    if loop.t % 4 == 0:
        loop.optimizer.flush()
    loop.step()


LOOPS = [
    plain,
    accumulate,
    accumulate_sometimes,
    look_before_step,
    discard_one,
    discard_all,
    read_state,
    read_state_after_step,
    show_exact_weights,
    flush_before_step,
]


def played(loop: Loop, call: Callable[[Loop], None]) -> list[list[Tensor]]:
    seen = []
    for _ in range(CALLS):
        call(loop)
        seen.append(weights(loop.model))
    loop.optimizer.flush()
    seen.append(weights(loop.model))
    loop.mirror.compare("flushed", CALLS)
    loop.optimizer.close()
    return seen


@pytest.mark.parametrize("settings", [dict(), HASTY], ids=["usual", "hasty"])
@pytest.mark.parametrize("call", LOOPS)
def test_loops(place, device, call, settings):
    """AdamW's weights after a flush; the same bits with delays, and those of the CPU's path where torch does the arithmetic."""
    first = played(Loop(device, **settings), call)
    loop = Loop(device, **settings)
    loop.optimizer.engine.delay = Late(loop.optimizer, 1)
    assert_identical(played(loop, call), first)
    if place == "streams":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stallfree.engine.pipeline.link_to", Link)
            assert_identical(played(Loop(device, **settings), call), first)


def test_windows_are_published_during_backward(place, device):
    """The tests above are worth as much as the windows that come early."""
    if place == "cpu":
        pytest.skip("in step() only")
    model, optimizer = build(Branches, device)
    early = 0
    for t in range(CALLS):
        squares(model, t).backward()
        early += sum(window.shown for block in optimizer.engine.blocks for window in block.queue)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    # What closes in a call is due in the next; of few blocks not one does in every call.
    assert early > CALLS // 3


def test_weights_that_backward_still_reads_are_not_published(device):
    """A weight without a gradient in the last call has one in this, after those of its block that were expected."""
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=2, lag=1, full_warm_up_rounds=1, min_numel=0)
    results = []
    for delayed in (False, True):
        torch.manual_seed(0)
        first, second = (nn.Parameter(torch.randn(WIDTH, WIDTH).to(device)) for _ in range(2))
        mirrored = [nn.Parameter(p.detach().clone()) for p in (first, second)]
        optimizer = ZenFlowAdamW([first, second], lr=LR, config=config)
        if delayed:
            optimizer.engine.delay = Late(optimizer, 2)
        for t in range(CALLS):
            x = data(t, device, 4, WIDTH).clone().requires_grad_()
            with torch.no_grad():
                for p, shown in zip(mirrored, (first, second), strict=True):
                    p.copy_(shown)
            for a, b in ((first, second), mirrored):
                (torch.tanh(x if t % 2 else x @ a) @ b).pow(2).sum().backward()
            for p, shown in zip((first, second), mirrored, strict=True):
                assert (p.grad is None) == (shown.grad is None)
                if p.grad is not None:
                    assert torch.equal(optimizer.full_gradient(p), shown.grad), f"call {t + 1}"
                shown.grad = None
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        results.append([p.detach().cpu() for p in (first, second)])
        optimizer.close()
    assert_identical(results[:1], results[1:])


def test_a_graph_that_outlives_its_first_backward(device):
    """Two losses of one forward, the first one's gradients discarded, as in adversarial training: weights stay until step()."""
    model, optimizer = build(Deep, device, full_warm_up_rounds=1)
    for t in range(CALLS):
        out = model(batch(model, t))
        before = weights(model)
        out.pow(2).mean().backward(retain_graph=True)
        assert_identical([weights(model)], [before])
        optimizer.zero_grad()
        (out - 1).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("settings", [dict(), HASTY], ids=["usual", "hasty"])
@pytest.mark.parametrize("at", [3, 6, 7])
def test_a_checkpoint_between_backward_and_step(device, settings, at):
    """With windows published already. The gradients it does not hold are made again."""
    whole = Loop(device, **settings)
    saved, shown, start = None, 0, None
    for call in range(CALLS):
        t = whole.t
        whole.backward()
        if call == at:
            shown = sum(window.shown for block in whole.optimizer.engine.blocks for window in block.queue)
            start, saved = t, clone(whole.optimizer.state_dict())
        whole.step()
    whole.optimizer.flush()
    again = Loop(device, **settings)
    again.backward()
    again.step()
    again.backward()
    again.optimizer.load_state_dict(saved)
    again.discard()
    again.t = start
    for _ in range(at, CALLS):
        again.backward()
        again.step()
    again.optimizer.flush()
    assert_identical([weights(again.model)], [weights(whole.model)])
    for loop in (whole, again):
        loop.optimizer.close()
    assert shown or settings or device.type == "cpu"


def clone(value):
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    return type(value)(clone(item) for item in value) if isinstance(value, (list, tuple)) else value


# Failures in backward


class Broken(torch.autograd.Function):
    """Fails in backward: out of memory on CUDA, anything else on the CPU."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if grad.is_cuda:
            torch.empty(1 << 50, dtype=torch.uint8, device=grad.device)
        raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize(
    "settings", [dict(), dict(block_numel=10_000), dict(preset="zero-offload")], ids=["", "one block", "offload"]
)
@pytest.mark.parametrize("layer", [0, 3])
def test_a_failure_in_the_middle_of_backward(place, device, settings, layer):
    """After zero_grad() training goes on."""
    settings = settings if "preset" in settings else settings | dict(update_interval=2)

    def attempt(model: nn.Module, t: int) -> None:
        if t in (0, 1, 4, 5, 9):
            handle = model.layers[layer].register_forward_hook(lambda module, args, out: Broken.apply(out))
            with pytest.raises(torch.OutOfMemoryError):
                squares(model, 100 + t).backward()
            handle.remove()
            model.zero_grad()

    first = trained(Deep, device, before=attempt, **settings)
    assert_identical(trained(Deep, device, before=attempt, prepare=late(6), **settings), first)
    if place == "cpu":  # elsewhere the attempt has published what it would have published
        assert_identical(first, trained(Deep, device, **settings))


@pytest.mark.parametrize("where", ["split", "down"])
def test_a_failure_in_a_hook(place, device, where):
    """No memory for staging: the gradient is staged again in the next backward pass."""
    failing: dict[str, bool] = {}

    def prepare(optimizer: ZenFlowAdamW) -> None:
        holder = optimizer.engine.blocks[2].half if where == "split" else optimizer.engine.link
        inner = getattr(holder, where)

        def fail(*args, **kwargs):
            if failing.pop("now", False):
                raise torch.OutOfMemoryError("no memory")
            return inner(*args, **kwargs)

        setattr(holder, where, fail)

    def attempt(model: nn.Module, t: int) -> None:
        if t in (1, 4, 8):
            failing["now"] = True
            with pytest.raises(torch.OutOfMemoryError):
                squares(model, 100 + t).backward()
            model.zero_grad()

    first = trained(Deep, device, before=attempt, prepare=prepare)
    assert_identical(trained(Deep, device, before=attempt, prepare=prepare), first)
    if place == "cpu":
        assert_identical(first, trained(Deep, device))


# Steady state


def test_nothing_grows(place, device):
    model, optimizer = build(Deep, device, **HASTY)
    engine = optimizer.engine

    def footprint() -> dict[str, int]:
        gc.collect()
        on_cuda = device.type == "cuda"
        return dict(
            reserved=torch.cuda.memory_reserved() if on_cuda else 0,
            threads=threading.active_count(),
            all_threads=threads_of_the_process(),
            registered=len(getattr(engine.link, "_registered", ())),
            slots=engine.pool.nbytes,
            hooks=len(engine.hooks),
        )

    def train(calls: int) -> None:
        for t in range(calls):
            squares(model, t % 8).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(30)
    before, resident = footprint(), resident_bytes()
    train(200 if device.type == "cuda" else 60)
    assert footprint() == before
    assert resident_bytes() - resident < 16 << 20
    optimizer.close()


def threads_of_the_process() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
