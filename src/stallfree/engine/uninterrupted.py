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
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad(), uninterrupted(lock):
            yield
        return
    with lock:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[int, Callable[[int, FrameType | None], Any]]
        handlers = {number: handler for number in HELD if callable(handler := signal.getsignal(number))}
        held: dict[int, FrameType | None] = {}

        def hold(number: int, frame: FrameType | None) -> None:
            again = number in held
            held[number] = frame
            if again and number == signal.SIGINT:
                del held[number]
                handlers[signal.SIGINT](number, frame)

        try:
            for which in handlers:
                signal.signal(which, hold)
            yield
        finally:
            for which, handler in reversed(handlers.items()):  # SIGINT, which comes most often, last: it may raise at once
                signal.signal(which, handler)
            with ExitStack() as stack:  # all of them, whichever raises
                for number, frame in reversed(held.items()):
                    stack.callback(handlers[number], number, frame)
