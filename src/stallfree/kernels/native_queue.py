"""The queue in C++ (native/queue.h): a thread that hands windows to those of a `NativeReplay`, and runs no Python."""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache, lru_cache

from torch import Tensor

from stallfree.kernels.hyper import Hyper
from stallfree.kernels.native import DTYPES, LIBRARY, RULES, NativeReplay, failure, load_library
from stallfree.kernels.queue import HISTORY, HostError, HostQueue, QueueStats, WindowTimes
from stallfree.kernels.windows import HostBlock, WindowWork, check_block, check_window, window_numel

_DIVIDED, _PUBLISH, _MERGE = 1, 2, 4
_HYPER = struct.Struct("q5d")
_ALL = (0, (1 << 63) - 1)  # elements


class _Weight(ctypes.Structure):
    _fields_ = (
        ("master", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("deferred", ctypes.c_void_p),
        ("every", ctypes.c_void_p),
        ("channels", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("selected", ctypes.c_int64),
        ("key", ctypes.c_uint64),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.POINTER(_Weight)),
        ("weight_count", ctypes.c_int32),
        ("record_start", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("slot_dtype", ctypes.c_int32),
        ("moment_dtype", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class _Registered:
    """A block as the library reads it."""

    def __init__(self, block: HostBlock) -> None:
        check_block(block)
        self.block = block  # whose memory the structs point to
        self.numel = window_numel(block, False), window_numel(block, True)
        weights = (_Weight * len(block.weights))(
            *(
                _Weight(
                    *(t.data_ptr() for t in (w.master, w.exp_avg, w.exp_avg_sq, w.steps, w.deferred, w.every)),
                    *w.master.shape,
                    w.selected,
                    w.key & (1 << 64) - 1,
                )
                for w in block.weights
            )
        )
        self.struct = _Block(
            weights=weights,
            weight_count=len(block.weights),
            record_start=block.record_start,
            rule=RULES[block.rule],
            slot_dtype=DTYPES[block.dtype],
            moment_dtype=DTYPES[block.weights[0].exp_avg.dtype] if block.weights else 0,
        )
        self.address = ctypes.addressof(self.struct)


class NativeQueue(HostQueue):
    """A `HostQueue` on a thread in C++ and the threads of a kernel, which may be closed before the queue is.

    Raises:
        RuntimeError: the kernel is closed, or the system refuses a thread.
    """

    def __init__(self, kernel: NativeReplay, done: Tensor, overlap: bool = True) -> None:
        super().__init__(done, overlap)
        self._quick, self._blocking = _libraries()
        queue = ctypes.c_void_p()
        if status := self._blocking.stallfree_queue_create(kernel.pool, self.done_address, ctypes.byref(queue)):
            raise failure(status)
        self._queue = queue.value
        self._blocks: dict[HostBlock, _Registered] = {}
        self._in_flight: deque[tuple[int, WindowWork]] = deque()  # holds the memory that the thread works on
        self._error: HostError | None = None
        self._stopping = threading.Lock()
        weakref.finalize(self, self._blocking.stallfree_queue_destroy, self._queue).atexit = False
        weakref.finalize(self, self._blocking.stallfree_queue_stop, self._queue)  # the later one is called first

    @property
    def error(self) -> HostError | None:
        if self._error is None:
            ticket = ctypes.c_uint32()
            status = self._quick.stallfree_queue_failure(self._queue, ctypes.byref(ticket))
            if status:
                names = next((work.names for other, work in list(self._in_flight) if other == ticket.value), "")
                cause = failure(status)
                error = HostError(f"host update of {names} failed: {cause}")
                error.__cause__ = cause
                self._error = error
        return self._error

    def stats(self) -> QueueStats:
        numbers = (ctypes.c_int64 * 4)()
        self._quick.stallfree_queue_read_stats(self._queue, numbers)
        windows, elements, busy, running = numbers
        return QueueStats(windows, elements, busy / 1e9, running / 1e9)

    def history(self) -> list[WindowTimes]:
        entries = (ctypes.c_int64 * 4 * HISTORY)()
        count = self._quick.stallfree_queue_history(self._queue, entries, HISTORY)
        return [WindowTimes(*entry) for entry in entries[:count]]

    def _start(self, windows: Sequence[WindowWork], tickets: Sequence[int]) -> None:
        completed, flying = self._completed(), self._in_flight
        while flying and (completed - flying[0][0]) & 0xFFFFFFFF < 1 << 31:
            flying.popleft()
        packed = b"".join([self._pack(work) for work in windows])
        flying.extend(zip(tickets, windows, strict=True))
        if status := self._quick.stallfree_queue_submit(self._queue, packed, len(windows)):
            for _ in windows:
                flying.pop()
            raise failure(status)
        self._last = tickets[-1] if tickets else self._last

    def _pack(self, work: WindowWork) -> bytes:
        """As stallfree_window and what follows it."""
        block, calls, divided, lookahead, publish, _, gates, places, span, exchange, pause = work
        known = self._blocks.get(block)
        if known is None:
            known = self._blocks[block] = _Registered(block)
        check_window(work, known.numel[divided])
        layout = _layout(len(places or ()), len(gates), len(calls), len(block.weights), exchange is not None)
        flags = (_DIVIDED if divided else 0) | (_PUBLISH if publish else 0) | (_MERGE if exchange is not None else 0)
        arrays: list[int | bytes] = [] if places is None else list(places)
        for address, value in gates:
            arrays += (address, value & 0xFFFFFFFF)
        for memory, record, hypers in calls:
            arrays += (memory.data_ptr(), 0 if record is None else record.data_ptr(), _pack_hypers(hypers))
        if exchange is not None:
            arrays += [tensor.data_ptr() for tensor in exchange]
        counts = len(calls), len(gates), -1 if places is None else len(places)
        return layout.pack(layout.size, known.address, lookahead, pause, *counts, flags, *(span or _ALL), *arrays)

    def _completed(self) -> int:
        return int(self._quick.stallfree_queue_completed(self._queue))

    def _settled(self, ticket: int, seconds: float) -> bool:
        return bool(self._blocking.stallfree_queue_wait(self._queue, ticket & 0xFFFFFFFF, int(seconds * 1000)))

    def _stop(self) -> None:
        with self._stopping:
            self._blocking.stallfree_queue_stop(self._queue)
        self._error = self.error  # while the names are known
        self._in_flight.clear()
        self._blocks.clear()


@lru_cache(maxsize=1024)
def _layout(places: int, gates: int, calls: int, weights: int, merges: bool) -> struct.Struct:
    after = "q" * places + "QQ" * gates + f"QQ{_HYPER.size * weights}s" * calls + "6Q" * merges
    return struct.Struct("QQdd4iqq" + after)


@lru_cache(maxsize=1024)
def _pack_hypers(hypers: tuple[Hyper | None, ...]) -> bytes:
    """As stallfree_hyper[]. A call's are mostly those of other blocks and windows."""
    return b"".join(_HYPER.pack(0, 0, 0, 0, 0, 0) if hyper is None else _HYPER.pack(1, *hyper) for hyper in hypers)


@cache
def _libraries() -> tuple[ctypes.PyDLL, ctypes.CDLL]:
    """The library twice: for calls that are over at once, which keep the GIL, and for those that block, which give it away."""
    blocking = load_library()
    quick = ctypes.PyDLL(str(LIBRARY))
    handle, ticket = ctypes.c_void_p, ctypes.c_uint32
    for library, name, result, arguments in (
        (blocking, "create", ctypes.c_int32, (handle, handle, ctypes.POINTER(handle))),
        (quick, "submit", ctypes.c_int32, (handle, ctypes.c_char_p, ctypes.c_int32)),
        (quick, "completed", ticket, (handle,)),
        (quick, "failure", ctypes.c_int32, (handle, ctypes.POINTER(ticket))),
        (blocking, "wait", ctypes.c_int32, (handle, ticket, ctypes.c_int32)),
        (quick, "read_stats", None, (handle, handle)),
        (quick, "history", ctypes.c_int32, (handle, handle, ctypes.c_int32)),
        (blocking, "stop", None, (handle,)),
        (blocking, "destroy", None, (handle,)),
    ):
        function = getattr(library, f"stallfree_queue_{name}")
        function.restype, function.argtypes = result, arguments
    return quick, blocking
