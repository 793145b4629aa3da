"""Calls that must not be cut in two: by a signal, or by another thread that reads or changes the optimizer's state."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import torch

# Those whose handlers are known to raise: Ctrl-C, a request to stop, a data loader's dead worker, timeouts and schedulers.
HELD = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)))


@contextmanager
def uninterrupted(lock: threading.RLock) -> Iterator[None]:
    """One thread at a time. In the main thread, signals wait for the end of the call; only a second SIGINT does not.

    Entered in every step: hence `_signal`, which `signal` wraps to make enums of all that it returns.

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
        handlers = {number: handler for number in HELD if callable(handler := _signal.getsignal(number))}
        held: dict[int, FrameType | None] = {}

        def hold(number: int, frame: FrameType | None) -> None:
            again = number in held
            held[number] = frame
            if again and number == signal.SIGINT:
                del held[number]
                handlers[signal.SIGINT](number, frame)

        for which in handlers:
            _signal.signal(which, hold)
        try:
            yield
        finally:
            for which, handler in handlers.items():
                _signal.signal(which, handler)
            with ExitStack() as stack:  # all of them, whichever raises
                for number, frame in reversed(held.items()):
                    stack.callback(handlers[number], number, frame)
