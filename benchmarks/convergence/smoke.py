"""A minute on the GPU before the study: python -m benchmarks.convergence.smoke

Checks the Triton update against the torch one (tiny and full size), trains SmolLM2's shape from random weights on one batch,
and times a step for several numbers of runs side by side. `--device cpu` under TRITON_INTERPRET=1 does the first check only.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from .layout import Layout, Shape
from .llama import SMOLLM2, flatten, random_weights
from .plan import GROUPS, METHODS, Run
from .rule import Method, learning_rates
from .simulator import Simulator
from .study import pick_concurrency, train
from .tasks import Task

SHORT = [
    Method(name="synchronous", topk_ratio=1.0),
    Method(name="replay", topk_ratio=0.4, full_warm_up_rounds=2, select_interval=5),
    Method(
        name="ramp, beta1",
        topk_ratio=0.4,
        full_warm_up_rounds=2,
        select_interval=5,
        ramp=((2, 4),),
        deferred_beta1=0.6,
    ),
    Method(name="lag 0", topk_ratio=0.4, update_interval=3, lag=0, full_warm_up_rounds=0, select_interval=2),
    Method(name="mean", topk_ratio=0.4, rule="mean", lookahead=0.0, full_warm_up_rounds=2, select_interval=5),
    Method(
        name="zenflow",
        topk_ratio=0.4,
        rule="mean",
        lookahead=0.0,
        stagger=False,
        lag=4,
        full_warm_up_rounds=3,
        select_interval=6,
    ),
]


def compare(layout: Layout, methods: list[Method], calls: int, dtype: torch.dtype, device: torch.device) -> float:
    """Largest difference between the backends' published and exact weights over some calls with random gradients."""
    generator = torch.Generator(device).manual_seed(0)
    pad = torch.zeros(1, layout.numel, device=device)  # padding between parameters stays 0
    for group in layout.groups:
        layout.view(pad, group).fill_(1)
    master = torch.randn(layout.numel, generator=generator, device=device) * pad[0]
    lrs = [learning_rates(0.01, calls, 3)] * len(methods)
    ours, theirs = (Simulator(layout, master, methods, lrs, dtype=dtype, backend=name) for name in ("triton", "torch"))
    worst = 0.0
    for call in range(calls):
        ours.grad.normal_(generator=generator).mul_(pad)
        theirs.grad.copy_(ours.grad)
        ours.step()
        theirs.step()
        pairs = [(ours.weight, theirs.weight)]
        if call % 3 == 2 or call == calls - 1:
            pairs.append((ours.exact(), theirs.exact()))
        worst = max(worst, *((a.float() - b.float()).abs().max().item() for a, b in pairs))
        assert torch.equal(ours.selected, theirs.selected)
    return worst


def random_task(device: torch.device) -> Task:
    """Sequences of random tokens, for timing."""
    tokens = torch.randint(0, SMOLLM2.vocab, (640, 40), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    data = dict(tokens=tokens, starts=torch.full((640,), 30), ends=torch.full((640,), 36), held_out=torch.tensor(512))
    return Task(data, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", type=Path, help="file for the fastest number of runs side by side")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 16, 20], help="numbers of runs side by side to time")
    args = parser.parse_args()
    device, began = torch.device(args.device), time.monotonic()

    def report(text: str) -> None:
        print(f"[{time.monotonic() - began:.0f} s] {text}", flush=True)

    tiny = Layout(
        3,
        [Shape("wide", 3, 11), Shape("tall", 9, 5), Shape("norm", 1, 7, resident=True)],
        [Shape("embed", 13, 6, by_row=True)],
        tile=64,
        device=device,
    )
    quick = device.type != "cuda"  # the interpreter is slow
    for dtype, methods in ((torch.float32, SHORT), (torch.bfloat16, SHORT[2:3] if quick else SHORT)):
        worst = compare(tiny, methods, 9 if quick else 16, dtype, device)
        report(f"Triton against torch, tiny, {dtype}: largest difference {worst:.1e}")
        assert worst < (1e-4 if dtype == torch.float32 else 0.05), "the Triton kernel is wrong: use --backend torch"
    if quick:
        return
    layout = SMOLLM2.layout(device=device)
    for method in (METHODS["replay S=8"], METHODS["zenflow S=4, warm-up 4"]):
        worst = compare(layout, [method], 14, torch.bfloat16, device)
        report(f"Triton against torch, full size, {method.name}: largest difference {worst:.1e}")
        assert worst < 0.05
        torch.cuda.empty_cache()

    master = flatten(random_weights(SMOLLM2, torch.Generator().manual_seed(0)), layout)
    task = random_task(device)
    task.order = lambda seed, steps, batch: torch.full((steps, batch), 512, device=device)  # type: ignore[method-assign]
    runs = [Run("", name, 3e-4, 0, 40) for name in GROUPS["default"]]
    for record in train(runs, task, SMOLLM2, layout, master, batch=16, backend="triton"):
        if record["kind"] == "run":
            report(f"one sequence, 40 steps: loss {record['train_last_50']:.3f}, rho {record['rho']:.3f}, {record['method']}")
    torch.cuda.empty_cache()
    fastest = pick_concurrency(master, random_task(device), layout, "triton", 16, args.sizes)
    if args.write:
        args.write.write_text(str(fastest))
    report("done")


if __name__ == "__main__":
    main()
