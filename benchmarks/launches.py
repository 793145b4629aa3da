"""What a launch costs the launching thread: python benchmarks/launches.py [--json PATH]

Launches of the block kernels' compiled code, directly and through triton's search for it, in turns; and whole calls for a
transformer layer of Qwen2.5-1.5B, and a step of AdamW for all 28 of them (weights an eighth as long, which changes no
launch). Kernels find nothing to do, or little, so that the thread is what is measured. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import triton

from stallfree.kernels.block import BlockLayout, Part, Segment, targets
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.triton import TritonBlock
from stallfree.kernels.triton_functions import adamw_kernel, publish_kernel, split_kernel
from stallfree.kernels.triton_launch import Launch
from stallfree.kernels.triton_tables import LANGUAGE_DTYPES
from stallfree.kernels.triton_update import EMPTY

LAYER = [(192, length, 1) for length in (192, 32, 32, 192, 1120, 1120)] + [(1120, 192, 1)]  # (channels, length, channel_dim)
LAYERS = 28
BURST = 200  # launches before the thread waits for the device: fewer than a stream holds


def thread_us(run: Callable[[], object]) -> float:
    """Of one call on the launching thread, with room in the stream's queue."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(BURST):
        run()
    seconds = time.perf_counter() - begin
    torch.cuda.synchronize()
    return seconds / BURST * 1e6


def pairs(device: torch.device | str = "cuda") -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Each kernel's launch, directly and as usual, with no weight present."""
    table = torch.ones(16, dtype=torch.int64, device=device)  # the row of a weight whose bit no mask has
    address = table.data_ptr()
    addresses, mask = (address,) * 8, (EMPTY,) * 8
    general = (LANGUAGE_DTYPES[torch.bfloat16], True, True, 8)
    both = {}
    for name, kernel, integers, constants in (
        ("split", split_kernel, (*(address,) * 6, 0, 0, 0, addresses), (*general, 64, 64, 256)),
        ("publish", publish_kernel, (*(address,) * 3, 0, 0, 0, addresses), (*general, 64, 64, 256)),
        ("adamw", adamw_kernel, (address, 0, address, mask), (*general, 32, 64)),
    ):
        launch = Launch(kernel, 1, constants, 4)
        launch(*integers)
        if not launch.is_direct:
            print(f"{name}: this triton's compiled code cannot be launched directly", file=sys.stderr)

        def direct(launch: Launch = launch, integers: tuple = integers, table: object = table) -> None:
            launch(*integers)

        def ordinary(kernel: object = kernel, integers: tuple = integers, constants: tuple = constants) -> None:
            kernel[(1,)](*integers, *constants, num_warps=4)  # type: ignore[index]

        both[name] = direct, ordinary
    return both


def calls(device: torch.device | str = "cuda") -> dict[str, Callable[[], object]]:
    """Whole calls."""
    kernel, dtype = TritonBlock(device), torch.bfloat16
    segments = [Segment(*shape, shape[0] // 10) for shape in LAYER]
    layout = BlockLayout(segments, device)
    numbers = [torch.arange(segment.channels, device=device) for segment in segments]
    pairs = list(zip(numbers, segments, strict=True))
    where = targets(layout, [n[: s.selected] for n, s in pairs], [n[s.selected :] for n, s in pairs])
    grads = [torch.zeros(segment.numel, dtype=dtype, device=device) for segment in segments]
    squares = torch.zeros(layout.channels, device=device)
    selected, deferred = (torch.zeros(n, dtype=dtype, device=device) for n in (layout.selected_numel, layout.deferred_numel))
    kernel.warm_up(layout, dtype)

    def part() -> Part:
        master, exp_avg, exp_avg_sq = (torch.zeros(layout.selected_numel, device=device) for _ in range(3))
        steps = torch.zeros(layout.places, dtype=torch.int32, device=device)
        return Part(layout, where.selected, grads, master, exp_avg, exp_avg_sq, steps, selected)

    update = kernel.plan([part() for _ in range(LAYERS)])
    factors = torch.ones(LAYERS * len(LAYER), device=device)
    skip = torch.ones((), dtype=torch.bool, device=device)
    hyper = Hyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
    hypers = [hyper] * len(factors)
    rates = iter(range(1, 1 << 60))

    def scheduled() -> None:
        update.step([hyper._replace(lr=1e-9 * next(rates))] * len(factors), factors, skip)

    return {
        "split": lambda: kernel.split(layout, where, grads, squares, selected, deferred),
        "publish": lambda: kernel.publish(layout, where, grads, deferred),
        "AdamW, all layers": lambda: update.step(hypers, factors, skip),
        "AdamW, all layers, a new rate": scheduled,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="of which the median is reported")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    setting = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}",
    }
    print("\n".join(setting.values()), flush=True)
    rows = []
    print("\n| launch | direct µs | per second | as usual µs | per second |\n|---|---|---|---|---|")
    for name, (direct, ordinary) in pairs().items():
        for warm in (direct, ordinary):
            thread_us(warm)
        rounds = [(thread_us(direct), thread_us(ordinary)) for _ in range(options.rounds)]
        ours, theirs = (statistics.median(side) for side in zip(*rounds, strict=True))
        rows.append({"launch": name, "direct_us": ours, "ordinary_us": theirs})
        print(f"| {name} | {ours:.1f} | {1e6 / ours:.0f} | {theirs:.1f} | {1e6 / theirs:.0f} |", flush=True)
    print("\n| call | thread µs |\n|---|---|")
    for name, run in calls().items():
        thread_us(run)
        us = statistics.median(thread_us(run) for _ in range(options.rounds))
        rows.append({"call": name, "thread_us": us})
        print(f"| {name} | {us:.1f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({**setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
