"""A little of everything on CUDA, for compute-sanitizer: kernels over odd shapes, and some calls of the optimizer.

    compute-sanitizer --tool memcheck python tests/sanitize.py    # also racecheck, initcheck, synccheck

Results are compared with torch's, so that it is worth running alone.
"""

from __future__ import annotations

import sys

import torch

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.kernels import block_kernel
from stallfree.kernels.block import BlockKernel, BlockLayout, Part, Segment, targets
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.judging import Evidence, Policy
from stallfree.kernels.torch_block import TorchBlock

# channels, length, axis, selected
SHAPES = [
    [(1, 1, 0, 0), (1, 7, 1, 1), (3, 5, 0, 2)],
    [(8, 16, 0, 2), (16, 8, 1, 4), (64, 64, 1, 8)],
    [(129, 31, 1, 13), (31, 2049, 0, 3), (257, 259, 1, 26)],
    [(1000, 3, 1, 100), (3, 1000, 1, 1), (33, 4097, 0, 0)],
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(numel: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def kernels(kernel: BlockKernel, device: torch.device, shapes: list, dtype: torch.dtype) -> list[torch.Tensor]:
    """Split, two judgements, two steps of AdamW and a publish; everything that they have written."""
    layout = BlockLayout([Segment(*shape) for shape in shapes], device)
    orders = [
        torch.randperm(segment.channels, generator=torch.Generator().manual_seed(1)).to(device) for segment in layout.segments
    ]
    selected = [order[: segment.selected] for order, segment in zip(orders, layout.segments, strict=True)]
    deferred = [order[segment.selected :].sort().values for order, segment in zip(orders, layout.segments, strict=True)]
    division = targets(layout, selected, deferred)
    grads, weights = (
        [drawn(segment.numel, dtype, device, seed + place) for place, segment in enumerate(layout.segments)]
        for seed in (10, 20)
    )
    squares = torch.zeros(layout.channels, device=device)
    rows = torch.zeros(layout.selected_numel, dtype=dtype, device=device)
    staged = torch.zeros(layout.deferred_numel, dtype=dtype, device=device)
    state = [drawn(layout.selected_numel, torch.float32, device, seed).abs() for seed in (30, 40, 50)]
    steps = torch.zeros(layout.places, dtype=torch.int32, device=device)
    kernel.warm_up(layout, dtype)
    absent = [None, *grads[1:]]
    for present in (grads, absent):
        kernel.split(layout, division, present, squares, rows, staged)
    update = kernel.plan([Part(layout, division.selected, weights, *state, steps, rows)])
    factors = torch.full((len(shapes),), 0.5, device=device)
    score, record = torch.zeros_like(squares), torch.zeros(1 + len(shapes) + 5, pin_memory=device.type == "cuda")
    starts = [*layout.channel_starts, layout.channels]
    judging = kernel.judging(Evidence(starts, squares, division.rows < 0, score, [rows], 5), Policy(1.0, True, 0.9))
    judging.judge(1, record)
    judging.judge(2, record, torch.tensor([False, *[True] * (len(shapes) - 1)], device=device), factors)
    hyper = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1)
    for skip in (False, True):
        update.step([hyper, None, hyper], factors, torch.tensor(skip, device=device))
    kernel.publish(layout, division, weights, staged)
    judged = [score, record, *vars(judging.verdict).values()]
    return [squares, rows, staged, *judged, *state, steps, *weights]


def train(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """A dozen calls with windows, hand-overs, a checkpoint and a flush, of a loss linear in the weights."""
    hasty = dict(update_interval=2, select_interval=2, score_decay=0.0)
    config = ZenFlowConfig(topk_ratio=0.2, full_warm_up_rounds=1, min_numel=0, block_numel=3000, **hasty)
    shapes = [(13, 31), (31, 13), (64, 64), (5, 3, 3), (7,), (129, 17)]
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device, dtype))
        for i, shape in enumerate(shapes)
    ]
    optimizer = ZenFlowAdamW(params, lr=1e-2, config=config)
    for call in range(12):
        grads = [drawn(p.numel(), dtype, device, 100 * call + i).view_as(p) for i, p in enumerate(params)]
        torch.autograd.backward([(p * g).sum() for p, g in zip(params, grads, strict=True)])
        if call == 6:
            optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    optimizer.close()
    return [p.detach().cpu().float() for p in params]


def main(device: torch.device) -> None:
    for dtype in DTYPES:
        for shapes in SHAPES:
            ours = kernels(block_kernel(device), device, shapes, dtype)
            theirs = kernels(TorchBlock(), device, shapes, dtype)
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-3)
        for mine, other in zip(train(device, dtype), train(torch.device("cpu"), dtype), strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-4)
    print("kernels and optimizer agree with torch's operations")


if __name__ == "__main__":
    main(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda:0"))
