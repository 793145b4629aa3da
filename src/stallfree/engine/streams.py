"""The CUDA operations behind a `DeviceLink`: two copy streams, events, and waits for a word in host memory.

They go to the driver directly, through ctypes: each costs about 2 us of the launching thread, allocates nothing, and gives
the GIL away. The last matters: a call that found the device's queue full while holding it would keep the worker from
raising the very flag that the device waits for.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

Stream = Any  # torch.cuda.Stream, or what a stand-in for tests uses


class Event:
    """A point in a stream. Recorded once."""

    SLEEPS, NO_TIMING = 1, 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING

    def __init__(self, flags: int) -> None:
        self._handle = ctypes.c_void_p()
        _call("cuEventCreate", ctypes.byref(self._handle), flags)

    def record(self, stream: Stream) -> None:
        _call("cuEventRecord", self._handle, stream.cuda_stream)

    def block(self, stream: Stream) -> None:
        """What is enqueued next waits for the event."""
        _call("cuStreamWaitEvent", stream.cuda_stream, self._handle, 0)

    def synchronize(self) -> None:
        """Let the calling thread wait."""
        _call("cuEventSynchronize", self._handle)

    def query(self) -> bool:
        """Whether it has happened."""
        return bool(_driver().cuEventQuery(self._handle) == 0)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to a later one; both with timing, both happened."""
        milliseconds = ctypes.c_float()
        _call("cuEventElapsedTime", ctypes.byref(milliseconds), self._handle, end._handle)
        return milliseconds.value

    def __del__(self) -> None:
        if self._handle:
            _driver().cuEventDestroy_v2(self._handle)  # may be pending: it is released when it has happened


class Streams:
    """One device's copy streams, `to_host` and `to_device`, beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._context = ctypes.c_void_p()
        _call("cuStreamGetCtx", self.to_host.cuda_stream, ctypes.byref(self._context))

    def enter_thread(self) -> None:
        """A new thread has no context, which the driver's calls need."""
        _call("cuCtxSetCurrent", self._context)

    def device_guard(self) -> AbstractContextManager[Any]:
        """Inside, the driver's calls are about this device."""
        return torch.cuda.device(self.device)

    def current(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def record(self, stream: Stream, *, sleeps: bool = False, timing: bool = False) -> Event:
        """sleeps: a thread that waits for the event gives its core away."""
        event = Event((0 if timing else Event.NO_TIMING) | (Event.SLEEPS if sleeps else 0))
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        event.block(stream)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Both contiguous, of one size; host memory must be registered."""
        assert target.nbytes == source.nbytes
        if source.nbytes:
            _call("cuMemcpyAsync", target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream)

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        """What is enqueued next waits until the 32-bit word at a registered address is at least `value`, cyclically."""
        _call("cuStreamWaitValue32_v2", stream.cuda_stream, address, value, 0)  # 0: greater or equal

    def register(self, memory: Tensor) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))

    def unregister(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


_HANDLE, _ADDRESS = ctypes.c_void_p, ctypes.c_uint64
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _HANDLE),
    "cuStreamWaitValue32_v2": (_HANDLE, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamGetCtx": (_HANDLE, ctypes.POINTER(_HANDLE)),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, ctypes.c_uint),
    "cuEventCreate": (ctypes.POINTER(_HANDLE), ctypes.c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventQuery": (_HANDLE,),
    "cuEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _HANDLE, _HANDLE),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    status = getattr(driver, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()} ({status})")
