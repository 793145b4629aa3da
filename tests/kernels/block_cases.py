"""Blocks to try block kernels on, and the kernels that this machine can run.

Without a GPU the Triton kernels run in triton's interpreter, which has to be chosen before triton is imported.
"""

import os
import sys

import pytest
import torch

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from stallfree.kernels.block import BlockLayout, Part, Segment, pieces, targets
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.torch_block import TorchBlock

HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
SENTINEL = 7.0  # in every element that a kernel must not write
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = {
    "even": [Segment(64, 48, 1, 5), Segment(32, 64, 1, 3), Segment(24, 128, 1, 9)],
    "odd": [Segment(37, 53, 1, 5), Segment(17, 91, 0, 3), Segment(5, 7, 1, 2)],
    "mixed": [Segment(40, 96, 0, 7), Segment(72, 40, 1, 9), Segment(16, 33, 0, 4), Segment(24, 16, 1, 8)],
    "nothing selected": [Segment(24, 40, 1, 0), Segment(19, 12, 0, 0)],
    "all but one selected": [Segment(24, 40, 1, 23), Segment(9, 20, 0, 8)],
    "one channel": [Segment(1, 40, 1, 0), Segment(1, 7, 0, 0), Segment(1, 16, 1, 1)],
    "more than one launch takes": [Segment(3 + i % 3, 4 + i % 5, 1, i % 2) for i in range(34)],
}


def triton_block(device, small):
    """Small tiles make small weights span many."""
    pytest.importorskip("triton")
    from stallfree.kernels import triton as module

    if device.type != ("cpu" if module.INTERPRETED else "cuda"):
        pytest.skip("the triton that is imported here runs on the other device")
    if module.INTERPRETED:
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(tl.sum, InterpretedFunction):
            pytest.skip("triton was imported before TRITON_INTERPRET=1 could be set: set it in the environment")
    if not small:
        return module.TritonBlock(device)
    tiling = module.Tiling(
        columns=module.Tile(16, 16, 32, 4),
        rows=module.Tile(4, 16, 32, 4),
        column_state=module.Tile(4, 16, 16, 4),
        row_state=module.Tile(4, 16, 16, 4),
        judging=module.Shares(16, 2, 8),
    )
    return module.TritonBlock(device, tiling)


KERNELS = ["torch", "triton", "triton-small"]


def make_kernel(name, device):
    return TorchBlock() if name == "torch" else triton_block(device, name == "triton-small")


class Case:
    """A block with random gradients, weights and state, and a random division of its channels."""

    def __init__(self, segments, device, dtype=torch.float32, absent=()):
        self.device, self.dtype = device, dtype
        self.layout = BlockLayout(segments, device)
        orders = [torch.randperm(segment.channels) for segment in segments]
        self.selected = [order[: s.selected].to(device) for order, s in zip(orders, segments, strict=True)]
        self.deferred = [order[s.selected :].sort().values.to(device) for order, s in zip(orders, segments, strict=True)]
        self.targets = targets(self.layout, self.selected, self.deferred)
        self.present = [index not in absent for index in range(len(segments))]
        self.grads, self.weights = self.randoms(), self.randoms()
        count = self.layout.selected_numel
        self.master, self.exp_avg = torch.randn(count, device=device), torch.randn(count, device=device) * 1e-2
        self.exp_avg_sq = torch.rand(count, device=device) * 1e-2
        self.steps = torch.randint(0, 50, (self.layout.places,), dtype=torch.int32, device=device)
        self.hypers = [HYPER if present else None for present in self.present]
        self.factors = torch.rand(len(segments), device=device) + 0.5
        self.skip = torch.zeros((), dtype=torch.bool, device=device)
        self.grad = torch.randn(count, device=device).to(dtype)

    def randoms(self):
        shapes = [(s.channels, s.length)[:: 1 if s.channel_dim == 0 else -1] for s in self.layout.segments]
        return [torch.randn(shape).to(self.device, self.dtype) for shape in shapes]

    def pieces(self, count):
        """The deferred rows in about so many pieces: from, to."""
        return pieces(self.layout, -(-self.layout.deferred_numel // count))

    def channels_between(self, index, low, high):
        """The channels of a weight whose deferred rows are in a piece."""
        rows = self.layout.rows_between(index, low, high)
        return self.deferred[index][rows.start : rows.stop]

    def full(self, numel, dtype=None):
        return torch.full((numel,), SENTINEL, dtype=dtype or self.dtype, device=self.device)

    def shown(self, tensors):
        return [tensor if present else None for tensor, present in zip(tensors, self.present, strict=True)]

    def split(self, kernel):
        squares = self.full(self.layout.channels, torch.float32)
        selected, deferred = self.full(self.layout.selected_numel), self.full(self.layout.deferred_numel)
        kernel.split(self.layout, self.targets, self.shown(self.grads), squares, selected, deferred)
        return squares, selected, deferred

    def part(self):
        state = (self.master, self.exp_avg, self.exp_avg_sq, self.steps)
        return Part(self.layout, self.targets.selected, self.weights, *state, self.grad)

    def adamw(self, kernel):
        kernel.plan([self.part()]).step(self.hypers, self.factors, self.skip)

    def changing(self):
        """Everything that AdamW may write."""
        return [*self.weights, self.master, self.exp_avg, self.exp_avg_sq, self.steps]


def bits(tensor):
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same(tensor, other):
    """Bit for bit, NaNs included."""
    return torch.equal(bits(tensor), bits(other))
