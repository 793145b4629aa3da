"""The CUDA operations behind a `DeviceLink`: streams beside computation, and timelines that order all of them and the host.

They go to the driver directly (`kernels/driver.py`).
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stallfree.kernels import driver
from stallfree.limits import GIB, lockable_bytes

Stream = Any  # torch.cuda.Stream, or what a stand-in for tests uses
Task = Any  # for a stream: a command of the driver, likewise

PORTABLE = 1  # cudaHostRegisterPortable: for all devices, whichever is the current one
RELEASED = 1 << 30  # how far a count jumps when nobody shall wait any more
_HALF, _MASK = 1 << 31, (1 << 32) - 1


class Point(NamedTuple):
    """A moment on a timeline."""

    timeline: Timeline
    value: int

    @property
    def passed(self) -> bool:
        return (self.timeline.word - self.value) & _MASK < _HALF


class Timeline:
    """A count in a word of host memory, which says how much of some ordered work is done.

    A stream raises the count, or the host's queue; whoever needs the work waits for the count: streams on the device, the
    queue at a gate, and nobody at all if it has been reached already. Counts are compared modulo 2^32.
    """

    def __init__(self, memory: Tensor, place: int) -> None:
        self.memory = memory[place : place + 1]  # int32
        self.address = self.memory.data_ptr()
        self._word = ctypes.c_uint32.from_address(self.address)
        self.value = 0  # the last one that somebody was told to raise it to

    @property
    def word(self) -> int:
        return self._word.value

    @property
    def ahead(self) -> int:
        """How much of what somebody was told to do is not done yet."""
        return (self.value - self.word) & _MASK

    def since(self, point: Point) -> int:
        """How often somebody was told to raise it since."""
        return (self.value - point.value) & _MASK

    def next(self) -> Point:
        self.value = (self.value + 1) & _MASK
        return Point(self, self.value)

    def now(self) -> Point:
        """When everything so far is done."""
        return Point(self, self.value)

    def release(self) -> None:
        """Let everybody go on who waits for this timeline."""
        self._word.value = (self.value + RELEASED) & _MASK


class Event:
    """A moment on a stream, with its time. Recorded once."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        driver.call("cuEventCreate", ctypes.byref(self._handle), 0)

    def record(self, stream: Stream) -> None:
        driver.call("cuEventRecord", self._handle, stream.cuda_stream)

    def block(self, stream: Stream) -> None:
        """What is enqueued next waits for the event."""
        driver.call("cuStreamWaitEvent", stream.cuda_stream, self._handle, 0)

    def synchronize(self) -> None:
        """Let the calling thread wait."""
        driver.call("cuEventSynchronize", self._handle)

    def query(self) -> bool:
        """Whether it has happened."""
        return bool(driver.functions()["cuEventQuery"](self._handle) == 0)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to a later one; both happened."""
        milliseconds = ctypes.c_float()
        driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), self._handle, end._handle)
        return milliseconds.value

    def __del__(self) -> None:
        if self._handle:
            driver.functions()["cuEventDestroy_v2"](self._handle)  # may be pending: it is released when it has happened


class Streams:
    """One device's streams besides the one that computes: two for copies, two for kernels that it need not wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.beside = torch.cuda.Stream(device)  # later pieces of large blocks
        self.showing = torch.cuda.Stream(device)  # what is published during backward

    def device_guard(self) -> AbstractContextManager[Any]:
        """Inside, the driver's calls are about this device."""
        return driver.current_device(self.device)

    def current(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def current_handle(self) -> int:
        """Of the current stream: quicker than the stream itself, and asked for in every hook."""
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """Let a tensor's memory, once it is freed, be given away only when a stream has done what it was told until then."""
        tensor.record_stream(stream)

    def record(self, stream: Stream) -> Event:
        event = Event()
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        event.block(stream)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Inside, kernels are launched on a stream."""
        return torch.cuda.stream(stream)

    def enqueue(self, *tasks: Task) -> None:
        """Give streams something to do, in order, all at once."""
        driver.run(*tasks)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> Task:
        """Both contiguous, of one size; host memory must be registered."""
        assert target.nbytes == source.nbytes
        return driver.copy(target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream) if source.nbytes else ()

    def raise_to(self, stream: Stream, point: Point) -> Task:
        """A stream raises a timeline's count when it gets there: all it did before is visible to whoever sees the count."""
        return driver.write_value(stream.cuda_stream, point.timeline.address, point.value)

    def wait_for(self, stream: Stream, point: Point) -> Task:
        """What is enqueued next waits for a moment on a timeline."""
        return driver.wait_value(stream.cuda_stream, point.timeline.address, point.value)

    def register(self, memory: Tensor) -> None:
        """Let the device reach host memory.

        Raises:
            MemoryError: the system or the driver refuses to lock so much of it.
        """
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
        except RuntimeError as error:
            limit = lockable_bytes()
            allowed = "as much as it likes" if limit is None else f"{limit / GIB:.3f} GiB"
            raise MemoryError(
                f"{memory.nbytes / GIB:.3f} GiB of host memory could not be registered for {self.device} ({error}); this "
                f"process may lock {allowed} (ulimit -l). Ways out: ulimit -l unlimited; docker run --ulimit memlock=-1; a "
                "larger memory limit of the container; a smaller max_update_interval"
            ) from error

    def unregister(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def synchronize(self, stream: Stream | None = None) -> None:
        """Let the calling thread wait for a stream, or for the device."""
        if stream is None:
            torch.cuda.synchronize(self.device)
        else:
            driver.call("cuStreamSynchronize", stream.cuda_stream)
