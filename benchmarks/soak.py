"""A long run in which everything happens again and again: python benchmarks/soak.py [--device cuda] [--steps 5000]

Saves, evaluations with exact weights, skipped calls, reselections, other learning rates and other S, on a loss linear in the
weights, so that gradients are known beforehand. At the end it is asserted, and printed, that

- memory, threads, open files and the GPU's reserved memory are flat over the last 80% of the run;
- the same run without saves and evaluations has the same weights, bit for bit, after `--twin-steps` calls;
- nothing has drifted: the masters are AdamW's in fp64 on the same gradients, up to the rounding of fp32. What torch's own AdamW
  in fp32 makes of them is printed beside it.

`--output FILE.md` writes the report, with the command, hardware and versions.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

from stallfree import ZenFlowAdamW, ZenFlowConfig, save_checkpoint, to_adamw_state
from stallfree.cli.finetune.machine import hardware

SHAPES = ((512, 64), (128, 192), (192, 128), (128, 128), (256, 96), (128,), (128,))
LR, CLIP = 1e-3, 1.0
SKIP_EVERY, SHIFT_EVERY, INTERVAL_EVERY = 97, 10, 300
MEASURE_EVERY = 25
WARM = 0.2  # of the run, in which memory may grow
MIB = 1 << 20
GROWTH_LIMIT_BYTES = 8 * MIB  # of memory from then on, by the slope that fits


@dataclass
class Usage:
    """What the process holds, measured now and then."""

    calls: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # bytes
    threads: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)  # bytes of the GPU

    def measure(self, call: int) -> None:
        self.calls.append(call)
        self.memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        self.threads.append(len(os.listdir("/proc/self/task")))
        self.files.append(len(os.listdir("/proc/self/fd")))
        self.reserved.append(torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0)

    def growth(self, name: str) -> float:
        """From the end of the warm part on: the slope that fits best, times the calls."""
        first = int(WARM * len(self.calls))
        x = torch.tensor(self.calls[first:], dtype=torch.float64)
        y = torch.tensor(getattr(self, name)[first:], dtype=torch.float64)
        x = x - x.mean()
        return float((x * y).sum() / (x * x).sum() * (x.max() - x.min()))


def gradients(call: int, seed: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Of call 1, 2, ...: some channels are larger than others, and which those are changes slowly."""
    generator = torch.Generator(device).manual_seed(1_000_003 * (seed + 1) + call)
    made = []
    for shape in SHAPES:
        grad = torch.randn(shape, generator=generator, device=device)
        if len(shape) == 2:
            place = torch.arange(shape[1], device=device)
            grad = grad * (1 + 9 * ((place - call // SHIFT_EVERY) % shape[1] < shape[1] // 10))
        made.append((0.01 * grad).to(dtype))
    if call % SKIP_EVERY == 0:
        made[call % len(SHAPES)].view(-1)[call % 128] = math.nan if call % 2 else math.inf
    return made


def rate(call: int, steps: int) -> float:
    return LR * min(call / 20, 1.0) * (0.55 + 0.45 * math.cos(math.pi * call / steps))


def weights(seed: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


class Run:
    """The optimizer under test, and the loop around it."""

    def __init__(self, seed: int, steps: int, device: torch.device, dtype: torch.dtype) -> None:
        self.seed, self.steps, self.device, self.dtype, self.call = seed, steps, device, dtype, 0
        self.model = nn.ParameterList([nn.Parameter(weight) for weight in weights(seed, device, dtype)])
        config = ZenFlowConfig(
            topk_ratio=0.1,
            update_interval=4,
            max_update_interval=8,
            full_warm_up_rounds=20,
            select_interval=12,
            max_grad_norm=CLIP,
            min_numel=1000,
            block_numel=30_000,
        )
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), lr=LR, weight_decay=0.01, config=config)

    def calls(self, until: int) -> Iterator[int]:
        """After each call, its number."""
        group = self.optimizer.param_groups[0]
        while self.call < until:
            self.call += 1
            if self.call % INTERVAL_EVERY == 0:
                self.optimizer.set_update_interval((4, 2, 8, 1)[self.call // INTERVAL_EVERY % 4])
            group["lr"] = rate(self.call, self.steps)
            grads = gradients(self.call, self.seed, self.device, self.dtype)
            sum((param * grad).sum() for param, grad in zip(self.model, grads, strict=True)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield self.call

    def published(self) -> list[Tensor]:
        return [param.detach().cpu().clone() for param in self.model]


def adamw(seed: int, steps: int, device: torch.device, dtype: torch.dtype, precision: torch.dtype) -> list[Tensor]:
    """The masters of torch.optim.AdamW in some precision, on the same gradients."""
    masters = [nn.Parameter(weight.to(precision)) for weight in weights(seed, device, dtype)]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=0.01)
    for call in range(1, steps + 1):
        if call % SKIP_EVERY == 0:
            continue
        optimizer.param_groups[0]["lr"] = rate(call, steps)
        grads = [grad.to(precision) for grad in gradients(call, seed, device, dtype)]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]))
        clip = (CLIP / (norm + 1e-6)).clamp(max=1.0).to(precision)
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad * clip
        optimizer.step()
    return [master.detach().double().cpu() for master in masters]


def tolerance(exact: Tensor, steps: int) -> Tensor:
    """What the roundings of so many AdamW steps in fp32 may add up to, at the worst."""
    return steps * 2.0**-23 * exact.abs() + steps * LR * 5e-6


def soak(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Rows of the report. Raises AssertionError where something is not as it has to be."""
    device, steps, seed = torch.device(arguments.device), arguments.steps, arguments.seed
    dtype = getattr(torch, arguments.dtype)
    twin_steps = min(arguments.twin_steps or steps, steps)
    run, usage, at_twin, saves, looks = Run(seed, steps, device, dtype), Usage(), [], 0, 0
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        for call in run.calls(steps):
            if call % arguments.save_every == 0:
                save_checkpoint(directory, run.optimizer, model=run.model, extra={"call": call})
                saves += 1
            if call % arguments.evaluate_every == 0:
                with run.optimizer.exact_weights():
                    assert all(bool(torch.isfinite(param).all()) for param in run.model)
                looks += 1
            if call % MEASURE_EVERY == 0:
                usage.measure(call)
            if call == twin_steps:
                at_twin = run.published()
    seconds = time.perf_counter() - begun
    _, masters = to_adamw_state(run.optimizer)
    run.optimizer.flush()
    flushed, measured = run.published(), run.optimizer.metrics()
    run.optimizer.close()
    growth = {name: usage.growth(name) for name in ("memory", "threads", "files", "reserved")}
    first = int(WARM * len(usage.calls))
    held = {name: (min(values[first:]), max(values[first:])) for name in growth for values in [getattr(usage, name)]}

    twin = Run(seed, steps, device, dtype)
    for _ in twin.calls(twin_steps):
        pass
    same = all(torch.equal(mine, other) for mine, other in zip(at_twin, twin.published(), strict=True))
    if twin_steps == steps:
        twin.optimizer.flush()
        same = same and all(torch.equal(mine, other) for mine, other in zip(flushed, twin.published(), strict=True))
    twin.optimizer.close()

    exact = adamw(seed, steps, device, dtype, torch.float64)
    plain = adamw(seed, steps, device, dtype, torch.float32)
    ours = [master.double().cpu() for master in masters]
    drift = max(float((a - b).abs().max()) for a, b in zip(ours, exact, strict=True))
    torch_drift = max(float((a - b).abs().max()) for a, b in zip(plain, exact, strict=True))
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))
    rounded = all(torch.equal(mine, master.to(dtype).cpu()) for mine, master in zip(flushed, masters, strict=True))

    assert growth["memory"] < GROWTH_LIMIT_BYTES, f"memory grows by {growth['memory'] / MIB:.1f} MiB"
    for name in ("threads", "files", "reserved"):
        assert growth[name] < 0.5, f"{name} grow: {held[name]}"
    assert same, "saves and evaluations have changed the weights"
    assert rounded, "flushed weights are not the masters, rounded"
    for mine, other in zip(ours, exact, strict=True):
        assert bool(((mine - other).abs() <= tolerance(other, steps)).all()), f"the masters have drifted by {drift:.3g}"
    assert measured["skipped_steps"] == steps // SKIP_EVERY, measured["skipped_steps"]
    return [
        ("calls, seconds", f"{steps:,} in {seconds:.1f} s, with {saves} saves and {looks} evaluations"),
        ("skipped calls", f"{measured['skipped_steps']}, the last one {measured['last_skipped_call']}"),
        ("retention of the last selections", f"{measured['retention']:.2f}"),
        ("memory, last 80%", f"{held['memory'][0] / MIB:.1f} to {held['memory'][1] / MIB:.1f} MiB; "
                             f"the slope makes {growth['memory'] / MIB:+.2f} MiB"),
        ("threads, last 80%", f"{held['threads'][0]} to {held['threads'][1]}"),
        ("open files, last 80%", f"{held['files'][0]} to {held['files'][1]}"),
        ("reserved GPU memory, last 80%", f"{held['reserved'][0] / MIB:.1f} to {held['reserved'][1] / MIB:.1f} MiB"),
        ("without saves and evaluations", f"bit-identical after {twin_steps:,} calls{' and a flush' * (twin_steps == steps)}"),
        ("masters against AdamW in fp64", f"off by at most {drift:.2e}; torch's AdamW in fp32 by {torch_drift:.2e}"),
        ("masters against torch's AdamW in fp32", f"off by at most {apart:.2e}"),
        ("flushed weights", "the masters, rounded"),
    ]  # fmt: skip


def report(rows: list[tuple[str, str]], arguments: argparse.Namespace) -> str:
    command = shlex.join(["python", "benchmarks/soak.py", *sys.argv[1:]])
    about = f"{hardware(arguments.device)}; torch {torch.__version__}, Python {platform.python_version()}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        f"# Soak: {arguments.steps:,} calls\n\n{date.today()}. {about}.\n\n```\n{command}\n```\n\n| | |\n|---|---|\n{table}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--twin-steps", type=int, help="calls of the run without saves and evaluations (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = report(soak(arguments), arguments)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
