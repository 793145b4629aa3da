"""A stand-in for CUDA streams, to run the asynchronous path without a GPU.

Each stream but one is a thread that works off its queue, as late as `pause` makes it. The computing stream is the launching
thread itself: where a device would wait, it does. So copies and what runs beside computation overtake it and each other as
freely as on a device, but the launching thread has no lead. A wait that nobody can end fails after a while.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stallfree.engine import pipeline, ring
from stallfree.engine.device_link import DeviceLink
from stallfree.engine.staging import NO_BACKWARD
from stallfree.engine.streams import Point
from stallfree.kernels.torch_block import TorchBlock

PATIENCE = 20.0  # seconds


class Event:
    def __init__(self) -> None:
        self._happened, self.time = threading.Event(), 0.0

    def happen(self) -> None:
        self.time = time.perf_counter()
        self._happened.set()

    def synchronize(self) -> None:
        assert self._happened.wait(PATIENCE), "an event that does not happen"

    def query(self) -> bool:
        return self._happened.is_set()

    def elapsed_time(self, end: "Event") -> float:
        return (end.time - self.time) * 1e3


class Stream:
    def __init__(self, pause: Callable[[], None]) -> None:
        self.todo: queue.SimpleQueue = queue.SimpleQueue()
        self.pause, self.error = pause, None
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (task := self.todo.get()) is not None:
            try:
                self.pause()
                task()
            except BaseException as error:
                self.error = error
                return


class StandIn:
    """See stallfree.engine.streams.Streams."""

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        self.to_host, self.to_device, self.beside, self.showing = (Stream(pause) for _ in range(4))
        self.registered: dict[int, int] = {}
        self._launched = threading.local()  # .on: the streams on which this thread launches kernels
        self._guarded = threading.local()  # .depth: of this thread in `device_guard`

    def _do(self, stream: Stream | None, task: Callable[[], None]) -> None:
        self._check_device(stream)
        self._put(stream, task)

    def _put(self, stream: Stream | None, task: Callable[[], None]) -> None:
        if stream is None:
            task()
        else:
            if stream.error is not None:
                raise stream.error
            stream.todo.put(task)

    @contextmanager
    def device_guard(self) -> Iterator[None]:
        self._guarded.depth = self._depth + 1
        try:
            yield
        finally:
            self._guarded.depth -= 1

    @property
    def _depth(self) -> int:
        return getattr(self._guarded, "depth", 0)

    def _check_device(self, stream: Stream | None) -> None:
        """Another device may be the current one; in backward, autograd sees to it. The default stream's handle is 0 on all."""
        in_backward = torch._C._current_graph_task_id() != NO_BACKWARD
        assert stream is not None or in_backward or self._depth, "this may go to another device's stream"

    def current(self) -> None:
        return None

    def current_handle(self) -> int:
        self._check_device(None)
        return 0

    def record(self, stream: Stream | None) -> Event:
        event = Event()
        self._do(stream, event.happen)
        return event

    def wait(self, stream: Stream | None, event: Event) -> None:
        self._do(stream, event.synchronize)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._launched, "on", None)
        self._launched.on = stream
        try:
            yield
        finally:
            self._launched.on = before

    def launch(self, kernel: Callable[..., None], *args: Any) -> None:
        """Let a kernel run on the stream that launches go to. Kernels look after their device themselves."""
        self._put(getattr(self._launched, "on", None), torch.no_grad()(lambda: kernel(*args)))

    def hold(self, tensor: Tensor, stream: Stream | None) -> None:
        """Nothing is freed while it is needed."""

    def enqueue(self, *tasks: tuple[Stream | None, Callable[[], None]]) -> None:
        for stream, task in tasks:
            self._do(stream, task)

    def copy(self, target: Tensor, source: Tensor, stream: Stream):
        assert target.nbytes == source.nbytes
        assert target.is_contiguous()
        assert source.is_contiguous()
        host = target if stream is self.to_host else source
        assert not host.nbytes or any(
            start <= host.data_ptr() and host.data_ptr() + host.nbytes <= start + size
            for start, size in self.registered.items()
        ), "the host's side of a copy is not registered"
        ours, theirs = (tensor.view(-1).view(torch.uint8) for tensor in (target, source))
        return stream, lambda: ours.copy_(theirs)

    def raise_to(self, stream: Stream | None, point: Point):
        return stream, lambda: point.timeline.memory.fill_(point.value - (point.value >> 31 << 32))

    def wait_for(self, stream: Stream | None, point: Point):
        def spin() -> None:
            begin = time.perf_counter()
            while not point.passed:
                assert time.perf_counter() - begin < PATIENCE, "the device waits for what nobody does"
                time.sleep(0)

        return stream, spin

    def register(self, memory: Tensor) -> None:
        self.registered[memory.data_ptr()] = memory.nbytes

    def unregister(self, memory: Tensor) -> None:
        del self.registered[memory.data_ptr()]
        if not self.registered:  # the link is closed
            for stream in self.threads:
                stream.todo.put(None)

    def synchronize(self, stream: Stream | None = None) -> None:
        for one in self.threads if stream is None else (stream,):
            self.record(one).synchronize()

    @property
    def threads(self) -> tuple[Stream, ...]:
        return self.to_host, self.to_device, self.beside, self.showing


class Launched(TorchBlock):
    """Kernels that run on streams, and of which torch does not see what they write, as on a GPU."""

    def __init__(self, streams: StandIn) -> None:
        self.streams = streams

    def split(self, *args: Any) -> None:
        self.streams.launch(super().split, *args)

    def publish(self, layout, targets, params, *args: Any) -> None:
        unseen = [None if param is None else param.data for param in params]
        self.streams.launch(super().publish, layout, targets, unseen, *args)


def use(monkeypatch, pause: Callable[[], None] = lambda: None, staging_bytes: int = 0) -> None:
    """Let new optimizers take a GPU's path, with so much staging memory in each direction, but at least for a row or two."""
    use_streams(monkeypatch, lambda: StandIn(pause), staging_bytes)


def use_streams(monkeypatch, make: Callable[[], StandIn], staging_bytes: int) -> None:
    """Likewise, with streams of one's own."""
    made: list[StandIn] = []  # an engine asks for its kernel, then for its link

    def kernel(device: torch.device) -> Launched:
        made.append(make())
        return Launched(made[-1])

    monkeypatch.setattr(ring, "STAGING_BYTES", staging_bytes)
    monkeypatch.setattr(pipeline, "block_kernel", kernel)
    monkeypatch.setattr(pipeline, "link_to", lambda device: DeviceLink(device, made[-1]))
