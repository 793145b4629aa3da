"""Ctrl-C and other signals, whose handlers may raise at any moment: a call has been made, or has not begun."""

import _thread
import contextlib
import gc
import math
import operator
import random
import signal
import threading
import time
import weakref

import pytest
import torch
from histories import Call, History, Player, assert_identical, backward, run
from torch import nn
from training import SMALL

from stallfree import ZenFlowConfig
from stallfree.engine import uninterrupted
from stallfree.engine.staging import AtEnd


@pytest.fixture
def alarm(monkeypatch):
    """The timer presses Ctrl-C. Its own signal must not be held back."""
    monkeypatch.setattr(uninterrupted, "HELD", (signal.SIGINT,))
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    yield
    signal.signal(signal.SIGALRM, before)


def test_any_other_signal_waits_too(device):
    """A data loader's dead worker, for instance, is told to the main thread by SIGCHLD, whose handler raises."""
    player = Player(History(shapes=((6, 8), (8, 6)), calls=(Call(),) * 3, config=ZenFlowConfig(**SMALL)), device)

    def complain(*_):
        raise ZeroDivisionError("whatever a handler raises")

    before = signal.signal(signal.SIGCHLD, complain)
    inner = player.optimizer.engine.check_usable
    player.optimizer.engine.check_usable = lambda: (signal.raise_signal(signal.SIGCHLD), inner())
    try:
        player.backward()
        with pytest.raises(ZeroDivisionError):
            player.optimizer.step()
        assert signal.getsignal(signal.SIGCHLD) is complain
    finally:
        signal.signal(signal.SIGCHLD, before)
        player.optimizer.engine.check_usable = inner
    assert player.optimizer.metrics()["call"] == 1, "the call was made"
    player.optimizer.zero_grad()
    player.backward()
    player.optimizer.step()
    player.close()


class Join:
    """What is to be done after a backward pass."""

    calls = 0

    def call(self) -> None:
        self.calls += 1


def test_ctrl_c_while_another_thread_goes_backward_is_not_lost():
    """As on a GPU: the main thread waits meanwhile, and lets go of the callback before it has seen the signal."""
    join = Join()
    holder = [AtEnd(join.call)]
    other = threading.Thread(target=holder[0])
    other.start()
    other.join()
    with pytest.raises(KeyboardInterrupt):
        list(map(operator.call, (_thread.interrupt_main, holder.clear)))  # no Python in between
    assert join.calls == 1


def test_what_is_to_be_done_after_backward_is_done_after_one_that_fails():
    join = Join()
    holder = [AtEnd(join.call)]
    holder.clear()
    assert join.calls == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_as_a_failed_backward_pass_is_let_go_of_keeps_nothing_alive():
    """Python ignores it there, and the entry of the finalizer stays."""
    join = Join()
    alive, holder = weakref.ref(join), [AtEnd(join.call)]
    with contextlib.suppress(KeyboardInterrupt):
        list(map(operator.call, (_thread.interrupt_main, holder.clear)))
    del join
    gc.collect()
    assert alive() is None


def test_a_step_enters_no_inference_mode(device, monkeypatch):
    """torch's guard of it, when Ctrl-C comes in its exit, lives on for a while and then turns gradients off for good."""
    player = Player(History(shapes=((6, 8), (8, 6)), calls=(Call(),) * 6, config=ZenFlowConfig(**SMALL)), device)
    entered = []
    monkeypatch.setattr(torch, "inference_mode", lambda *_: entered.append(_) or contextlib.nullcontext())
    player.play()
    assert not entered
    player.close()


@pytest.mark.parametrize("moment, number", [(1, signal.SIGTERM), (3, signal.SIGINT), (3, signal.SIGTERM), (4, signal.SIGTERM)])
def test_a_signal_while_handlers_are_exchanged_leaves_them_as_they_were(monkeypatch, moment, number):
    """When one of two has been replaced, or put back."""

    def stop(*_):
        raise ZeroDivisionError("whatever a handler raises")

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop}
    before = {which: signal.signal(which, handler) for which, handler in handlers.items()}
    monkeypatch.setattr(uninterrupted, "HELD", tuple(handlers))
    exchange, exchanges = signal.signal, []

    def interrupted(which, handler):
        exchange(which, handler)
        exchanges.append(which)
        if len(exchanges) == moment:
            signal.raise_signal(number)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", interrupted)
            with pytest.raises(ZeroDivisionError), uninterrupted.uninterrupted(threading.RLock()):
                pass
        assert {which: signal.getsignal(which) for which in handlers} == handlers
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def test_a_signal_that_waited_comes_although_another_one_s_handler_raises_first(monkeypatch):
    """As handlers are put back: SIGTERM comes the moment its own is there, after SIGINT has come inside."""
    came = []

    def stop(number, _):
        came.append(number)
        raise ZeroDivisionError("whatever a handler raises")

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop}
    before = {which: signal.signal(which, handler) for which, handler in handlers.items()}
    monkeypatch.setattr(uninterrupted, "HELD", tuple(handlers))
    exchange = signal.signal

    def interrupted(which, handler):
        exchange(which, handler)
        if which == signal.SIGTERM and handler is stop and not came:
            signal.raise_signal(signal.SIGTERM)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", interrupted)
            with pytest.raises(ZeroDivisionError), uninterrupted.uninterrupted(threading.RLock()):
                signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGTERM, signal.SIGINT]
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def test_ctrl_c_for_a_caller_in_inference_mode_waits_until_the_mode_is_left(monkeypatch):
    left = []

    class Guard(torch.inference_mode):
        def __exit__(self, *error):
            signal.raise_signal(signal.SIGINT)
            left.append(super().__exit__(*error))

    with torch.inference_mode():
        with monkeypatch.context() as patch:
            patch.setattr(torch, "inference_mode", Guard)
            with pytest.raises(KeyboardInterrupt), uninterrupted.uninterrupted(threading.RLock()):
                assert not torch.is_inference_mode_enabled()
        assert left
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_ctrl_c_while_parameters_join_waits_until_they_have(device):
    player = Player(History(shapes=((6, 8), (8, 6)), calls=(Call(),) * 6, config=ZenFlowConfig(**SMALL)), device)
    player.play(until=3)
    optimizer, late = player.optimizer, nn.Parameter(torch.ones(4, 6, device=device))
    inner = optimizer.engine.link.reserve
    optimizer.engine.link.reserve = lambda blocks: (signal.raise_signal(signal.SIGINT), inner(blocks))
    with pytest.raises(KeyboardInterrupt):
        optimizer.add_param_group(dict(params=[late]))
    assert optimizer.param_groups[-1]["params"] == [late]
    optimizer.engine.link.reserve = inner
    backward([late, *player.params], [torch.ones_like(late), *player.history.grads(player.t, player.params)])
    optimizer.step()
    optimizer.flush()
    assert (late != 1).all()
    assert optimizer.metrics()["call"] == 4
    player.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a Ctrl-C in somebody's gc callback is lost
@pytest.mark.parametrize("name", ["step", "flush", "state_dict", "exact_weights"])
def test_ctrl_c_at_random_moments_loses_nothing(device, seed, name, alarm):
    """SIGINT by a timer, at any moment of a call: when it is delivered, the call has been made or has not begun.

    Whoever catches it can tell by the number of calls, and goes on.
    """
    history = History(
        shapes=((64, 48), (5,), (48, 64), (3, 4, 2)),
        calls=tuple(
            Call(bad=(0, math.nan) if t % 7 == 5 else None, before="flush" if name == "flush" and t % 2 else None)
            for t in range(200)
        ),
        config=ZenFlowConfig(
            topk_ratio=0.25, update_interval=3, lag=1, select_interval=4, full_warm_up_rounds=2, min_numel=0, block_numel=1
        ),
    )
    moments, player, interrupted = random.Random(seed), Player(history, device), 0
    optimizer = player.optimizer

    def call(t: int) -> None:
        if history.calls[t].before == "flush":
            optimizer.flush()
        elif name == "state_dict":
            optimizer.state_dict()
        elif name == "exact_weights":
            with optimizer.exact_weights():
                pass

    seen, length = [], 3e-3
    for t in range(len(history.calls)):
        player.set_lr()
        try:
            begun = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, length))
            if name != "step":
                call(t)
            else:
                player.backward()  # hooks stage here
                player.optimizer.step()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert torch.is_grad_enabled(), f"call {t}: training could not go on"
        length = 0.9 * length + 0.1 * 1.2 * (time.perf_counter() - begun)
        if history.calls[t].before == "flush":
            optimizer.flush()  # once more, if it was interrupted before it began; otherwise there is nothing to do
        if optimizer.metrics()["call"] == t:  # interrupted before the step
            optimizer.zero_grad()
            player.backward()
            optimizer.step()
        optimizer.zero_grad()
        player.t += 1
        seen.append(player.weights())
    assert interrupted >= 50, f"only {interrupted} of {len(history.calls)} timers fell into the call"
    assert_identical([*seen, player.flushed()], run(history, device), f"--seed {seed}")
    player.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
