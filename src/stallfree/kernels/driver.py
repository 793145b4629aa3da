"""The CUDA driver, called directly: torch has no way to say some of this, and says the rest slowly.

Calls that belong together go through one call of the native library, as lists of numbers that say what to do: from Python, each
call costs the launching thread several times what it does. All give the GIL away: one that found the device's queue full
while holding it would keep other threads from whatever the device waits for.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import chain
from struct import Struct
from typing import Any

import torch

from stallfree.kernels.native import load_library

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_WRITE, _WAIT, _COPY, _LAUNCH = range(4)  # places in RUN
RUN = ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2", "cuMemcpyAsync", "cuLaunchKernel")  # by the native library
MOST_PARAMETERS = 128  # of a kernel (native/driver_calls.cpp)

Command = tuple[int, ...]
NOTHING = nullcontext()


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which calls are about this device; costs next to nothing where they are already."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device(device)


def write_value(stream: int, address: int, value: int) -> Command:
    """Let a stream write 32 bits when it gets there; all it did before is visible to whoever sees the value."""
    return (_WRITE, stream, address, value)


def wait_value(stream: int, address: int, value: int) -> Command:
    """Let a stream wait until 32 bits are at least this, modulo 2^32."""
    return (_WAIT, stream, address, value)


def copy(target: int, source: int, nbytes: int, stream: int) -> Command:
    return (_COPY, target, source, nbytes, stream)


def launch(function: int, programs: int, threads: int, shared: int, stream: int, parameters: tuple[int, ...]) -> Command:
    """Launch a kernel all of whose parameters take 8 bytes."""
    return (_LAUNCH, function, programs, threads, shared, stream, len(parameters), *parameters)


def run(*commands: Command) -> None:
    """Do what the commands say, in order."""
    words = [*chain(*commands)]
    packed = _layout(len(words)).pack(*words)
    library, table = _runner()
    result = library.stallfree_driver_run(packed, len(words), table)
    if result & 0xFFFF == NO_CONTEXT:  # a thread that has not used the device yet
        torch.cuda.mem_get_info()
        words = words[result >> 16 :]
        result = library.stallfree_driver_run(_layout(len(words)).pack(*words), len(words), table)
    if result:
        raise failed(RUN[words[result >> 16]], result & 0xFFFF)


def call(name: str, *arguments: Any) -> None:
    """One function of the driver."""
    function = functions()[name]
    status = function(*arguments)
    if status == NO_CONTEXT:
        torch.cuda.mem_get_info()
        status = function(*arguments)
    if status:
        raise failed(name, status)


def failed(name: str, status: int) -> RuntimeError:
    text = ctypes.c_char_p()
    functions()["cuGetErrorString"](status, ctypes.byref(text))
    return RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()} ({status})")


def parameter_sizes(function: int) -> list[int] | None:
    """Bytes of each parameter of a kernel; None if the driver cannot say."""
    ask = functions().get("cuFuncGetParamInfo")
    if ask is None:
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while ask(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


_HANDLE, _ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuStreamWriteValue32_v2": (_HANDLE, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (_HANDLE, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _HANDLE),
    "cuLaunchKernel": (_HANDLE, *[ctypes.c_uint] * 7, _HANDLE, _HANDLE, _HANDLE),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, ctypes.c_uint),
    "cuStreamSynchronize": (_HANDLE,),
    "cuEventCreate": (ctypes.POINTER(_HANDLE), ctypes.c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventQuery": (_HANDLE,),
    "cuEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _HANDLE, _HANDLE),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}
_NEW = {"cuFuncGetParamInfo": (_HANDLE, _SIZE, ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE))}  # since CUDA 12.4


@cache
def functions() -> dict[str, Any]:
    library = ctypes.CDLL("libcuda.so.1")
    found = {name: getattr(library, name) for name in _FUNCTIONS}
    found |= {name: getattr(library, name) for name in _NEW if hasattr(library, name)}
    for name, function in found.items():
        function.argtypes, function.restype = (_FUNCTIONS | _NEW)[name], ctypes.c_int
    return found


@lru_cache(maxsize=1024)
def _layout(words: int) -> Struct:
    return Struct(f"{words}q")


@cache
def _runner() -> tuple[ctypes.CDLL, Any]:
    """The library, and its table of functions (struct Functions of native/driver_calls.cpp)."""
    addresses = [ctypes.cast(functions()[name], _HANDLE).value for name in RUN]
    return runs_commands(load_library()), (_HANDLE * len(RUN))(*addresses)


def runs_commands(library: ctypes.CDLL) -> ctypes.CDLL:
    library.stallfree_driver_run.restype = ctypes.c_int64
    library.stallfree_driver_run.argtypes = (ctypes.c_char_p, ctypes.c_int64, _HANDLE)
    return library
