"""Copies between slots in host memory and the device.

On the CPU (`Link`) the two are the same memory, and waiting for the host is waiting. On a GPU (`DeviceLink`, in
device_link.py) the launching thread waits for neither, in backward and in `step()`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from stallfree.engine.blocks import Block
from stallfree.engine.memory import host_memory
from stallfree.engine.ring import Share
from stallfree.engine.slots import Claim
from stallfree.engine.stalls import Stalls
from stallfree.engine.streams import Point, Timeline
from stallfree.engine.uninterrupted import outside_inference
from stallfree.kernels.queue import HostError
from stallfree.kernels.windows import Gate


@dataclass(frozen=True, slots=True)
class Arrival:
    """Weights on their way up."""

    share: Share
    point: Point

    def forget(self) -> None:
        """Nobody will use it."""
        self.share.used = self.point


class Link:
    """Moves rows down to the host and up to the device, and counts the bytes where the copies are issued.

    This one is for parameters in host memory: what goes down is there at once, and the launching thread waits for host work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_down = self.bytes_up = 0
        self.staging_nbytes = 0  # of device memory
        self.delay: Callable[[str], float] | None = None  # seconds to lose at a copy
        self.stalls, self.crowding = Stalls(), Stalls()  # for what comes up, and for staging memory on the way down
        self.host = Timeline(torch.zeros(1, dtype=torch.int32, device="cpu"), 0)  # windows done
        self.wait_for_host: Callable[[Point], None] = lambda point: None  # lets the launching thread wait

    def waited(self) -> float:
        """Seconds for which the device has waited for the host or for staging memory, as far as they are known."""
        return self.stalls.so_far() + self.crowding.so_far()

    def device_guard(self) -> AbstractContextManager[object]:
        """Inside, the computing stream is one of this device; in backward, autograd sees to that."""
        return nullcontext()

    def follow(self) -> int:
        """Note that gradients are computed on the current stream: what uses them on another one will wait for it.

        Returns a number of that stream.
        """
        return 0

    def hold(self, tensors: Sequence[Tensor | None], shared: bool) -> None:
        """Keep tensors' memory, even if it is freed, until the current stream has read it.

        shared: it belongs to another stream, as fully_shard's gradients do, which counts on them to outlive backward.
        """

    def take(self, nbytes: int) -> Tensor:
        """Memory of the device, contents undefined, for computing streams; the last that uses it is to `hold` it."""
        with outside_inference():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def piece_bytes(self) -> int:
        """How much goes through staging memory at a time; a row more, if need be."""
        return sys.maxsize

    def stages_whole(self, nbytes: int) -> bool:
        """Whether staging memory on the way down holds so much at once."""
        return True

    def room_left(self) -> int:
        """How many bytes that memory has left before it begins anew: what is larger is better staged in two pieces."""
        return sys.maxsize

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Make room for copies of these blocks' pieces."""

    def host_memory(self, nbytes: int) -> Tensor:
        """Host memory that the device can reach, beginning at a page."""
        return host_memory(nbytes)

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same as a tensor; contents undefined."""
        return self.host_memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def to_device(self, source: Tensor) -> Tensor:
        """A device copy of a host tensor that need not live on; waits for it."""
        self._count(up=source.nbytes)
        return source

    @contextmanager
    def staging(self, target: Tensor, after: Sequence[Claim] = ()) -> Iterator[Tensor]:
        """Where the device writes what `down` then copies to `target`, with the same `after`."""
        self._wait_for_all(after)
        yield target

    def down(self, source: Tensor, target: Tensor, after: Sequence[Claim] = ()) -> None:
        """Copy a device tensor into host memory, each part of it once nobody has a claim to its place any more.

        The source must be memory that lives on: the copy may be made much later.
        """
        self._wait_for_all(after)
        self._count(down=source.nbytes)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)

    def beside(self, tensors: Sequence[Tensor | None]) -> AbstractContextManager[None]:
        """What is staged inside, from these tensors, runs beside computation, which does not wait for staging memory."""
        return nullcontext()

    def begin_call(self, at_once: bool) -> None:
        """`step()` computes on the current stream, which waits for what ran beside it before the last call, or for all of it.

        Who has kept a gradient may write it from then on.
        """

    def carried(self, nbytes: int) -> None:
        """A kernel has been told to write so much into host memory, which host work and `wait_down` are to wait for."""
        self._count(down=nbytes)

    def sent(self) -> Point | None:
        """When everything that has been sent down so far is there."""
        return None

    def gates(self, sent: Point | None = None) -> tuple[Gate, ...]:
        """What host work waits for to see what kernels have written and what has been sent down: until then, or all so far."""
        return ()

    def hold_gates(self, until: Sequence[Point]) -> None:
        """Gates made from now on open only when some moments have passed, too."""

    def lead(self) -> float | None:
        """How far the launching thread is ahead of the device, in calls. None: there is no device."""
        return None

    def wait_down(self) -> None:
        """Let the launching thread wait for everything that has been sent down so far."""

    def begin_up(self, source: Tensor, work: Point | None) -> Arrival | None:
        """Begin an `up` early, if there is room: the copy is made as soon as the host work is done."""
        return None

    @contextmanager
    def up(self, source: Tensor, work: Point | None, arrival: Arrival | None = None) -> Iterator[Tensor]:
        """A device copy of host memory once host work is done. On a GPU it has been begun."""
        if work is not None:
            self.wait(work)
        self._count(up=source.nbytes)
        yield source

    def up_showing(self, source: Tensor, work: Point | None, arrival: Arrival | None) -> AbstractContextManager[Tensor]:
        """The same, used by kernels that run beside computation, which goes on until it joins them."""
        return self.up(source, work, arrival)

    def join_showing(self) -> None:
        """Let computation wait for all that uses what came up, beside it: before anybody may read the weights."""

    def begin_return(self, target: Tensor, source: Tensor, work: Point | None) -> Point | None:
        """Begin a `take_back` early: nobody uses the target meanwhile."""
        return None

    def take_back(self, target: Tensor, source: Tensor, work: Point | None, returned: Point | None) -> None:
        """Copy host memory into a device tensor once host work is done. On a GPU it has been begun: when it will be there."""
        with self.up(source, work) as values:
            target.copy_(values)

    def wait(self, work: Point) -> None:
        """Let the launching thread wait for host work."""
        start = time.perf_counter()
        self.wait_for_host(work)
        self.stalls.add(time.perf_counter() - start)

    def _wait_for_all(self, claims: Sequence[Claim]) -> None:
        """The same, for memory that the host has still to read. If it fails, the next call says so."""
        for claim in claims:
            if not claim.point.passed:
                with suppress(HostError):
                    self.wait(claim.point)

    def _count(self, down: int = 0, up: int = 0) -> None:
        self.bytes_down += down
        self.bytes_up += up
        if self.delay:
            time.sleep(self.delay("copy"))

    def close(self) -> None:
        """Let nothing on the device wait any more, and give the memory back. Idempotent."""
