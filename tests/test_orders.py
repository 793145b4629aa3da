"""Nothing races: whatever the engine asks of streams and of the host, something orders accesses to the same bytes."""

from collections.abc import Iterator, Mapping

import ordered_streams
import pytest
import torch
from histories import Call, History, Player, assert_identical, histories
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from orders import COMPUTING, Orders, Watch
from torch import Tensor

from stallfree import ZenFlowConfig
from stallfree.engine import slots, window
from stallfree.engine.device_link import DeviceLink
from stallfree.engine.slots import Until
from stallfree.engine.window import BlockState, Window

Writes = Mapping[int, int]  # by call: which weight is written
NONE: Writes = {}
REDUCING = "the stream that reduces"
FEWER = settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Use(torch.autograd.Function):
    """A layer: forward and backward read the weight, and its gradient is `grad`; on another stream, if `apart`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, grad: Tensor, on: Orders, apart: bool, kept: list[Tensor] | None) -> Tensor:
        ctx.weight, ctx.grad, ctx.on, ctx.apart, ctx.kept = weight, grad, on, apart, kept
        with on.acting(COMPUTING):
            return x + (weight * grad).sum()

    @staticmethod
    def backward(ctx, up: Tensor) -> tuple[Tensor | None, ...]:
        on = ctx.on
        with on.acting(COMPUTING):
            ctx.weight.sum()
        if ctx.apart:  # as fully_shard does: hooks come on the stream that reduces, and computation waits for it at the end
            if on.current == COMPUTING:
                torch.autograd.Variable._execution_engine.queue_callback(lambda: join(on))
            on.learn(REDUCING, on.moment(COMPUTING))
            on.current = REDUCING
        grad = on.memory(ctx.grad, on.current)
        with on.acting(on.current):
            grad.copy_(ctx.grad)
        if ctx.kept is not None:
            ctx.kept.append(grad.view(-1))  # its memory: the tensor itself would be cloned by autograd
        return up, grad, None, None, None, None


def join(on: Orders) -> None:
    on.current = COMPUTING
    on.learn(COMPUTING, on.moment(REDUCING))


class Written(Player):
    """Plays a history in some of whose calls somebody writes a weight, between backward and `step()`: not by what it
    was, for on a device more is published by then."""

    def __init__(self, history: History, writes: Writes) -> None:
        super().__init__(history, overlap_step=False)
        self.writes = writes

    def clip(self) -> None:
        super().clip()
        if self.t in self.writes:
            with torch.no_grad():
                self.params[self.writes[self.t] % len(self.params)].fill_(0.1 * self.t)


class InOrder(Written):
    """Lets computation read every weight at each of its turns; now and then gradients are kept, and written a call later."""

    def __init__(self, history: History, writes: Writes, on: Orders, apart: bool) -> None:
        super().__init__(history, writes)
        self.on, self.apart = on, apart
        self.kept: dict[int, list[Tensor]] = {}  # by call
        ordered_streams.watch(self.optimizer, on)

    def backward(self) -> None:
        self.on.reuse(COMPUTING)  # forward
        x = torch.zeros((), requires_grad=True)
        grads = [(p, g) for p, g in zip(self.params, self.history.grads(self.t, self.params), strict=True) if g is not None]
        for weight, grad in grads:
            kept = self.kept.setdefault(self.t, []) if self.t % 3 == 1 else None
            x = Use.apply(x, weight, grad, self.on, self.apart, kept)
        if grads:
            x.backward()

    def step(self) -> None:
        super().step()
        for memory in self.kept.pop(self.t - 2, ()):  # self.t is the next call already
            memory.zero_()
        for weight in self.params:
            weight.sum()


def play(
    monkeypatch, history: History, on: Orders, apart: bool, staging_bytes: int, portions: int = 2, writes: Writes = NONE
) -> list[list[Tensor]]:
    with monkeypatch.context() as patch:
        patch.setattr(window, "PORTIONS", portions)
        patch.setattr(slots, "PAGE", 64)  # small cells, too
        ordered_streams.use(patch, on, staging_bytes)
        player = InOrder(history, writes, on, apart)
        try:
            with Watch(on):
                seen = [*player.play(), player.flushed()]
        finally:
            player.close()
    return seen


@given(
    history=histories(dtypes=("fp32", "bf16"), most_calls=14, host_kernel="torch"),
    apart=st.booleans(),
    staging_bytes=st.sampled_from([0, 300, 700, 3000, 1 << 20]),
    portions=st.sampled_from([1, 2, 2, 3]),
    observed=st.sampled_from([0.0, 0.0, 0.3]),
    first_count=st.sampled_from([0, 0, -20, (1 << 31) - 20]),
    seed=st.integers(0, 99),
    writes=st.dictionaries(st.integers(0, 13), st.integers(0, 3), max_size=2),
)
@FEWER
def test_nothing_races(monkeypatch, history, apart, staging_bytes, portions, observed, first_count, seed, writes):
    """And the weights are those of the way without streams."""
    on = Orders(seed, first_count)
    on.observed = observed
    seen = play(monkeypatch, history, on, apart, staging_bytes, portions, writes)
    assert not on.races
    plain = Written(history, writes)
    assert_identical(seen, [*plain.play(), plain.flushed()])
    plain.close()


# The same histories with something left out


def in_order(calls: tuple[Call, ...], **changes) -> History:
    settings = dict(topk_ratio=0.25, update_interval=3, max_update_interval=3, select_interval=3, full_warm_up_rounds=2)
    settings |= dict(min_numel=0, block_numel=1, host_kernel="torch") | changes
    return History(shapes=((6, 8), (8, 6), (12, 8), (8, 12), (30, 20)), calls=calls, config=ZenFlowConfig(**settings), seed=1)


def flushed_then_idle(flushes: frozenset[int], last: int, **changes) -> History:
    """No gradient after some call: the host publishes its masters all the same, and is the first to write a slot."""
    calls = tuple(
        Call(before="flush" if t in flushes else None, missing=frozenset(range(5) if t > last else ())) for t in range(18)
    )
    return in_order(calls, lag=3, max_update_interval=2, **changes)


CASES = [  # history, whether gradients come on another stream, staging memory: less than a block, than the largest one, for all
    (in_order((Call(),) * 12), False, 700),
    (in_order((Call(),) * 12), True, 1 << 20),
    (in_order(tuple(Call(missing=frozenset([t % 5])) for t in range(16)), update_interval=2), False, 3000),
    (flushed_then_idle(frozenset({3, 6}), 6, update_interval=1, topk_ratio=0.0), False, 1 << 20),
    (flushed_then_idle(frozenset({4, 5, 6}), 7, update_interval=2), False, 700),
]


def races(monkeypatch, without: str = "") -> Iterator[str]:
    for number, (history, apart, staging_bytes) in enumerate(CASES):
        on = Orders(number)
        on.without = without
        play(monkeypatch, history, on, apart, staging_bytes)
        yield from on.races


def test_every_place_that_lets_a_stream_wait_is_known(monkeypatch):
    waits = set()
    for history, apart, staging_bytes in CASES:
        on = Orders(0)
        play(monkeypatch, history, on, apart, staging_bytes)
        assert not on.races
        waits |= on.waits
    assert waits == set(WAITS)


WAITS = {
    "DeviceLink._computing": "the stream that shows",
    "DeviceLink._copy_up": "the host",
    "DeviceLink.begin_up": "staging memory on the way up",
    "DeviceLink.begin_call": "the computing stream does zero_",
    "DeviceLink.beside": "the stream beside",
    "DeviceLink.down": "the stream down",
    "DeviceLink.hold_gates": "of the stream up",
    "DeviceLink.join_showing": "of the stream that shows",
    "DeviceLink.take": "memory for selected gradients",
    "DeviceLink.take_back": "of the stream up",
    "DeviceLink.up": "of the stream up",
    "DeviceLink.up_showing": "the stream that shows does",
    "DeviceLink.wait_down": "the launching thread does",
    "Ring.take": "staging memory on the way down",
}


@pytest.mark.parametrize("place, words", WAITS.items(), ids=WAITS)
def test_without_a_wait_there_is_a_race(monkeypatch, place, words):
    """So none is there for nothing, and none could be lost unnoticed."""
    assert any(words in race for race in races(monkeypatch, without=place))


def give_all_with_the_first_portion(self, done):
    read, done.calls = done.calls[1:], done.calls[:1]
    self.pool.give([call.slot for call in read if call.slot], [Until(1 << 30, point) for _, point in done.replayed[:1]])


@pytest.mark.parametrize(
    "of, name, instead, words",
    [
        (slots.Slot, "after", (), "of the host"),
        (DeviceLink, "gates", lambda self, sent=None: (), "the host does"),
        (Window, "replay_of", lambda self, piece: self.replayed[0][1] if self.replayed else None, "the stream up does"),
        (BlockState, "give_read", give_all_with_the_first_portion, "of the host"),
        (BlockState, "give_back", lambda self, slots, read=None: self.pool.give(slots, None), "of the stream up"),
        (ordered_streams.Streams, "hold", lambda self, tensor, stream: None, "other work, once it is free,"),
    ],
    ids=["claims on slots", "gates", "portions that come up", "portions of slots", "copies up", "memory that is held"],
)
def test_without_what_else_keeps_order_there_is_a_race(monkeypatch, of, name, instead, words):
    monkeypatch.setattr(of, name, instead)
    assert any(words in race for race in races(monkeypatch))
