"""Calls that must not be cut in two: by Ctrl-C, or by another thread that reads or changes the optimizer's state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted(lock: threading.RLock) -> Iterator[None]:
    """One thread at a time. In the main thread, the first SIGINT waits for the end of the call; a second one does not."""
    with lock:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            yield
            return
        held: list[FrameType | None] = []

        def hold(signum: int, frame: FrameType | None) -> None:
            held.append(frame)
            if len(held) > 1:
                handler(signum, frame)

        signal.signal(signal.SIGINT, hold)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            if len(held) == 1:
                handler(signal.SIGINT, held[0])
