"""A block's selection is that of each of its weights alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.engine.selection import Geometry, select

CPU = torch.device("cpu")
weights = st.lists(
    st.integers(1, 9).flatmap(lambda channels: st.tuples(st.just(channels), st.integers(0, channels))), min_size=1, max_size=5
)


def alone(score: list[float], count: int, held: list[int] | None) -> tuple[list[int], list[int], list[bool]]:
    """The channel of each place, the others, and whose channel is another one than before."""
    best = sorted(range(len(score)), key=lambda channel: (-score[channel], channel))[:count]
    others = [channel for channel in range(len(score)) if channel not in best]
    if held is None:
        return sorted(best), others, [True] * count
    arriving = iter(sorted(set(best) - set(held)))
    places = [channel if channel in best else next(arriving) for channel in held]
    return places, others, [channel not in best for channel in held]


@settings(max_examples=300, deadline=None)
@given(weights, st.randoms(use_true_random=False), st.booleans())
def test_a_block_selects_as_each_weight_alone(sizes, rnd, again):
    channels, counts = ([size[part] for size in sizes] for part in (0, 1))
    geometry = Geometry.of(channels, counts, CPU)
    scores = [[float(rnd.choice([0, 1, 1, 2, 5])) for _ in range(count)] for count in channels]
    held = [rnd.sample(range(many), count) for many, count in sizes] if again else None
    starts = [sum(channels[:place]) for place in range(len(channels))]
    flat = None
    if held is not None:
        flat = torch.tensor([start + one for start, some in zip(starts, held, strict=True) for one in some], dtype=torch.int64)
    found = select(torch.tensor([one for some in scores for one in some]), geometry, flat)
    places, rows, moved = [], [], []
    for place, (score, count, start) in enumerate(zip(scores, counts, starts, strict=True)):
        mine = alone(score, count, None if held is None else held[place])
        places += [start + channel for channel in mine[0]]
        rows += [start + channel for channel in mine[1]]
        moved += mine[2]
        if held is not None and count:
            assert found.kept[place] == pytest.approx(1 - sum(mine[2]) / count)
    assert (found.places.tolist(), found.rows.tolist(), found.moved.tolist()) == (places, rows, moved)
    assert (found.kept is None) == (held is None)
