"""Train SmolLM2-135M with every update rule: python -m benchmarks.convergence.study --parts DIR... --out FILE

Results are appended to FILE, a line for every finished run; runs that FILE or --known already hold are skipped. See README.md.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .layout import Layout
from .llama import SMOLLM2, BatchedLlama, Llama, flatten
from .plan import GROUPS, METHODS, MODERATE, PROBE, STEPS, WARM_UP, Run, batch_of, loss_of, missing, read, run_of
from .pretrained import load_weights
from .probe import Probe
from .rule import learning_rates
from .simulator import Simulator
from .tasks import Task

EVALUATIONS = 3  # evenly spread; the last is at the end


def train(
    runs: Sequence[Run], task: Task, shape: Llama, layout: Layout, master: Tensor, *, batch: int, backend: str,
    dtype: torch.dtype = torch.bfloat16, chunk: int = 64,
) -> list[dict[str, Any]]:  # fmt: skip
    """Runs of one task and length side by side; master: [numel] fp32, where they start. Returns a record for each run and for
    the probe."""
    (steps,) = {run.steps for run in runs}
    methods = [METHODS[run.method] for run in runs]
    lrs = [learning_rates(run.lr, steps, min(WARM_UP, steps // 2)) for run in runs]
    sim = Simulator(layout, master, methods, lrs, dtype=dtype, backend=backend)
    model = BatchedLlama(shape, layout, sim.weight)
    probed = next((i for i, run in enumerate(runs) if run[1:4] == PROBE and steps > WARM_UP + 1), None)
    probe = None if probed is None else Probe(layout, METHODS["replay S=4"], steps)
    order = torch.stack([task.order(run.seed, steps, batch) for run in runs])
    train_loss = torch.zeros(steps, len(runs), device=master.device)
    held_out, exact_match = [], []
    for step in range(steps):
        losses = model.loss(*task.batch(order[:, step]))
        train_loss[step] = losses.detach()
        model.backward(losses, sim.grad)
        sim.step()
        if probe:
            probe.measure(sim.grad[probed], step + 1)
        if (step + 1) % max(steps // EVALUATIONS, 1) == 0:
            loss, matches = evaluate(BatchedLlama(shape, layout, sim.exact()), task, chunk)
            held_out.append(loss.tolist())
            exact_match.append(matches.tolist())
    last = train_loss[-min(50, steps) :].mean(0).tolist()
    deferring = [max(WARM_UP, method.full_warm_up_rounds) + 1 for method in methods]  # the first call that counts
    rho = [sim.deferred_share[first:, i].mean().item() for i, first in enumerate(deferring)]
    records = [
        dict(
            kind="run", **run._asdict(), held_out=[_finite(row[i]) for row in held_out],
            exact_match=[row[i] for row in exact_match], train_last_50=_finite(last[i]), rho=_finite(rho[i]),
            batch=batch,
        )
        for i, run in enumerate(runs)
    ]  # fmt: skip
    if probe:
        records.append(dict(kind="probe", task=runs[0].task, steps=steps, table=probe.result()))
    return records


@torch.no_grad()
def evaluate(model: BatchedLlama, task: Task, chunk: int) -> tuple[Tensor, Tensor]:
    """[R] mean loss of an answer's token over the held-out set, and [R] share of answers whose every token is the likeliest."""
    runs = len(model.runs)
    total = torch.zeros(runs, device=model.runs.device)
    tokens, right = torch.zeros_like(total), torch.zeros_like(total)
    for start in range(0, task.held_out, chunk):
        index = torch.arange(start, min(start + chunk, task.held_out), device=total.device).expand(runs, -1)
        inputs, positions, labels = task.batch(index)
        logits = model.logits(inputs, positions).float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="none")
        total += losses.view(runs, -1).sum(1)
        tokens += (labels != -100).flatten(1).sum(1)
        right += ((logits.argmax(-1) == labels) | (labels == -100)).all(-1).sum(1)
    return total / tokens, right / task.held_out


def untrained(task: Task, shape: Llama, layout: Layout, master: Tensor, dtype: torch.dtype = torch.bfloat16) -> float:
    loss, _ = evaluate(BatchedLlama(shape, layout, master.to(dtype)[None]), task, 64)
    return loss.item()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def pick_concurrency(master: Tensor, task: Task, layout: Layout, backend: str, batch: int, sizes: Sequence[int]) -> int:
    """Of these numbers of runs side by side the one with the least time per run and step. Prints each."""
    best, least = sizes[0], math.inf
    names = GROUPS["default"]
    for size in sizes:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            several = [[Run("", names[i % len(names)], MODERATE, i, steps) for i in range(size)] for steps in (4, 10, 40)]
            _, *seconds = [_timed(runs, task, layout, master, backend, batch) for runs in several]  # the first compiles
        except torch.cuda.OutOfMemoryError:
            print(f"concurrency {size}: out of memory", flush=True)
            break
        each = (seconds[1] - seconds[0]) / 30 / size
        print(
            f"concurrency {size}: {each * 1e3:.2f} ms per step and run, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB",
            flush=True,
        )
        if each < least:
            best, least = size, each
    return best


def _timed(runs: list[Run], task: Task, layout: Layout, master: Tensor, backend: str, batch: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    train(runs, task, SMOLLM2, layout, master, batch=batch, backend=backend)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=Path, nargs=2, required=True, metavar="FILE", help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="earlier results; their runs are skipped")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        help="seconds after which no batch of runs is started that would end later",
    )
    parser.add_argument("--group", nargs="+", choices=list(GROUPS), default=["default"], help="of runs; see plan.py")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="NAME", help="only these")
    parser.add_argument("--concurrency", default="auto", help="runs side by side")
    parser.add_argument("--steps", type=int, default=STEPS, help="the group long has four times as many")
    parser.add_argument("--pace", type=float, default=5.7, help="ms per step and run, assumed until the first batch has ended")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--backend", choices=["triton", "torch"], default="triton", help="of the update")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)

    began = time.monotonic()
    device = torch.device(args.device)
    layout = SMOLLM2.layout(device=device)
    master = flatten(load_weights(args.parts), layout)
    tasks = {name: Task(data, device) for name, data in torch.load(args.parts[1])["tasks"].items()}
    start_loss = {name: untrained(task, SMOLLM2, layout, master) for name, task in tasks.items()}
    print(f"held-out loss before training: {start_loss}; {time.monotonic() - began:.0f} s", flush=True)
    if args.concurrency == "auto":
        concurrency = pick_concurrency(master, next(iter(tasks.values())), layout, args.backend, args.batch, (8, 16, 20))
    else:
        concurrency = int(args.concurrency)
    about = dict(
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        date=datetime.date.today().isoformat(),
    )
    files = [path for path in (*args.known, args.out) if path.exists()]
    results = {run_of(record): loss_of(record) for record in read(files)}
    plan = functools.partial(missing, tasks=list(tasks), methods=args.methods, steps=args.steps, groups=args.group)
    pace = args.pace / 1e3  # seconds per step and run
    slowest = pace * concurrency  # seconds per step of a batch
    while todo := plan(results):
        runs = batch_of(todo, concurrency)
        elapsed = time.monotonic() - began
        expected = sum(run.steps for run in todo) * pace
        print(f"[{elapsed:.0f} s] {len(todo)} runs known to be left, about {expected:.0f} s", flush=True)
        if elapsed + slowest * runs[0].steps * 1.1 > args.time_limit:
            break
        start = time.monotonic()
        task = tasks[runs[0].task]
        try:
            records = train(runs, task, SMOLLM2, layout, master, batch=args.batch, backend=args.backend)
        except torch.cuda.OutOfMemoryError:
            records = None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next batch of runs has buffers of other sizes
        if records is None:
            print(f"out of memory with {len(runs)} runs side by side", flush=True)
            assert len(runs) > 1
            concurrency = len(runs) // 2
            continue
        seconds = time.monotonic() - start
        slowest, pace = max(slowest, seconds / runs[0].steps), seconds / runs[0].steps / len(runs)
        with args.out.open("a", encoding="utf-8") as out:
            for record in records:
                out.write(json.dumps(record | about | dict(untrained=start_loss[record["task"]])) + "\n")
        done = [record for record in records if record["kind"] == "run"]
        results |= {run_of(record): loss_of(record) for record in done}
        losses = "; ".join(f"{record['method']} {record['lr']:g}/{record['seed']} {loss_of(record):.4f}" for record in done)
        print(f"{pace * 1e3:.2f} ms per step and run; {runs[0].task}, {runs[0].steps} steps: {losses}", flush=True)
    left = len(plan(results))
    print(f"{len(results)} runs are known, {left} are known to be left; {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
