"""Slots in host memory, and the copies between them and the device.

On the CPU a copy is a copy. On CUDA it runs on a stream of its own; whoever needs the data waits for the copy's event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import Block
from stallfree.engine.schedule import slot_index, slots_needed
from stallfree.kernels.block import BlockLayout

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

    def staging(self, target: Tensor) -> Tensor:
        """Where the device writes what `down` then copies to `target`. Without a device, the target itself."""
        return target if self.stream is None else torch.empty_like(target, device=self.device)

    def down(self, source: Tensor, target: Tensor) -> Ready:
        """Copy a device tensor into host memory; call the result before reading it there."""
        self.bytes_down += source.nbytes
        if self.delay:
            self.delay("copy")
        if self.stream is None:
            if source.data_ptr() != target.data_ptr():
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
    """One block's ring of slots. A slot holds the deferred gradients of a call, and later the weights to publish."""

    def __init__(self, block: Block, link: Link, config: ZenFlowConfig) -> None:
        self.config, self.link = config, link
        self.memory = link.host_empty((slots_needed(config), block.numel), block.dtype)
        self.ready: list[Ready] = [_arrived] * len(self.memory)

    def flat(self, call: int, layout: BlockLayout) -> Tensor:
        """All deferred rows of a call, or of the window that began with it."""
        return self.memory[slot_index(call, self.config), : layout.deferred_numel]

    def rows(self, call: int, layout: BlockLayout, place: int) -> Tensor:
        """The deferred rows of one weight: `[channels, length]`."""
        return layout.deferred_rows(self.flat(call, layout), place)

    def fill(self, call: int, layout: BlockLayout, places: Sequence[int], staged: Tensor) -> None:
        """Bring the staged rows of some weights down: in one copy, if they are all of the block's."""
        slot = slot_index(call, self.config)
        if len(places) == len(layout.segments):
            self.ready[slot] = self.link.down(staged, self.flat(call, layout))
            return
        for place in places:
            self.ready[slot] = self.link.down(layout.deferred_rows(staged, place), self.rows(call, layout, place))

    def wait(self, call: int) -> None:
        self.ready[slot_index(call, self.config)]()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes
