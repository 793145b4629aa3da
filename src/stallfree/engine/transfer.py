"""Slots in host memory, and the copies between them and the device.

On the CPU a copy is a copy. On CUDA it runs on a stream of its own; whoever needs the data waits for the copy's event.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import Weight
from stallfree.engine.schedule import slot_index, slots_needed

Ready = Callable[[], None]  # blocks the calling thread until a copy has arrived


def _arrived() -> None:
    """A copy that is done when it returns."""


class Link:
    """Moves rows down to the host and up to the device, and counts the bytes where the copies are issued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_down = self.bytes_up = 0
        self.delay: Callable[[str], None] | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._registered: list[Tensor] = []

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can reach: registered, because pinned allocation is slower and rounds sizes up."""
        memory = torch.empty(shape, dtype=dtype)
        if self.stream is not None and memory.numel():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            self._registered.append(memory)
        return memory

    def fetch(self, source: Tensor) -> Tensor:
        """A host copy of a small device tensor; waits for it."""
        self.bytes_down += source.nbytes
        return source.to("cpu")

    def send(self, source: Tensor) -> Tensor:
        """A device copy of a small host tensor."""
        self.bytes_up += source.nbytes
        return source.to(self.device)

    def close(self) -> None:
        """Give the registered memory back. Idempotent."""
        if self.stream is not None:
            self.stream.synchronize()
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop().data_ptr())

    def down(self, source: Tensor, target: Tensor) -> Ready:
        """Copy a device tensor into host memory; call the result before reading it there."""
        self.bytes_down += source.nbytes
        if self.delay:
            self.delay("copy")
        if self.stream is None:
            target.copy_(source)
            return _arrived
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self.stream)
            event = torch.cuda.Event()
            event.record()
        return event.synchronize

    def up(self, source: Tensor) -> Tensor:
        """A device copy of host memory, ready for the current stream. The source may be overwritten by later `down`s only."""
        self.bytes_up += source.nbytes
        if self.delay:
            self.delay("copy")
        if self.stream is None:
            return source
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            target = source.to(self.device, non_blocking=True)
        current.wait_stream(self.stream)
        target.record_stream(current)
        return target


class Slots:
    """One weight's ring of slots. A slot holds the deferred gradient of a call, and later the weights to publish."""

    def __init__(self, weight: Weight, link: Link, config: ZenFlowConfig) -> None:
        self.config = config
        shape = (slots_needed(config), weight.channels, weight.length)
        self.memory = link.host_empty(shape, weight.param.dtype)
        self.ready: list[Ready] = [_arrived] * shape[0]

    def rows(self, call: int, count: int) -> Tensor:
        """The first `count` rows of the slot of a call: `[count, length]`."""
        return self.memory[slot_index(call, self.config), :count]

    def fill(self, call: int, rows: Tensor, link: Link) -> None:
        self.ready[slot_index(call, self.config)] = link.down(rows, self.rows(call, rows.shape[0]))

    def wait(self, call: int) -> None:
        self.ready[slot_index(call, self.config)]()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes
