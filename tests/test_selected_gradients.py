"""The memory for selected gradients: there from backward to the end of step(), and whatever comes between changes no bit."""

import copy
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
from histories import accumulate, assert_identical
from large import large
from streams import StandIn, Stream, use, use_streams

from stallfree import planner
from stallfree.engine.selected import SelectedGradients
from stallfree.engine.transfer import Link

PATHS = pytest.mark.parametrize("asynchronous", [False, True])


@pytest.fixture
def taken(monkeypatch):
    """All memory that has been taken, as weak references. It holds NaN before it is written, and again once it is let go."""
    references, take, let_go = [], Link.take, SelectedGradients.let_go

    def poisoned(self, nbytes):
        memory = take(self, nbytes).fill_(0xFF)
        references.append(weakref.ref(memory))
        return memory

    def poison(self):
        if self.held:
            self._held.fill_(0xFF)
        let_go(self)

    monkeypatch.setattr(Link, "take", poisoned)
    monkeypatch.setattr(SelectedGradients, "let_go", poison)
    return references


def alive(references) -> int:
    return sum(reference() is not None for reference in references)


def weights(params) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


@PATHS
@pytest.mark.parametrize("settings", [dict(), dict(lag=0), dict(lag=2), dict(update_interval=1, select_interval=1)])
def test_it_is_there_from_backward_to_the_end_of_step(monkeypatch, taken, asynchronous, settings):
    """Not before channels are selected; once in a call, and of one size. Nothing is read that was not written in this call."""

    def run() -> list[list[torch.Tensor]]:
        params, optimizer = large(torch.bfloat16, **settings)
        engine, shown = optimizer.engine, []
        for t in range(10):
            selected = any(block.half.division.divided for block in engine.blocks)
            before = len(taken)
            assert not alive(taken)
            accumulate(params[1:] if t == 5 else params, t)
            if t == 6:
                params[2].grad.mul_(float("nan"))
            assert alive(taken) == len(taken) - before == selected
            assert all(reference().numel() == engine.selected.nbytes for reference in taken[before:])
            optimizer.step()
            assert not alive(taken)
            optimizer.zero_grad()
            shown.append(weights(params))
        optimizer.step()  # without any gradient
        assert not alive(taken)
        optimizer.close()
        return shown

    expected = run()
    assert len(taken) > 5
    monkeypatch.undo()
    if asynchronous:
        use(monkeypatch, lambda: time.sleep(1e-4), 300)
    params, optimizer = large(torch.bfloat16, **settings)
    for t, shown in enumerate(expected):
        accumulate(params[1:] if t == 5 else params, t)
        if t == 6:
            params[2].grad.mul_(float("nan"))
        optimizer.step()
        optimizer.zero_grad()
        assert_identical([weights(params)], [shown])
    optimizer.close()


def test_who_selects_nothing_takes_none(taken):
    for settings in (dict(topk_ratio=0.0), dict(preset="stronghold", topk_ratio=0.0, update_interval=1, select_interval=64)):
        params, optimizer = large(**settings)
        for t in range(4):
            accumulate(params, t)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    assert not taken


def test_it_is_no_part_of_the_state():
    """The planner counts it among gradients, as it is needed together with those of the largest block."""
    params, optimizer = warmed(dtype=torch.bfloat16)
    engine, needed = optimizer.engine, planner.plan(optimizer._named(optimizer.param_groups), optimizer.config)
    selected = sum(block.half.chosen.selected_numel for block in engine.blocks)
    assert needed.device_gradients == 2 * selected + max(param.nbytes for param in params)
    assert 2 * selected <= engine.selected.nbytes < 2 * selected + 256 * len(engine.blocks)
    before = optimizer.metrics()["device_bytes"]
    accumulate(params, 5)
    assert optimizer.metrics()["device_bytes"] == before
    optimizer.close()


def warmed(**settings):
    params, optimizer = large(**settings)
    for t in range(5):
        accumulate(params, t)
        optimizer.step()
        optimizer.zero_grad()
    assert all(block.half.division.divided for block in optimizer.engine.blocks)
    return params, optimizer


def zeroed_by_the_model(params, optimizer):
    torch.nn.ParameterList(params).zero_grad()


def reloaded(params, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def failed(params, optimizer):
    """A backward pass that raises after it has staged some blocks."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError

    optimizer.zero_grad()
    loss = Fails.apply((params[0] * 1.0).sum()) + (params[3] * 2.0).sum() + (params[4] * 3.0).sum()
    with pytest.raises(ArithmeticError):
        loss.backward()
    optimizer.zero_grad()


DISCARDS = {
    "the optimizer's zero_grad": lambda params, optimizer: optimizer.zero_grad(),
    "the model's zero_grad": zeroed_by_the_model,
    "load_state_dict": reloaded,
    "a backward pass that fails": failed,
}


@PATHS
@pytest.mark.parametrize("name", DISCARDS)
def test_what_was_discarded_leaves_nothing_behind(monkeypatch, taken, name, asynchronous):
    """And backward can be tried again."""
    if asynchronous:
        use(monkeypatch, staging_bytes=600)
    results = []
    for discard in (None, DISCARDS[name]):
        params, optimizer = warmed()
        for t in range(5, 9):
            if discard:
                accumulate(params, 100 + t)
                assert alive(taken) == 1
                discard(params, optimizer)
                if discard is not zeroed_by_the_model:  # nobody hears of that until the next gradient
                    assert not alive(taken)
            accumulate(params, t)
            assert alive(taken) == 1
            optimizer.step()
            assert not alive(taken)
            optimizer.zero_grad()
        optimizer.flush()
        results.append(weights(params))
        accumulate(params, 9)
        optimizer.close()
        assert not alive(taken)
    assert_identical([results[1]], [results[0]])


def test_handles_that_are_zeroed_in_place_keep_it(taken):
    params, optimizer = warmed()
    accumulate(params, 5)
    optimizer.zero_grad(set_to_none=False)
    assert alive(taken) == 1
    assert not optimizer.full_gradient(params[0]).any()
    optimizer.step()
    assert not alive(taken)
    optimizer.close()


def test_of_a_discarded_gradient_nobody_gets_other_numbers(taken):
    params, optimizer = warmed()
    accumulate(params, 5)
    kept = params[0].grad
    params[0].grad = None
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="discarded by zero_grad"):
        kept.staged.full()
    optimizer.close()


@PATHS
@pytest.mark.parametrize("trains", [False, True])
def test_parameters_that_join_between_backward_and_step(monkeypatch, taken, trains, asynchronous):
    """What is staged moves to where there is room for theirs, too."""
    if asynchronous:
        use(monkeypatch, staging_bytes=600)

    def run(late: bool) -> list[torch.Tensor]:
        params, optimizer = warmed()
        more = [torch.nn.Parameter(torch.full((12, 8), 2.0))]

        def join() -> None:
            optimizer.add_param_group(dict(params=[("layers.9.weight", more[0])]))

        if not late:
            join()
        accumulate(params, 5)
        if late:
            before = [optimizer.full_gradient(param) for param in params]
            join()
            assert all(map(torch.equal, map(optimizer.full_gradient, params), before))
        if trains:
            accumulate(more, 55)
        optimizer.step()
        assert not alive(taken)
        for t in range(6, 12):
            optimizer.zero_grad()
            accumulate([*params, *more], t)
            optimizer.step()
        optimizer.flush()
        optimizer.close()
        return weights(params)

    assert_identical([run(late=True)], [run(late=False)])


@PATHS
def test_several_backward_passes_before_a_step_and_several_optimizers(monkeypatch, taken, asynchronous):
    def run() -> list[torch.Tensor]:
        pairs = [large(topk_ratio=ratio) for ratio in (0.25, 0.5)]
        for t in range(9):
            for number, (params, _) in enumerate(pairs):
                for again in range(1 + (t % 3 == number)):
                    accumulate(params, 10 * t + again)
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
        for _, optimizer in pairs:
            optimizer.close()
        return [weight for params, _ in pairs for weight in weights(params)]

    expected = run()
    assert not alive(taken)
    if asynchronous:
        use(monkeypatch, lambda: time.sleep(1e-4), 600)
        assert_identical([run()], [expected])


def none_left(link: Link, nbytes: int) -> torch.Tensor:
    raise torch.OutOfMemoryError("none left")


def test_memory_that_cannot_be_had_is_asked_for_again(monkeypatch):
    results = []
    for fails in (False, True):
        params, optimizer = warmed()
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(Link, "take", none_left)
                with pytest.raises(torch.OutOfMemoryError):
                    accumulate(params, 5)
            optimizer.zero_grad()
        for t in range(5, 9):
            accumulate(params, t)
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(params))
        optimizer.close()
    assert_identical([results[1]], [results[0]])


# Streams


class Several(StandIn):
    """With computing streams beside the launching thread's own, and a record of who waits for whom."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [Stream(lambda: time.sleep(1e-3)) for _ in range(2)]
        self.log: list[tuple] = []

    @property
    def threads(self):
        return *super().threads, *self.others

    def current(self):
        return getattr(self._launched, "on", None)

    def current_handle(self) -> int:
        self._check_device(self.current())
        return 0 if self.current() is None else id(self.current())

    def record(self, stream):
        event = super().record(stream)
        self.log.append(("record", stream, event))
        return event

    def wait(self, stream, event) -> None:
        self.log.append(("wait", stream, event))
        super().wait(stream, event)

    def hold(self, tensor, stream) -> None:
        self.log.append(("hold", stream, tensor.data_ptr()))


@pytest.mark.parametrize("steps", ["on the launching stream", "in turn"])
def test_gradients_that_are_staged_on_another_stream(monkeypatch, taken, steps):
    """As with fully_shard. The memory is the calling stream's; who writes it waits for what that one has been told before;
    who uses it last holds it."""
    made, takes, take = [], [], Link.take

    def make() -> Several:
        made.append(Several())
        return made[-1]

    def noted(self, nbytes):
        memory = take(self, nbytes)
        self.streams.log.append(("take", self.streams.current(), memory.data_ptr()))
        takes.append(memory.data_ptr())
        return memory

    expected_params, expected = large()
    for t in range(8):
        accumulate(expected_params, t)
        expected.step()
        expected.zero_grad()
    expected.close()

    use_streams(monkeypatch, make, 600)
    monkeypatch.setattr(Link, "take", noted)
    params, optimizer = large()
    (streams,) = made
    side, other = streams.others
    calling = None  # the stream of the last step
    for t in range(8):
        streams.log.clear()
        takes.clear()
        with streams.on(side):
            accumulate(params, t)
        if takes:
            place = next(i for i, entry in enumerate(streams.log) if entry[0] == "take")
            assert streams.log[place][1] is calling
            (kind, stream, event), wait = streams.log[place + 1 : place + 3]
            assert (kind, stream) == ("record", calling)
            assert wait == ("wait", side, event)
        on = other if steps == "in turn" and t % 2 else None
        streams.log.clear()
        with streams.on(on) if on else nullcontext():
            optimizer.step()
        if takes:
            assert ("hold", on, takes[0]) in streams.log
        calling = on
        optimizer.zero_grad()
    streams.synchronize()
    if steps == "on the launching stream":  # elsewhere the stand-in runs only a part of step()
        assert_identical([weights(params)], [weights(expected_params)])
    optimizer.close()


def test_on_one_stream_nobody_waits_for_it(monkeypatch, taken):
    made = []

    def make() -> Several:
        made.append(Several())
        return made[-1]

    use_streams(monkeypatch, make, 1 << 20)
    params, optimizer = warmed()
    made[0].log.clear()
    accumulate(params, 5)
    assert alive(taken) == 1
    assert not [entry for entry in made[0].log if entry[0] == "wait"]
    optimizer.step()
    optimizer.close()
