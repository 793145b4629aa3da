"""Selections rank by rank, as the engine makes them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from table_selection import Watch, by_rank, shares, with_capacity

from stallfree import ZenFlowConfig


@pytest.mark.parametrize("rows, ranks", [(100, 1), (100, 8), (101, 8), (49152, 64), (9, 8)])
def test_rows_are_divided_as_by_shard(rows, ranks):
    mine = [part.stop - part.start for part in shares(rows, ranks)]
    assert mine == [len(part) for part in torch.arange(rows).chunk(ranks)]


def test_each_rank_selects_the_best_of_its_own_rows():
    score = torch.arange(40.0)
    assert by_rank(score, 0.1, 1).nonzero().flatten().tolist() == [36, 37, 38, 39]
    assert by_rank(score, 0.1, 4).nonzero().flatten().tolist() == [9, 19, 29, 39]
    assert by_rank(score, 0.1, 40).sum() == 0


def test_room_bounds_what_a_rank_selects_of_the_best_of_all():
    score = torch.arange(40.0)
    assert with_capacity(score, 0.1, 4, 2.0).nonzero().flatten().tolist() == [28, 29, 38, 39]
    assert torch.equal(with_capacity(score, 0.1, 4, 4.0), by_rank(score, 0.1, 1))


def test_rho_is_the_share_of_what_is_not_selected():
    names = {"embedding": 0, "head": 0, "tied": 0, "layer": 1}
    watch = Watch(names, ZenFlowConfig(), calls=2)
    table, layer = torch.zeros(4096, 2), torch.ones(4, 100)
    table[:300, 0] = 1.0  # 7% of the rows, all of them on the first of eight ranks, which has room for 51
    for _ in range(2):
        watch.take({"embedding": table, "head": table, "tied": 2 * table, "layer": layer})
    for age in ("fresh", "old"):
        assert watch.rho[age, "whole table", "tied"] == [0.0]
        assert watch.rho[age, "8 ranks", "tied"] == [pytest.approx((300 - 51) / 300)]
        assert watch.rho[age, "whole table", "all, tied"] == [pytest.approx(0.9 * 400 / (400 + 1200))]
        assert watch.rho[age, "8 ranks", "all, untied"] == [pytest.approx((360 + 2 * 249) / (400 + 600))]
