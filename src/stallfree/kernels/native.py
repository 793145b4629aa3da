"""The host kernel in C++ (native/), bound through ctypes, so that a job runs without the GIL from its start to its end."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from stallfree.kernels.replay import ReplayJob, check_job

ABI_VERSION = 9
LIBRARY = Path(__file__).with_name("_replay.so")

_ISAS = ("portable", "avx2", "avx512", "avx512-rsqrt")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RULES = {"replay": 0, "mean": 1}
_BAD_ROWS, _STEPS_OVERFLOW, _FORKED, _ISA_UNSUPPORTED, _CANNOT_PIN, _OUT_OF_MEMORY, _BAD_HYPERS = 1, 2, 3, 4, 6, 7, 9


class _Slot(ctypes.Structure):
    _fields_ = (
        ("grad", ctypes.c_void_p),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("factor", ctypes.c_double),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("master", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("slots", ctypes.POINTER(_Slot)),
        ("out", ctypes.c_void_p),
        ("channels", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("row_count", ctypes.c_int64),
        ("slot_count", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("moment_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("commit", ctypes.c_int32),
        ("lookahead", ctypes.c_double),
        ("key", ctypes.c_uint64),
    )


class NativeReplay:
    """A `HostKernel` on its own threads: AVX-512, AVX2 or portable code, whichever is the fastest on this processor.

    Args:
        threads: how many threads run each job.
        cores: that the threads are bound to, each to all of them: they are then the kernel's own, and the caller of `replay`
            sleeps. None: unbound, and the caller is one of the threads (so one thread needs no pool).
        pin: bind each thread to one of the cores, of which there are as many.
        isa: "avx512", "avx512-rsqrt", "avx2" or "portable"; None takes the environment's STALLFREE_ISA, or else the fastest.

    A job's result does not depend on `threads`, `cores` or the position of its rows in memory. "avx512" and "avx2" give the
    same bits on every processor; "portable" has no fused multiplication and addition; "avx512-rsqrt", the default with
    AVX-512 except on Zen 5, estimates square roots, which depends on the processor's maker. All are within the same rounding
    error of exact arithmetic: with u = 2^-24, K slots and D_k the direction of step k with |gradients| in place of gradients,
    |master - exact| <= u * sum over k of (3 |master_k| + (6 k + 10) lr_k D_k), to first order.

    Raises:
        ValueError: settings that contradict each other or that this machine cannot meet.
        RuntimeError: the library is missing or of another version, or the system refuses threads.
    """

    def __init__(self, threads: int, cores: Sequence[int] | None = None, *, pin: bool = False, isa: str | None = None) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        if cores is not None and (not cores or (pin and len(cores) != threads)):
            raise ValueError(f"{threads} threads need {'as many' if pin else 'some'} cores, not {len(cores)}: {list(cores)}")
        library = load_library()
        isa = isa or os.environ.get("STALLFREE_ISA") or best_isa()
        if isa not in _ISAS:
            raise ValueError(f"isa (or STALLFREE_ISA) must be one of {', '.join(_ISAS)}, not {isa!r}")
        self.name = f"native-{isa}"
        self.threads = threads
        pool = ctypes.c_void_p()
        numbers = None if cores is None else (ctypes.c_int32 * len(cores))(*cores)
        status = library.stallfree_pool_create(threads, numbers, len(cores or ()), pin, _ISAS.index(isa), ctypes.byref(pool))
        if status:
            error = ValueError if status in (_ISA_UNSUPPORTED, _CANNOT_PIN) else RuntimeError
            raise error(f"{self.name} with {threads} threads on cores {cores}: {message(status)}")
        self._pool = pool.value
        self._owner = os.getpid()
        self._lock = threading.Lock()  # close() must not end threads that are at work
        self._end = weakref.finalize(self, library.stallfree_pool_destroy, self._pool)
        self._end.atexit = False  # the process ends its threads anyway

    def replay(self, job: ReplayJob) -> None:
        """Run one job to its end, without the GIL. Callers on several threads take turns.

        Raises:
            ValueError: a job that `ReplayJob` does not allow. Nothing has been changed.
            RuntimeError: the kernel is closed, or was created before a fork in another process.
        """
        native = _pack(job)
        if os.getpid() != self._owner:  # before the lock: another thread of the parent may have held it in the fork
            raise RuntimeError(message(_FORKED))
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("this kernel is closed")
            status = load_library().stallfree_replay(self._pool, ctypes.byref(native))
        if status:
            raise failure(status)

    @property
    def pool(self) -> int:
        """The library's handle of the threads, for a queue, which shares them.

        Raises:
            RuntimeError: the kernel is closed.
        """
        if not self._end.alive:
            raise RuntimeError("this kernel is closed")
        assert self._pool is not None
        return self._pool

    def limit(self, threads: int) -> None:
        """From the next job on, let at most so many threads work: for whoever needs the memory's bandwidth more."""
        if self._end.alive:
            load_library().stallfree_pool_limit(self._pool, threads)

    def close(self) -> None:
        """End the kernel's threads, after the job that runs, if one does. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._end()


def _pack(job: ReplayJob) -> _Job:
    """A checked job as the library takes it."""
    check_job(job)
    slots = (_Slot * len(job.slots))(
        *(_Slot(s.grad.data_ptr(), s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.factor) for s in job.slots)
    )
    return _Job(
        master=job.master.data_ptr(),
        exp_avg=job.exp_avg.data_ptr(),
        exp_avg_sq=job.exp_avg_sq.data_ptr(),
        steps=job.steps.data_ptr(),
        rows=job.rows.data_ptr(),
        slots=slots,
        out=None if job.out is None else job.out.data_ptr(),
        channels=job.master.shape[0],
        length=job.master.shape[1],
        row_count=job.rows.numel(),
        slot_count=len(job.slots),
        grad_dtype=DTYPES[job.slots[0].grad.dtype] if job.slots else 0,
        moment_dtype=DTYPES[job.exp_avg.dtype],
        out_dtype=0 if job.out is None else DTYPES[job.out.dtype],
        rule=RULES[job.rule],
        commit=job.commit,
        lookahead=job.lookahead,
        key=job.key & (1 << 64) - 1,
    )


@cache
def load_library() -> ctypes.CDLL:
    """The compiled library (native/replay.h), checked for its version."""
    if not LIBRARY.exists():
        raise RuntimeError(
            f"stallfree's replay kernel {LIBRARY} is missing: install a C++17 compiler and run `pip install -e .` in the "
            'source tree, or set the host kernel to "torch".'
        )
    library = ctypes.CDLL(str(LIBRARY))
    library.stallfree_abi_version.restype = ctypes.c_int32
    found = library.stallfree_abi_version()
    if found != ABI_VERSION:
        raise RuntimeError(
            f"stallfree's replay kernel {LIBRARY} has interface {found}, this Python code expects {ABI_VERSION}: "
            "run `pip install -e .` again."
        )
    library.stallfree_best_isa.restype = ctypes.c_int32
    library.stallfree_message.restype = ctypes.c_char_p
    library.stallfree_message.argtypes = [ctypes.c_int32]
    library.stallfree_pool_create.restype = ctypes.c_int32
    library.stallfree_pool_create.argtypes = [
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_int32),
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    library.stallfree_pool_destroy.restype = None
    library.stallfree_pool_destroy.argtypes = [ctypes.c_void_p]
    library.stallfree_pool_limit.restype = None
    library.stallfree_pool_limit.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.stallfree_replay.restype = ctypes.c_int32
    library.stallfree_replay.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Job)]
    return library


def best_isa() -> str:
    """The instruction path that a kernel takes on this processor unless told otherwise, one of `NativeReplay`'s `isa`."""
    return _ISAS[load_library().stallfree_best_isa()]


def failure(status: int) -> Exception:
    """What to raise for a status of the library that is an error."""
    if status in (_BAD_ROWS, _STEPS_OVERFLOW, _BAD_HYPERS):
        return ValueError(message(status))
    return MemoryError(message(status)) if status == _OUT_OF_MEMORY else RuntimeError(message(status))


def message(status: int) -> str:
    """One sentence for a status of the library."""
    return str(load_library().stallfree_message(status).decode())
