"""Calls that must not be cut in two: by a signal, or by another thread that reads or changes the optimizer's state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

# Those whose handlers are known to raise: Ctrl-C, a request to stop, a data loader's dead worker, timeouts and schedulers.
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
NOWHERE: AbstractContextManager[None] = nullcontext()


def outside_inference() -> AbstractContextManager[object]:
    """Tensors made inside may outlive the caller's inference mode.

    Entered in that mode only: Ctrl-C in the exit leaves torch's guard to whoever frees it, and that turns gradients off.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOWHERE


@contextmanager
def uninterrupted(lock: threading.RLock) -> Iterator[None]:
    """One thread at a time. In the main thread, signals wait for the end of the call; only a second SIGINT does not.

    For a caller in inference mode, as an evaluation that restores a state: tensors made inside outlive it, and so are plain.
    """
    without_graph = torch.no_grad() if torch.is_inference_mode_enabled() else NOWHERE
    with lock:
        if threading.current_thread() is not threading.main_thread():
            with outside_inference(), without_graph:
                yield
            return
        handlers: dict[int, Callable[[int, FrameType | None], Any]]
        handlers = {number: handler for number in HELD if callable(handler := signal.getsignal(number))}
        held: dict[int, FrameType | None] = {}
        over = False

        def hold(number: int, frame: FrameType | None) -> None:
            again = number in held
            if over:  # a signal has kept the handler from coming back
                handlers[number](number, frame)
                return
            held[number] = frame
            if again and number == signal.SIGINT:
                del held[number]
                handlers[signal.SIGINT](number, frame)

        try:
            for which in handlers:
                signal.signal(which, hold)
            with outside_inference(), without_graph:  # left while signals still wait
                yield
        finally:
            try:
                _put_back([*handlers.items()])
            finally:
                over = True
                with ExitStack() as stack:  # all of them, whichever raises
                    for number, frame in reversed(held.items()):
                        stack.callback(handlers[number], number, frame)


def _put_back(left: list[tuple[int, Callable[[int, FrameType | None], Any]]]) -> None:
    """Handlers of signals, the last first: SIGINT, which comes most often, at the end."""
    try:
        while left:
            signal.signal(*left[-1])
            left.pop()
    except BaseException:  # of a handler that is back already: the others must come back all the same
        _put_back(left)
        raise
