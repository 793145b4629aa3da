"""What forward and backward lose beside a host that replays, and to what: its cores, or its memory.

    python -m benchmarks.beside --model 1.5b --batch 4 --threads 4 7 10 13 --output RESULT.json

No optimizer is involved. Steps of a model's forward and backward pass alone alternate with the same beside replay on some
threads, in a process of its own, so that nothing but the machine is shared: of a job in memory, as in training, and of one that
stays in the caches of its cores, with the same arithmetic. Threads are the scheduler's, as the optimizer's are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.replay import make_job
from stallfree.cli.bench.environment import environment
from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.bench.shapes import build_model, model_config, random_batch
from stallfree.kernels.native import NativeReplay
from stallfree.kernels.replay import ReplayJob

KINDS = ("memory", "cache")
CACHED = 1 << 14  # elements for each thread: 400 KB of state and gradients at S=8


def job_of(elements: int, slots: int) -> ReplayJob:
    return make_job(elements, 1024, slots, torch.float32, torch.bfloat16, 1.0)


def host(orders: Connection, elements: int, slots: int) -> None:
    """Replay as ordered, (kind, threads), until the next message; answer with gradients per second. None ends it."""
    in_memory = job_of(elements, slots)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        kind, threads = order
        job = in_memory if kind == "memory" else job_of(threads * CACHED, slots)
        kernel = NativeReplay(threads)
        kernel.replay(job)
        orders.send("begun")
        begin, count = time.perf_counter(), 0
        while not orders.poll():
            kernel.replay(job)
            count += 1
        orders.recv()
        orders.send(count * job.slots[0].grad.numel() * slots / (time.perf_counter() - begin))
        kernel.close()


class Floor:
    """Forward and backward of a model."""

    def __init__(self, settings: BenchSettings) -> None:
        config = model_config(settings)
        self.on_gpu = settings.device == "cuda"
        self.model = build_model(config, settings, settings.device)
        self.ids = random_batch(config, settings)

    def run(self, steps: int) -> dict[str, float]:
        """Means in ms: of a step, and of the launching thread in forward and in backward."""
        self._synchronize()
        begin, forward, backward = time.perf_counter(), 0.0, 0.0
        for _ in range(steps):
            start = time.perf_counter()
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            middle = time.perf_counter()
            loss.backward()
            forward, backward = forward + middle - start, backward + time.perf_counter() - middle
            self.model.zero_grad()
        self._synchronize()
        times = {"step_ms": time.perf_counter() - begin, "forward_ms": forward, "backward_ms": backward}
        return {name: 1e3 * seconds / steps for name, seconds in times.items()}

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def measure(args: argparse.Namespace, settings: BenchSettings) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=host, args=(theirs, args.elements, args.slots), daemon=True)
    process.start()
    floor = Floor(settings)
    floor.run(args.warm_up)
    orders.recv()
    lines: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for kind, threads in [("nothing", 0), *((kind, threads) for threads in args.threads for kind in KINDS)]:
            rate = 0.0
            if threads:
                orders.send((kind, threads))
                orders.recv()
            times = floor.run(args.steps)
            if threads:
                orders.send("enough")
                rate = orders.recv()
            lines.append({"round": number + 1, "beside": kind, "threads": threads, **times, "gradients_per_s": rate})
            print(line(lines[-1]), flush=True)
    orders.send(None)
    process.join()
    return lines


def line(entry: dict[str, Any]) -> str:
    times = "".join(f"{entry[name]:>10.1f}" for name in ("step_ms", "forward_ms", "backward_ms"))
    return f"{entry['beside']:>8}{entry['threads']:>8}{times}{entry['gradients_per_s'] / 1e9:>16.2f}"


def summary(lines: list[dict[str, Any]]) -> str:
    """The mean step beside each, by the mean step beside nothing."""
    steps: dict[tuple[str, int], list[float]] = {}
    for entry in lines:
        steps.setdefault((entry["beside"], entry["threads"]), []).append(entry["step_ms"])
    alone = statistics.fmean(steps["nothing", 0])
    return "\n".join(f"{kind:>8}{threads:>8}{statistics.fmean(ms) / alone:>10.3f}" for (kind, threads), ms in steps.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--model", default="1.5b" if device == "cuda" else "tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--threads", type=int, nargs="+", default=[4, 7, 10, 13])
    parser.add_argument("--slots", type=int, default=8, help="S")
    parser.add_argument("--elements", type=int, default=1 << 27, help="of the job in memory: more than caches hold")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--output", type=Path, help="write a JSON file")
    args = parser.parse_args()
    settings = BenchSettings(model=args.model, batch=args.batch, seq=args.seq, device=device)
    print(f"{'beside':>8}{'threads':>8}{'step ms':>10}{'forward':>10}{'backward':>10}{'gradients, G/s':>16}")
    lines = measure(args, settings)
    print("\nmean step, by that beside nothing\n" + summary(lines))
    if args.output:
        args.output.write_text(json.dumps({"environment": environment(settings), "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
