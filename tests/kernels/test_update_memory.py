"""AdamW with gradients that have their place in memory which each step names."""

import pytest
import torch
from block_cases import BLOCKS, DTYPES, HYPER, KERNELS, Case, make_kernel, same

from stallfree.kernels.block import ALIGNMENT
from stallfree.kernels.torch_block import TorchBlock

NAMES = ["even", "odd", "mixed", "nothing selected", "one channel"]


@pytest.fixture(params=KERNELS)
def kernel(request, device):
    return make_kernel(request.param, device)


class Blocks:
    """Several blocks and what stands for residents: a block whose gradients stay where they are."""

    def __init__(self, device, dtype):
        torch.manual_seed(7)
        self.cases = [Case(BLOCKS[name], device, dtype) for name in [*NAMES, "even"]]
        self.device, self.skip = device, torch.zeros((), dtype=torch.bool, device=device)
        self.factors = torch.cat([case.factors for case in self.cases])
        self.hypers = [HYPER] * len(self.factors)
        self.places, self.nbytes = [], 0
        for case in self.cases[:-1]:
            self.places.append(self.nbytes)
            self.nbytes += -(-case.grad.nbytes // ALIGNMENT) * ALIGNMENT

    def parts(self, moving=True):
        parts = [case.part() for case in self.cases]
        if moving:
            parts[:-1] = [part._replace(grad=place) for part, place in zip(parts[:-1], self.places, strict=True)]
        return parts

    def draw(self, seed):
        torch.manual_seed(seed)
        for case in self.cases:
            case.grad.copy_(torch.randn(case.grad.shape))

    def memory(self, shift=0):
        """A new one, with the gradients in it, that begins so many bytes behind where memory mostly does."""
        memory = torch.full((self.nbytes + shift,), 0xFF, dtype=torch.uint8, device=self.device)[shift:]
        for case, place in zip(self.cases, self.places, strict=False):
            memory[place : place + case.grad.nbytes] = case.grad.view(torch.uint8)
        return memory

    def changing(self):
        return [tensor for case in self.cases for tensor in case.changing()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_is_elsewhere_in_each_step_changes_no_bit(kernel, device, dtype):
    """Whether it begins at multiples of more than 16 bytes or not; and nothing is prepared anew for it."""
    ours, theirs = Blocks(device, dtype), Blocks(device, dtype)
    update, plain = kernel.plan(ours.parts()), kernel.plan(theirs.parts(moving=False))
    kept = []
    for step, shift in enumerate([0, 16, 48, 0, 256]):
        for blocks in (ours, theirs):
            blocks.draw(step)
            blocks.hypers = [None if (place + step) % 4 == 0 and step < 3 else HYPER for place in range(len(blocks.hypers))]
        kept.append(ours.memory(shift))
        assert len({memory.data_ptr() for memory in kept}) == len(kept)
        update.step(ours.hypers, ours.factors, ours.skip, kept[-1])
        plain.step(theirs.hypers, theirs.factors, theirs.skip)
        assert all(map(same, ours.changing(), theirs.changing()))
    if not isinstance(kernel, TorchBlock):
        assert len(update._patterns) == 4, "of who took a step"


def test_without_memory_others_can_take_a_step(kernel, device):
    """Those whose gradients stay where they are, and weights that have no selected channels."""
    ours, theirs = Blocks(device, torch.bfloat16), Blocks(device, torch.bfloat16)
    count, last = len(ours.hypers), len(ours.cases[-1].hypers)
    nothing = sum(len(BLOCKS[name]) for name in NAMES[:3])
    hypers = [HYPER if place >= count - last or nothing <= place < nothing + 2 else None for place in range(count)]
    kernel.plan(ours.parts()).step(hypers, ours.factors, ours.skip)
    kernel.plan(theirs.parts(moving=False)).step(hypers, theirs.factors, theirs.skip)
    assert all(map(same, ours.changing(), theirs.changing()))


def test_memory_that_does_not_fit_is_refused(kernel, device):
    blocks = Blocks(device, torch.bfloat16)
    update, memory = kernel.plan(blocks.parts()), blocks.memory()
    before = [tensor.clone() for tensor in blocks.changing()]
    for mistake in (None, blocks.memory(8), memory[: blocks.places[-1]], memory.view(torch.int16), blocks.memory(1)):
        with pytest.raises(ValueError, match="memory must"):
            update.step(blocks.hypers, blocks.factors, blocks.skip, mistake)
    assert all(map(same, blocks.changing(), before))
    for place in (8, -16):
        with pytest.raises(ValueError, match="grad must be a place"):
            kernel.plan([blocks.parts()[0]._replace(grad=place)])
