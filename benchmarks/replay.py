"""Speed of the host replay kernel, against the memory ceiling and torch's fused AdamW on the CPU.

    python benchmarks/replay.py --threads 1 2 --output benchmarks/results/replay-my-machine.json

One line per number of threads, kind of moments and number of slots (S). Columns:

    ns/param      time of one window's replay per deferred parameter, median over the rounds
    GB/s          bytes that a replay must move (state read and written, S slots read, published weights written) over time
    of ceiling    that rate over torch's in-place `mul_` of as many bytes with as many threads. The two alternate, so that
                  other load on the machine hits both; the ratio is the median of the rounds' ratios
    x AdamW       how many times faster than `torch.optim.AdamW(fused=True)` makes the same S steps, with fp32 gradients given
                  to it and its weights left unpublished

With `--model`, a fit follows: what a parameter costs in arithmetic on one thread with everything in cache, and whether bytes or
arithmetic should therefore bind at each number of threads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from stallfree.kernels.native import NativeReplay, best_isa
from stallfree.kernels.replay import ReplayJob, SlotGradient

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_job(
    elements: int, length: int, slots: int, moments: torch.dtype, gradients: torch.dtype, deferred: float
) -> ReplayJob:
    """A window whose publish takes the place of its first slot, as in training. `elements` counts deferred parameters."""
    row_count = max(1, elements // length)
    channels = max(row_count, round(row_count / deferred))
    window, state = (row_count, length), (channels, length)
    hyper = dict(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, factor=0.9)
    gradient = torch.randn(window).to(gradients)
    grads = tuple(SlotGradient(gradient.clone(), **hyper) for _ in range(slots))
    return ReplayJob(
        master=torch.randn(state),
        exp_avg=torch.zeros(state, dtype=moments),
        exp_avg_sq=torch.zeros(state, dtype=moments),
        steps=torch.zeros(channels, dtype=torch.int32),
        rows=torch.randperm(channels)[:row_count].sort().values,
        slots=grads,
        rule="replay",
        lookahead=2.0,
        out=grads[0].grad,
        commit=True,
        key=1,
    )


def bytes_per_parameter(slots: int, moments: torch.dtype, gradients: torch.dtype) -> int:
    return 2 * (4 + 2 * moments.itemsize) + slots * gradients.itemsize + gradients.itemsize


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounds_of(works: dict[str, Callable[[], object]], threads: int, wanted: int, share: float) -> dict[str, list[float]]:
    """Seconds of each work, in rounds in which every work got `share` of its cores; or the last ones, if those are too few."""
    good: list[dict[str, float]] = []
    poor: list[dict[str, float]] = []
    while len(good) < wanted and len(good) + len(poor) < 20 * wanted:
        times, got = {}, 1.0
        for name, work in works.items():
            time.sleep(0.02)  # torch's OpenMP threads spin on their cores for some milliseconds after their work
            cpu = time.process_time()
            times[name] = seconds(work)
            got = min(got, (time.process_time() - cpu) / (times[name] * threads))
        (good if got >= share else poor).append(times)
    if len(good) < wanted:
        print(f"(only {len(good)} of {len(good) + len(poor)} rounds had the cores to themselves)")
    rounds = (poor + good)[-wanted:]
    return {name: [times[name] for times in rounds] for name in works}


def adamw_steps(elements: int, slots: int) -> Callable[[], None]:
    param = torch.nn.Parameter(torch.randn(elements))
    param.grad = torch.randn(elements)
    optimizer = torch.optim.AdamW([param], lr=1e-4, fused=True)

    def run() -> None:
        for _ in range(slots):
            optimizer.step()

    return run


def measure(args: argparse.Namespace, threads: int, moments: str, slots: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    kernel = NativeReplay(threads, cores=args.cores[:threads] if args.cores else None, pin=True, isa=args.isa)
    job = make_job(args.elements, args.length, slots, DTYPES[moments], DTYPES[args.gradients], args.deferred)
    elements = job.slots[0].grad.numel()
    moved = elements * bytes_per_parameter(slots, DTYPES[moments], DTYPES[args.gradients])
    ceiling = torch.ones(moved // 8)  # mul_ reads and writes 4 bytes per element
    works: dict[str, Callable[[], object]] = {"replay": lambda: kernel.replay(job), "ceiling": lambda: ceiling.mul_(1.0)}
    if not args.no_adamw and moments == "fp32":
        works["adamw"] = adamw_steps(elements, slots)
    for work in works.values():
        seconds(work)  # warm-up
    times = rounds_of(works, threads, args.rounds, args.share)
    kernel.close()

    def ratio(name: str) -> float | None:
        if name not in times:
            return None
        return statistics.median(other / own for own, other in zip(times["replay"], times[name], strict=True))

    replay = statistics.median(times["replay"])
    return {
        "threads": threads,
        "moments": moments,
        "slots": slots,
        "ns_per_parameter": replay / elements * 1e9,
        "gb_per_s": moved / replay / 1e9,
        "ceiling_gb_per_s": moved / statistics.median(times["ceiling"]) / 1e9,
        "of_ceiling": ratio("ceiling"),
        "times_adamw": ratio("adamw"),
        "seconds": times,
    }


def arithmetic_ns(args: argparse.Namespace, moments: str, slots: int) -> float:
    """Time per parameter on one thread with all data in cache: two sizes' difference, so that the call's cost drops out."""
    kernel = NativeReplay(1, isa=args.isa)
    best = []
    for elements in (8192, 16384):
        job = make_job(elements, 4096, slots, DTYPES[moments], DTYPES[args.gradients], 1.0)
        best.append(min(seconds(lambda job=job: kernel.replay(job)) for _ in range(3000)))
    kernel.close()
    return (best[1] - best[0]) / 8192 * 1e9


def model(args: argparse.Namespace, lines: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """ns/parameter = max(bytes / bandwidth, (a + b S) / threads), with a and b from cached runs and the bandwidth of `mul_`."""
    for moments in args.moments:
        few, many = 1, 9
        cost = {slots: arithmetic_ns(args, moments, slots) for slots in (few, many)}
        per_slot = (cost[many] - cost[few]) / (many - few)
        base = cost[few] - per_slot * few
        print(f"\n{moments} moments, one thread, data in cache: {base:.3f} + {per_slot:.3f} S ns/param")
        print(f"{'threads':>7} {'S':>3} {'bytes':>8} {'arithm.':>8} {'measured':>9}  binds")
        for line in lines:
            if line["moments"] != moments:
                continue
            bandwidth = line["ceiling_gb_per_s"]
            by_bytes = bytes_per_parameter(line["slots"], DTYPES[moments], DTYPES[args.gradients]) / bandwidth
            by_arithmetic = (base + per_slot * line["slots"]) / line["threads"]
            binds = "bytes" if by_bytes > by_arithmetic else "arithmetic"
            fit = {"bytes_ns": by_bytes, "arithmetic_ns": by_arithmetic, "binds": binds}
            yield {"threads": line["threads"], "moments": moments, "slots": line["slots"], **fit}
            print(
                f"{line['threads']:>7} {line['slots']:>3} {by_bytes:>8.3f} {by_arithmetic:>8.3f} "
                f"{line['ns_per_parameter']:>9.3f}  {binds}"
            )


def environment(args: argparse.Namespace) -> dict[str, object]:
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "isa": args.isa or best_isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "elements": args.elements,
        "length": args.length,
        "deferred": args.deferred,
        "gradients": args.gradients,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cores", type=int, nargs="+", help="bind the kernel's threads to these cores, in this order")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8], help="windows' sizes S")
    parser.add_argument("--moments", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--gradients", choices=tuple(DTYPES), default="bf16")
    parser.add_argument(
        "--elements", type=int, default=32 << 20, help="deferred parameters of the job; 2^25 move 1.1 GB at S=4"
    )
    parser.add_argument("--length", type=int, default=4096, help="of a channel")
    parser.add_argument(
        "--deferred", type=float, default=1.0, help="share of channels that the job defers; the others are gaps"
    )
    parser.add_argument("--isa", choices=("portable", "avx2", "avx512", "avx512-rsqrt"), help="default: the best here")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--share",
        type=float,
        default=0.9,
        help="keep only rounds in which the threads got this share of their cores' time, as other work on the machine distorts",
    )
    parser.add_argument("--no-adamw", action="store_true", help="leave out torch's AdamW")
    parser.add_argument("--model", action="store_true", help="add the cost model")
    parser.add_argument("--output", type=Path, help="write a JSON file")
    args = parser.parse_args()

    about = environment(args)
    for name, value in about.items():
        print(f"{name}: {value}")
    print(
        f"\n{'threads':>7} {'moments':>7} {'S':>3} {'ns/param':>9} {'GB/s':>6} {'ceiling':>8} {'of ceiling':>10} {'x AdamW':>8}"
    )
    lines = []
    for threads in args.threads:
        for moments in args.moments:
            for slots in args.slots:
                line = measure(args, threads, moments, slots)
                lines.append(line)
                adamw = f"{line['times_adamw']:.2f}" if line["times_adamw"] else "-"
                print(
                    f"{threads:>7} {moments:>7} {slots:>3} {line['ns_per_parameter']:>9.3f} {line['gb_per_s']:>6.1f} "
                    f"{line['ceiling_gb_per_s']:>8.1f} {line['of_ceiling']:>10.2f} {adamw:>8}",
                    flush=True,
                )
    result = {"environment": about, "lines": lines}
    if args.model:
        result["model"] = list(model(args, lines))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
