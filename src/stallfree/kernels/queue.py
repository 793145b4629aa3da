"""The queue of the host's windows: its interface, and its definition with a Python thread and any host kernel.

It waits for a window's gradients, works, and announces that it is done in a word of memory that the device can wait for. All
comparisons of such words count modulo 2^32.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stallfree.kernels.replay import HostKernel, check_array
from stallfree.kernels.windows import Gate, HostBlock, WindowWork, check_block, check_window, merge, window_jobs, window_numel

FORKED = "the optimizer was built before a fork and has no threads here; build it in the process that trains"
FAR_AHEAD = 1 << 30  # tickets: where the word of a queue that failed stands
HISTORY = 4096  # windows
POLL_SECONDS = 2e-5
WAIT_SECONDS = 0.05  # after which a wait lets Python handle signals


class QueueStats(NamedTuple):
    """What a queue has done so far."""

    windows: int
    elements: int  # gradients replayed
    busy_seconds: float  # of work on these windows
    running_seconds: float  # for which the next one has been worked on


class WindowTimes(NamedTuple):
    """When a window was worked on, in nanoseconds of `time.monotonic_ns`."""

    ticket: int
    gates_open: int
    begin: int
    end: int


class HostError(RuntimeError):
    """Host work failed; the message names the parameters and the cause."""


class HostQueue(ABC):
    """Runs windows in the order of their submission, beside the submitting thread.

    Each gets a ticket, the next number modulo 2^32. `done` holds the ticket of the last window that is done, written with
    release order. When a window fails no later one is begun, and `done` goes far ahead: nobody waits for it any more.

    Args:
        done: int32 host memory of one element; tickets count on from its value, so that 0 makes 1 the first one.
        overlap: False makes `submit` return when everything is done.
    """

    def __init__(self, done: Tensor, overlap: bool = True) -> None:
        check_array("done", done.view(-1), (1,), (torch.int32,))
        self.done, self.done_address = done, done.data_ptr()
        self._word = ctypes.c_uint32.from_address(self.done_address)
        self._overlap = overlap
        self._last = self._word.value  # the last ticket given
        self._process = os.getpid()
        self._closed = False
        self._submitting = threading.Lock()

    def submit(self, windows: Sequence[WindowWork]) -> list[int]:
        """Run some windows, one after the other; returns their tickets. A failure shows in `wait` and `error`.

        Raises:
            ValueError: a window that contradicts its block. None has been submitted.
            RuntimeError: the queue is closed, or of another process.
        """
        self._check_process()
        if self._closed:
            raise RuntimeError("the queue is closed")
        with self._submitting:
            tickets = [self._last + 1 + i & 0xFFFFFFFF for i in range(len(windows))]
            self._start(windows, tickets)
        if not self._overlap:
            self._await(self._last)
        return tickets

    def wait(self, ticket: int) -> None:
        """Block, without the GIL, until a window is done.

        Raises:
            HostError: it or an earlier one failed.
            ValueError: it has not been submitted.
        """
        self._check_process()
        if not _reached(self._last, ticket):
            raise ValueError(f"ticket {ticket} has not been given, the last one is {self._last}")
        self._await(ticket)
        error = self.error
        if error is not None and not _reached(self._completed(), ticket):
            raise error

    def drain(self) -> None:
        """Wait for everything that was submitted."""
        self.wait(self._last)

    def close(self) -> None:
        """Run the windows whose gates are open, give up the first whose gates are not, and end the thread.

        Idempotent; does nothing in a forked child. Waiting for gates that will open is the caller's part (`wait`).
        """
        if os.getpid() == self._process:
            self._closed = True
            self._stop()

    def _await(self, ticket: int) -> None:
        while not self._settled(ticket, WAIT_SECONDS):
            pass

    @property
    @abstractmethod
    def error(self) -> HostError | None:
        """Of the window that failed."""

    @abstractmethod
    def stats(self) -> QueueStats: ...

    @abstractmethod
    def history(self) -> list[WindowTimes]:
        """The last 4096 windows that were done, oldest first."""

    @abstractmethod
    def _start(self, windows: Sequence[WindowWork], tickets: Sequence[int]) -> None:
        """Check the windows, hand them over, and make the last ticket `_last`."""

    @abstractmethod
    def _completed(self) -> int:
        """The last ticket whose window ended well."""

    @abstractmethod
    def _settled(self, ticket: int, seconds: float) -> bool:
        """Whether the window is done, or any has failed, within this time."""

    @abstractmethod
    def _stop(self) -> None: ...

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)


class TorchQueue(HostQueue):
    """The definition: any `HostKernel`, on a Python thread, or without `overlap` in the submitting one."""

    def __init__(self, kernel: HostKernel, done: Tensor, overlap: bool = True) -> None:
        super().__init__(done, overlap)
        self._kernel = kernel
        self._blocks: set[HostBlock] = set()  # that have been checked
        self._pending: deque[tuple[int, WindowWork]] = deque()
        self._changed = threading.Condition()
        self._good = self._last
        self._error: HostError | None = None
        self._stats = QueueStats(0, 0, 0.0, 0.0)
        self._working_since: int | None = None
        self._history: deque[WindowTimes] = deque(maxlen=HISTORY)
        self._thread = threading.Thread(target=self._work, name="stallfree-host", daemon=True) if overlap else None
        if self._thread is not None:
            self._thread.start()
            weakref.finalize(self, _close, weakref.ref(self))  # a thread that still runs Python as it ends aborts the process

    @property
    def error(self) -> HostError | None:
        return self._error

    def stats(self) -> QueueStats:
        with self._changed:
            since = self._working_since
            return self._stats if since is None else self._stats._replace(running_seconds=(time.monotonic_ns() - since) / 1e9)

    def history(self) -> list[WindowTimes]:
        with self._changed:
            return list(self._history)

    def _start(self, windows: Sequence[WindowWork], tickets: Sequence[int]) -> None:
        for work in windows:
            if work.block not in self._blocks:
                check_block(work.block)
                self._blocks.add(work.block)
            check_window(work, window_numel(work.block, work.divided))
        with self._changed:
            self._last = tickets[-1] if tickets else self._last
            if self._error is None:
                self._pending.extend(zip(tickets, windows, strict=True))
            self._changed.notify_all()
        if self._thread is None:
            while self._pending:
                self._run(*self._pending.popleft())

    def _completed(self) -> int:
        return self._good

    def _settled(self, ticket: int, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._error is not None or _reached(self._good, ticket), seconds)

    def _stop(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._blocks.clear()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                ticket, work = self._pending.popleft()
            self._run(ticket, work)
            del work

    def _run(self, ticket: int, work: WindowWork) -> None:
        try:
            for gate in work.gates:
                self._wait_for(gate)
            opened = time.monotonic_ns()
            time.sleep(work.pause)
            begin, elements = time.monotonic_ns(), 0
            self._working_since = begin
            for job in window_jobs(work):
                self._kernel.replay(job)
                elements += sum(slot.grad.numel() for slot in job.slots)
            if work.exchange is not None:
                merge(work.block, work.exchange)
        except BaseException as error:
            failure = HostError(f"host update of {work.names} failed: {error}\n{traceback.format_exc()}")
            failure.__cause__ = error
            with self._changed:
                self._error, self._working_since = failure, None
                self._pending.clear()
                self._word.value = self._last + FAR_AHEAD & 0xFFFFFFFF
                self._changed.notify_all()
            return
        with self._changed:
            end = time.monotonic_ns()
            windows, done, busy, _ = self._stats
            self._stats = QueueStats(windows + 1, done + elements, busy + (end - begin) / 1e9, 0.0)
            self._working_since = None
            self._history.append(WindowTimes(ticket, opened, begin, end))
            self._good = self._word.value = ticket
            self._changed.notify_all()

    def _wait_for(self, gate: Gate) -> None:
        word = ctypes.c_uint32.from_address(gate.address)
        while not _reached(word.value, gate.value):
            if self._closed:
                raise RuntimeError("the queue was closed before the gradients had arrived")
            time.sleep(POLL_SECONDS)


def _close(queue: weakref.ref[TorchQueue]) -> None:
    """At the end of the process; the thread keeps the queue until then."""
    if (running := queue()) is not None:
        running.close()


def _reached(now: int, ticket: int) -> bool:
    """Counting modulo 2^32."""
    return (now - ticket) & 0xFFFFFFFF < 1 << 31
