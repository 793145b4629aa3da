"""Which weights share a block, and how evenly calls are loaded by them."""

import pytest
import torch
from torch import nn

from stallfree import ZenFlowConfig
from stallfree.engine.blocks import EVEN, build_blocks, classify, shares_by_phase
from stallfree.engine.schedule import loads


def blocks_of(sizes: list[int], dtype: torch.dtype = torch.float32, **settings) -> list:
    """sizes: of the layers, each of one weight."""
    layers = [nn.Parameter(torch.empty(size, 64, dtype=dtype, device="meta")) for size in sizes]
    named = [(f"layers.{n}.weight", layer) for n, layer in enumerate(layers)]
    config = ZenFlowConfig(min_numel=0, **settings)
    return build_blocks(classify(named, config)[1], config)


def test_shares_are_of_what_closes_in_each_phase():
    blocks = blocks_of([8, 2, 2, 2, 2], update_interval=4, block_numel=1)
    assert shares_by_phase(blocks) == pytest.approx([8 / 16, 4 / 16, 2 / 16, 2 / 16])
    assert shares_by_phase([]) == [0.0]


@pytest.mark.parametrize(
    "layers, interval, count",
    [
        (16, 4, 4),  # four layers each: a block for every phase
        (16, 8, 8),
        (5, 4, 5),  # what a phase has on average is a layer and a quarter
        (28, 8, 28),  # three each would be 10 blocks, and two phases of eight would have twice as much as the others
    ],
)
def test_small_layers_share_a_block_where_calls_stay_even(layers, interval, count):
    assert len(blocks_of([16] * layers, update_interval=interval)) == count


@pytest.mark.parametrize("large", [1, 8, 30])
@pytest.mark.parametrize("layers", range(3, 40, 4))
@pytest.mark.parametrize("most", [2, 4, 8])
def test_fewer_blocks_leave_calls_about_as_even_as_more(large, layers, most):
    sizes = [16 * large] + [16] * layers

    def busiest(blocks: list) -> list[float]:
        return [max(loads(shares_by_phase(blocks), interval, 1)) for interval in range(1, most + 1)]

    blocks, part = blocks_of(sizes, update_interval=most), sum(sizes) * 64 // most
    assert all(block.whole_numel <= max(part, 64 * 16 * large) for block in blocks)
    finest = blocks_of(sizes, update_interval=most, block_numel=part // 2)  # of 32-bit elements half as many
    assert len(blocks) <= len(finest)
    assert all(mine <= EVEN * best + 1e-9 for mine, best in zip(busiest(blocks), busiest(finest), strict=True))


@pytest.mark.parametrize("dtype, layers", [(torch.float32, 2), (torch.bfloat16, 4), (torch.float16, 4)])
def test_a_block_has_so_many_bytes_at_most(dtype, layers):
    blocks = blocks_of([16] * 32, dtype, update_interval=1, block_numel=4 * 16 * 64)
    assert [len(block.weights) for block in blocks] == [layers] * (32 // layers)


def test_without_stagger_blocks_go_down_during_backward_all_the_same():
    blocks = blocks_of([16] * 16, update_interval=4, stagger=False)
    assert len(blocks) == 8
    assert {block.phase for block in blocks} == {0}
