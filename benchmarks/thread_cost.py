"""What the optimizer costs the launching thread, without a GPU: python benchmarks/thread_cost.py [--cold 96] [--profile]

All of the GPU's path runs as it does there, up to the driver: links, rings, timelines, tables and launches of kernels, packed
calls. In the driver's place are C functions that write a word or wait for one, copy some bytes, or do nothing. A model with the
parameters of Qwen2.5-1.5B (28 layers, 338 parameters) in miniature is trained; hooks and `step()` are timed by themselves.

--cold reads memory before each of them, so that nothing of the optimizer is in a cache: between two hooks backward runs much
other code.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import os
import pstats
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels' tables on the CPU; they are never launched

import torch
from torch import Tensor, nn

from stallfree import ZenFlowAdamW, channel_dims
from stallfree.engine import pipeline
from stallfree.engine.device_link import DeviceLink
from stallfree.engine.staging import Staging
from stallfree.engine.streams import Streams
from stallfree.kernels import driver
from stallfree.kernels.native import load_library
from stallfree.kernels.triton import TritonBlock
from stallfree.kernels.triton_launch import Code, Launch

FUNCTIONS = ("write_value", "wait_value", "copy_bytes", "launch_kernel")  # as driver.RUN
SOURCE = """
#include <sched.h>

#include <cstdint>
#include <cstring>
extern "C" {
int write_value(void*, uint64_t address, uint32_t value, unsigned) {
  __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
  return 0;
}
int wait_value(void*, uint64_t address, uint32_t value, unsigned) {  // for the host, which is mostly done
  const auto word = reinterpret_cast<uint32_t*>(address);
  while (static_cast<int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0) sched_yield();
  return 0;
}
int copy_bytes(uint64_t target, uint64_t source, size_t bytes, void*) {
  memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes);
  return 0;
}
int launch_kernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) {
  return 0;
}
}
"""
HIDDEN, VOCABULARY, LAYERS = 16, 64, 28


class NoStreams(Streams):
    """Streams that are numbers: what is enqueued is done at once."""

    def __init__(self) -> None:
        self.to_host, self.to_device, self.beside, self.showing, self._main = (
            SimpleNamespace(cuda_stream=i) for i in range(1, 6)
        )

    def device_guard(self) -> Any:
        return nullcontext()

    def current(self) -> Any:
        return self._main

    def current_handle(self) -> int:
        return 5

    def record(self, stream: Any) -> Any:
        return SimpleNamespace(query=lambda: True, synchronize=lambda: None, elapsed_time=lambda end: 0.0)

    def on(self, stream: Any) -> Any:
        return nullcontext()

    def nothing(self, *_: object) -> None:
        pass

    wait = hold = register = unregister = synchronize = nothing


def load(launch: Launch, *_: object) -> None:
    """In the place of Triton's compilation."""
    launch.code = launch.code or Code(function=1, programs=1, threads=128, shared=0, scratch=(0, 0))


@contextmanager
def no_device() -> Iterator[None]:
    """Inside, an optimizer for the CPU takes a GPU's path, to a driver that does nothing."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        source, built = Path(folder, "driver.cpp"), Path(folder, "driver.so")
        source.write_text(SOURCE)
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", built, source], check=True)
        functions, library = ctypes.CDLL(str(built)), driver.runs_commands(load_library())
        table = (ctypes.c_void_p * 4)(*[ctypes.cast(getattr(functions, name), ctypes.c_void_p).value for name in FUNCTIONS])
        for place, name, value in (
            (driver, "_runner", lambda: (library, table)),
            (pipeline, "link_to", lambda device: DeviceLink(device, NoStreams())),
            (pipeline, "block_kernel", lambda device: TritonBlock(device, checks=False)),
            (Launch, "__call__", load),
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 5),
            (torch._C, "_cuda_getDevice", lambda: 0),
        ):
            stack.enter_context(mock.patch.object(place, name, value, create=True))
        yield


class Layer(nn.Module):
    """Twelve parameters, as a layer of Qwen2.5 has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.o, self.gate, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.before, self.after = (nn.LayerNorm(HIDDEN, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.o(self.q(y) + self.k(y) + self.v(y))
        y = self.after(x)
        return x + self.down(self.gate(y) * self.up(y))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.LayerNorm(HIDDEN, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.t()


class Clock:
    """Adds up what calls take, each after what `before` does."""

    def __init__(self, before: Callable[[], object], profile: cProfile.Profile | None) -> None:
        self._before, self._profile = before, profile
        self.seconds, self.calls = 0.0, 0

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self._before()
        begin = time.perf_counter()
        if self._profile:
            self._profile.enable()
        result = call(*arguments)
        if self._profile:
            self._profile.disable()
        self.seconds, self.calls = self.seconds + time.perf_counter() - begin, self.calls + 1
        return result

    def read(self) -> float:
        """Seconds since the last reading."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a step: of all hooks and of `step()`, the fastest round and the median; and how many blocks there are."""
    swept = torch.zeros(options.cold << 17, dtype=torch.float64) if options.cold else None
    profile = cProfile.Profile() if options.profile else None
    hooks, steps = (Clock((lambda: None) if swept is None else swept.sum, profile) for _ in range(2))
    torch.set_num_threads(1)
    model, ids = Model(options.layers), torch.zeros(1, 2, dtype=torch.int64)
    on_gradient = Staging.on_gradient

    def timed(staging: Staging, state: Any) -> None:
        hooks(on_gradient, staging, state)

    with no_device(), mock.patch.object(Staging, "on_gradient", timed):
        optimizer = ZenFlowAdamW(
            model.named_parameters(),
            lr=1e-5,
            max_grad_norm=1.0,
            channel_dim=channel_dims(model),
            update_interval=options.interval,
            full_warm_up_rounds=2,
            select_interval=10**6,
            min_numel=HIDDEN * HIDDEN,
            block_numel=options.block,
            host_threads=1,
        )

        def step() -> None:
            model(ids).sum().backward()
            steps(optimizer.step)
            model.zero_grad(set_to_none=True)

        for _ in range(40):
            step()
        rounds, _, _ = [], hooks.read(), steps.read()
        if profile:
            profile.clear()
        for _ in range(options.rounds):
            for _ in range(options.steps):
                step()
            rounds.append((hooks.read() / options.steps * 1e6, steps.read() / options.steps * 1e6))
        blocks = len(optimizer.engine.blocks)
        optimizer.close()
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return {
        "blocks": blocks,
        **{
            name: {"least": min(numbers), "median": statistics.median(numbers)}
            for name, numbers in zip(("hooks", "step"), zip(*rounds, strict=True), strict=True)
        },
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=int, default=4, help="S")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--block", type=int, default=16_000, help="elements of a block at most; the model has 51,200 in its weights"
    )
    parser.add_argument("--cold", type=int, default=0, metavar="MB", help="of memory that is read before each hook and step()")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60, help="of a round")
    parser.add_argument("--profile", action="store_true", help="show where the time goes; everything is slower then")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    found = measure(options)
    print(
        f"{found['blocks']} blocks, S={options.interval}, {options.cold} MB read before each call; us per step, least (median):"
    )
    for name in ("hooks", "step"):
        print(f"  {name:5} {found[name]['least']:7.0f} ({found[name]['median']:.0f})")


if __name__ == "__main__":
    main()
