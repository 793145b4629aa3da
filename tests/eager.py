"""A stand-in for CUDA streams whose device does everything at once: the asynchronous path without a GPU.

Copies and kernels run as they are enqueued, and a wait for host work blocks the launching thread as it would block a device.
That is one of the orders a real device may take. A wait whose condition nobody can fulfil any more fails after a while.
"""

import ctypes
import time
from contextlib import nullcontext

import torch
from torch import Tensor

from stallfree.engine import pipeline
from stallfree.engine.transfer import DeviceLink

PATIENCE = 20.0  # seconds


class EagerEvent:
    def __init__(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "EagerEvent") -> float:
        return (other.time - self.time) * 1e3


class EagerStreams:
    """See stallfree.engine.streams.Streams."""

    def __init__(self) -> None:
        self.to_host, self.to_device = "to_host", "to_device"
        self.registered: dict[int, int] = {}

    def device_guard(self):
        return nullcontext()

    def current(self) -> str:
        return "compute"

    def record(self, stream: str, *, sleeps: bool = False, timing: bool = False) -> EagerEvent:
        return EagerEvent()

    def wait(self, stream: str, event: EagerEvent) -> None:
        assert isinstance(event, EagerEvent)

    def copy(self, target: Tensor, source: Tensor, stream: str) -> None:
        assert target.nbytes == source.nbytes
        assert target.is_contiguous()
        assert source.is_contiguous()
        host = target if stream == self.to_host else source
        assert not host.nbytes or any(
            start <= host.data_ptr() and host.data_ptr() + host.nbytes <= start + size
            for start, size in self.registered.items()
        ), "the host's side of a copy is not registered"
        target.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8))

    def wait_value(self, stream: str, address: int, value: int) -> None:
        word, begin = ctypes.c_uint32.from_address(address), time.perf_counter()
        while not (word.value - value) & 0xFFFFFFFF < 1 << 31:
            assert time.perf_counter() - begin < PATIENCE, "the device waits for host work that nobody does"
            time.sleep(0)

    def register(self, memory: Tensor) -> None:
        self.registered[memory.data_ptr()] = memory.nbytes

    def unregister(self, memory: Tensor) -> None:
        del self.registered[memory.data_ptr()]

    def synchronize(self) -> None:
        pass


def use(monkeypatch) -> None:
    """Let new optimizers take the asynchronous path."""
    monkeypatch.setattr(pipeline, "link_to", lambda device: DeviceLink(device, EagerStreams()))
