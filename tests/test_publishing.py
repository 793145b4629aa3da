"""What is published during backward: beside computation, in order, and waited for before anybody reads the weights."""

import random
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from histories import accumulate, assert_identical
from large import large
from streams import StandIn, Stream, use, use_streams

from stallfree import ZenFlowAdamW
from stallfree.engine.device_link import DeviceLink
from stallfree.engine.publishing import Publishing
from stallfree.engine.window import Piece, Window


def chained(params: list[torch.nn.Parameter], t: int, broken: bool = False) -> None:
    """A backward pass that comes to the last parameter first, and may not come to the first one."""
    value = torch.full((), 1.0 + t)
    for place, param in enumerate(params):
        value = value + (param * (1 + place + t)).sum()
        if broken and place == 0:
            value = Broken.apply(value)
    value.backward()


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("no gradient")


WHOLE = dict(topk_ratio=0.0, stagger=False)  # all blocks close in the same call


def shown(optimizer: ZenFlowAdamW) -> bool:
    """Whether everything is that has been published beside computation."""
    link = optimizer.engine.link
    return not isinstance(link, DeviceLink) or link._shown.now().passed


def test_backward_goes_on_while_the_host_is_late(monkeypatch):
    """What is published in it is waited for at its end."""
    made: list[StandIn] = []
    use_streams(monkeypatch, lambda: made.append(StandIn()) or made[-1], 1 << 20)
    params, optimizer = large(**WHOLE)
    link, expect, late, over = optimizer.engine.link, Publishing.expect, threading.Event(), []

    def expected(self: Publishing, blocks, call: int) -> None:
        if call == 7:
            made[0].to_device.todo.put(lambda: late.wait(10))
        expect(self, blocks, call)

    def last(_: torch.Tensor) -> None:
        over.append(link._shown.now().passed)
        if len(over) == 7:
            late.set()

    monkeypatch.setattr(Publishing, "expect", expected)
    params[0].register_post_accumulate_grad_hook(last)
    for t in range(7):
        before = [param.detach().clone() for param in params]
        chained(params, t)
        assert link._shown.now().passed
        assert all(map(torch.equal, before, params)) == (t not in (2, 4, 6)), "windows are due in every second call"
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    assert late.is_set()
    assert not over[6]


@pytest.mark.parametrize("staging_bytes", [1024, 1 << 20])
def test_after_backward_the_weights_are_the_same_however_late_they_come(monkeypatch, staging_bytes):
    def seen() -> list[list[torch.Tensor]]:
        params, optimizer = large(topk_ratio=0.0)
        weights = []
        for t in range(10):
            chained(params, t)
            weights.append([param.detach().clone() for param in params])
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return weights

    use(monkeypatch, staging_bytes=staging_bytes)
    expected = seen()
    for number in range(4):
        rnd = random.Random(number)
        use(monkeypatch, lambda rnd=rnd: time.sleep(rnd.random() * rnd.choice([0.0, 0.0, 2e-3])), staging_bytes)
        assert_identical(seen(), expected)


def test_a_backward_pass_that_fails_leaves_nothing_behind(monkeypatch):
    """Torch calls no callback at its end, but anybody may read the weights then, too."""

    def weights() -> list[torch.Tensor]:
        params, optimizer = large(**WHOLE)
        for t in range(12):
            if t % 3 == 2:
                with pytest.raises(ArithmeticError):
                    chained(params, t, broken=True)
                assert shown(optimizer)
                optimizer.zero_grad()
            chained(params, t)
            assert shown(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        optimizer.close()
        return [param.detach().clone() for param in params]

    expected = weights()
    use(monkeypatch, lambda: time.sleep(2e-4), staging_bytes=1 << 20)
    assert_identical([weights()], [expected])


@pytest.mark.parametrize("when", ["in a callback", "after backward"])
def test_hooks_that_somebody_calls(monkeypatch, when):
    """As fully_shard does in a callback of its own, which may come after that of another model, and so after ours."""
    use(monkeypatch, lambda: time.sleep(2e-4), staging_bytes=1 << 20)
    params, optimizer = large(**WHOLE)
    first, after = params[0], []

    def call_hooks() -> None:
        first.grad = torch.ones_like(first)
        for hook in list((first._post_accumulate_grad_hooks or {}).values()):
            hook(first)

    def call_later(_: torch.Tensor) -> None:
        if when == "in a callback":
            torch.autograd.Variable._execution_engine.queue_callback(call_hooks)

    params[1].register_post_accumulate_grad_hook(call_later)
    for t in range(12):
        chained(params[1:], t)
        if when == "after backward":
            call_hooks()
        after.append(shown(optimizer))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    assert all(after)


def test_every_stream_that_computes_waits_for_what_was_published():
    streams = StandIn()
    ours, theirs = Stream(streams.to_host.pause), Stream(streams.to_host.pause)
    link, current = DeviceLink(torch.device("cpu"), streams), ours
    streams.current, streams.current_handle = lambda: current, lambda: id(current)
    link.follow()
    point = link._shown.next()
    current = theirs  # of somebody who reads the state during backward, or of autograd when backward has failed
    link.join_showing()
    reads = [streams.record(stream) for stream in (ours, theirs)]
    current = ours
    link.join_showing()
    reads.append(streams.record(ours))
    time.sleep(0.05)
    assert not any(read.query() for read in reads)
    streams.enqueue(streams.raise_to(streams.showing, point))
    for read in reads:
        read.synchronize()
    for stream in (ours, theirs):
        stream.todo.put(None)
    link.close()


def test_memory_of_a_ring_that_has_grown_is_held_until_it_has_been_read(monkeypatch):
    held: set[int] = set()

    class Holding(StandIn):
        def hold(self, tensor: torch.Tensor, stream: Stream | None) -> None:
            if stream is self.showing:
                held.add(tensor.untyped_storage().data_ptr())

    use_streams(monkeypatch, Holding, 1 << 20)
    params, optimizer = large(**WHOLE)
    ring = optimizer.engine.link._up_ring
    for t in range(4):
        chained(params, t)
        optimizer.step()
        optimizer.zero_grad()
    held.clear()
    old = ring._memory
    optimizer.add_param_group(dict(params=[("added.weight", torch.nn.Parameter(torch.ones(64, 64)))]))
    assert ring._memory is not old
    chained(params, 4)
    assert old.data_ptr() in held
    optimizer.close()


@pytest.mark.parametrize("staging_bytes", [600, 1 << 20])
def test_a_backward_pass_inside_exact_weights_publishes_nothing(monkeypatch, staging_bytes):
    def weights() -> list[torch.Tensor]:
        params, optimizer = large(topk_ratio=0.0, full_warm_up_rounds=0, stagger=False)
        for t in range(8):
            with optimizer.exact_weights() if t == 6 else nullcontext():
                accumulate(params, t)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return [param.detach().clone() for param in params]

    expected = weights()
    use(monkeypatch, staging_bytes=staging_bytes)
    assert_identical([weights()], [expected])


def test_windows_of_a_block_are_shown_one_after_the_other():
    """Also if there is no room for the rest of the first, but for a smaller piece of the second."""
    room, shown = 1, []

    def begin_up(values: torch.Tensor, work: object) -> object | None:
        return SimpleNamespace(point=None) if values.numel() <= room else None

    def publish(layout: object, targets: object, params: object, values: torch.Tensor, low: int) -> None:
        shown.append((int(values[0]), low))

    def window(number: float) -> Window:
        pieces = [Piece(0, torch.full((1,), number)), Piece(1, torch.full((4,), number))]
        return Window([], 1, 0.0, SimpleNamespace(layout=None, targets=None), pieces)

    windows = [window(1.0), window(2.0)]
    link = SimpleNamespace(begin_up=begin_up, up_showing=lambda values, work, arrival: nullcontext(values))
    block = SimpleNamespace(weights=[None], block=SimpleNamespace(shards=[None]), due=lambda call: windows)
    block.give_back = lambda slots, read: None
    publishing = Publishing(link, SimpleNamespace(publish=publish))
    publishing.expect([block], 1)
    publishing.show_arrived(block)
    assert shown == [(1, 0)]
    room = 4
    publishing.show_arrived(block)
    assert shown == [(1, 0), (1, 1), (2, 0), (2, 1)]
