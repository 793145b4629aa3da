"""How close the Triton block kernels come to the memory's speed: python benchmarks/device_kernels.py [--sweep] [--json PATH]

For a transformer layer of Qwen2.5-1.5B and for its embedding (bf16, 10% of the channels selected), each kernel's bytes per
second against a device-to-device copy that moves as many bytes, in turns with it; and the launching thread's time per call
(`launches.py` says more of that).
A kernel's bytes are what its task needs: scattered columns move whole sectors, and that more is the kernel's own.
Checks every kernel's result against the torch definition first. Needs a CUDA device with 8 GiB free.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stallfree.kernels.block import BlockKernel, BlockLayout, Part, Segment, Update, targets
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.torch_block import TorchBlock
from stallfree.kernels.triton import Tile, Tiling, TritonBlock

HIDDEN, KEYS, INNER, VOCABULARY = 1536, 256, 8960, 151936
BLOCKS = {  # (channels, length, channel_dim)
    "layer": [
        *((HIDDEN, length, 1) for length in (HIDDEN, KEYS, KEYS, HIDDEN, INNER, INNER)),  # q, k, v, o, gate, up
        (INNER, HIDDEN, 1),  # down
    ],
    "embedding": [(VOCABULARY, HIDDEN, 0)],
}
HYPER = Hyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
SLEEP_CYCLES = 20_000_000  # about 10 ms, in which the thread gets ahead of the device
CALLS = 10  # between two events


class Task(NamedTuple):
    run: Callable[[BlockKernel], None]
    nbytes: int  # read and written


class Block:
    """Random tensors for one block, and the three calls on them."""

    def __init__(self, shapes: list[tuple[int, int, int]], topk_ratio: float, dtype: torch.dtype) -> None:
        segments = [Segment(*shape, round(topk_ratio * shape[0])) for shape in shapes]
        self.layout = layout = BlockLayout(segments, "cuda")
        orders = [torch.randperm(segment.channels, device="cuda") for segment in segments]
        selected = [order[: s.selected].sort().values for order, s in zip(orders, segments, strict=True)]
        deferred = [order[s.selected :].sort().values for order, s in zip(orders, segments, strict=True)]
        self.targets = targets(layout, selected, deferred)
        self.grads = [torch.randn(segment.numel, device="cuda", dtype=dtype) for segment in segments]
        self.weights = [torch.randn_like(grad) for grad in self.grads]
        self.squares = torch.zeros(layout.channels, device="cuda")
        self.selected = torch.zeros(layout.selected_numel, device="cuda", dtype=dtype)
        self.deferred = torch.zeros(layout.deferred_numel, device="cuda", dtype=dtype)
        self.master = torch.randn(layout.selected_numel, device="cuda")
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.steps = torch.zeros(layout.places, dtype=torch.int32, device="cuda")
        self.hypers = [HYPER] * len(segments)
        self.factors = torch.ones(len(segments), device="cuda")
        self.skip = torch.zeros((), dtype=torch.bool, device="cuda")
        self.updates: dict[BlockKernel, Update] = {}
        item = dtype.itemsize
        numel = layout.selected_numel + layout.deferred_numel
        self.tasks = {
            "split": Task(self.split, 2 * item * numel + 8 * layout.channels),
            "adamw": Task(self.adamw, (24 + 2 * item) * layout.selected_numel),
            "publish": Task(self.publish, 2 * item * layout.deferred_numel),
        }

    def split(self, kernel: BlockKernel) -> None:
        kernel.split(self.layout, self.targets, self.grads, self.squares, self.selected, self.deferred)

    def adamw(self, kernel: BlockKernel) -> None:
        if kernel not in self.updates:
            state = (self.master, self.exp_avg, self.exp_avg_sq, self.steps)
            part = Part(self.layout, self.targets.selected, self.weights, *state, self.selected)
            self.updates[kernel] = kernel.plan([part])
        self.updates[kernel].step(self.hypers, self.factors, self.skip)

    def publish(self, kernel: BlockKernel) -> None:
        kernel.publish(self.layout, self.targets, self.weights, self.deferred)

    def results(self, kernel: BlockKernel) -> Iterator[tuple[str, Tensor, float]]:
        """What each call makes, and how much two kernels may differ in it (relative)."""
        for flat in (self.squares, self.selected, self.deferred, self.exp_avg, self.exp_avg_sq, self.steps):
            flat.zero_()
        torch.manual_seed(0)
        self.master.normal_()
        for weight in self.weights:
            weight.zero_()
        self.split(kernel)
        yield "squares", self.squares.clone(), 1e-5
        yield "selected", self.selected.clone(), 0.0
        yield "deferred", self.deferred.clone(), 0.0
        self.publish(kernel)
        yield "published", torch.cat(self.weights), 0.0
        self.adamw(kernel)
        yield "master", self.master.clone(), 1e-5
        yield "steps", self.steps.clone(), 0.0

    def check(self, kernel: BlockKernel) -> None:
        pairs = zip(list(self.results(kernel)), self.results(TorchBlock()), strict=True)
        for (name, ours, tolerance), (_, theirs, _) in pairs:
            torch.testing.assert_close(
                ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


def device_seconds(run: Callable[[], object]) -> float:
    """Of one call, with the launching thread well ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / CALLS


def thread_seconds(run: Callable[[], object]) -> float:
    """Of one call, on the launching thread, while the device is busy."""
    torch.cuda._sleep(SLEEP_CYCLES)
    begin = time.perf_counter()
    for _ in range(CALLS * 2):
        run()
    seconds = (time.perf_counter() - begin) / CALLS / 2
    torch.cuda.synchronize()
    return seconds


def measure(block: Block, kernel: BlockKernel, task: Task, rounds: int) -> dict[str, float]:
    """Medians over rounds of kernel and copy in turns."""
    source = torch.zeros(task.nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)

    def run() -> None:
        task.run(kernel)

    def copy() -> None:
        target.copy_(source)

    for warm in (run, copy, run, copy):
        device_seconds(warm)
    pairs = [(device_seconds(run), device_seconds(copy)) for _ in range(rounds)]
    thread = statistics.median(thread_seconds(run) for _ in range(rounds))
    seconds = statistics.median(ours for ours, _ in pairs)
    return {
        "device_us": seconds * 1e6,
        "gb_per_s": task.nbytes / seconds / 1e9,
        "copy_gb_per_s": task.nbytes / statistics.median(theirs for _, theirs in pairs) / 1e9,
        "of_copy": statistics.median(theirs / ours for ours, theirs in pairs),
        "thread_us": thread * 1e6,
    }


def sweep() -> Iterator[tuple[str, Tiling, tuple[str, ...]]]:
    """Shares to try, by block, and the calls that they matter to."""
    default = Tiling()
    for tile in (
        *(Tile(64, 64, chunk, 4) for chunk in (128, 512)),
        *(Tile(64, 64, chunk, 8) for chunk in (256, 512)),
        *(Tile(64, 128, chunk, 8) for chunk in (256, 512)),
        *(Tile(128, 64, chunk, 8) for chunk in (256, 512)),
        *(Tile(32, 128, chunk, 4) for chunk in (256, 512)),
        Tile(32, 64, 256, 4),
        Tile(32, 64, 256, 2),
    ):
        yield "layer", default._replace(columns=tile), ("split", "publish")
    for tile in (Tile(32, 64, 64, 8), Tile(32, 32, 32, 4), Tile(64, 32, 32, 4), Tile(16, 128, 128, 4), Tile(64, 64, 64, 8)):
        yield "layer", default._replace(column_state=tile), ("adamw",)
    for tile in (
        Tile(8, 512, 2048, 4),
        Tile(4, 1024, 2048, 4),
        Tile(8, 256, 2048, 4),
        Tile(32, 256, 2048, 8),
        Tile(16, 512, 2048, 8),
    ):
        yield "embedding", default._replace(rows=tile), ("split", "publish")
    for tile in (Tile(4, 512, 512, 4), Tile(8, 256, 256, 8), Tile(2, 1024, 1024, 4)):
        yield "embedding", default._replace(row_state=tile), ("adamw",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of which the median is reported")
    parser.add_argument("--topk-ratio", type=float, default=0.1)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--sweep", action="store_true", help="other tile sizes, too")
    parser.add_argument("--torch", action="store_true", help="the torch definition, too")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    setting = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}",
    }
    print("\n".join(setting.values()), flush=True)
    print(f"\n| {'block':9} | {'call':7} | {'kernel':40} | device µs | GB/s | copy GB/s | of copy | thread µs |", flush=True)
    print("|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []

    def report(name: str, block: Block, call: str, label: str, kernel: BlockKernel, rounds: int) -> None:
        row = measure(block, kernel, block.tasks[call], rounds)
        rows.append({"block": name, "call": call, "kernel": label, **row})
        print(
            f"| {name:9} | {call:7} | {label:40} | {row['device_us']:9.1f} | {row['gb_per_s']:4.0f} "
            f"| {row['copy_gb_per_s']:9.0f} | {row['of_copy']:7.2f} | {row['thread_us']:9.1f} |",
            flush=True,
        )

    for name, shapes in BLOCKS.items():
        block = Block(shapes, options.topk_ratio, dtype)
        kernels: list[tuple[str, BlockKernel, tuple[str, ...]]] = [("triton", TritonBlock("cuda"), tuple(block.tasks))]
        if options.torch:
            kernels.append(("torch", TorchBlock(), tuple(block.tasks)))
        if options.sweep:
            for where, tiling, calls in sweep():
                if where == name:
                    changed = next(
                        f"{field} {tuple(tile)}" for field, tile in tiling._asdict().items() if tile != getattr(Tiling(), field)
                    )
                    kernels.append((changed, TritonBlock("cuda", tiling), calls))
        for label, kernel, calls in kernels:
            begin = time.perf_counter()
            kernel.warm_up(block.layout, dtype)
            torch.cuda.synchronize()
            if label == "triton":
                print(f"{name}: warm_up took {time.perf_counter() - begin:.1f} s", file=sys.stderr)
            if not isinstance(kernel, TorchBlock):
                block.check(kernel)
            for call in calls:
                report(name, block, call, label, kernel, options.rounds if label == "triton" else max(3, options.rounds // 3))
        del block
    if options.json:
        options.json.write_text(json.dumps({**setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
