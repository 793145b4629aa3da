"""Training of sharded parameters: the update rule's invariants, over ranks."""

import random
from itertools import compress

import pytest
import torch
import torch.distributed as dist
from nets import CALLS, LR, PRESETS, Mirror, Net, Run, drawn_batch, equal, gathered, in_two_dimensions, near, weights
from ranks import on_host

from stallfree import ZenFlowAdamW

# 1: exactness


def follows_adamw(rank, way, settings):
    run = Run.of(way, settings, alike=False)
    mirror = Mirror(run.optimizer)
    for call in range(CALLS):
        run.backward()
        norm = mirror.step()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.call = call + 1
        torch.testing.assert_close(run.optimizer.metrics()["grad_norm"], norm.item(), rtol=1e-5, atol=0)
    run.optimizer.flush()
    mirror.compare(CALLS)
    run.optimizer.close()


@pytest.mark.parametrize("preset", PRESETS)
def test_after_a_flush_the_weights_are_those_of_adamw_on_the_gathered_gradients(two, preset):
    """With uneven and empty shards, tied weights, parameters of one dimension, and different gradients on each rank."""
    two.run(follows_adamw, "sharded", PRESETS[preset])


@pytest.mark.parametrize("way", ["sharded", "hybrid"])
def test_over_four_ranks_too_with_clipping(four, way):
    four.run(follows_adamw, way, PRESETS["stallfree"] | dict(max_grad_norm=1.0))


@pytest.mark.parametrize("way", ["resharding_late", "by_columns"])
def test_parameters_that_stay_gathered_or_are_split_otherwise_train_alike(two, way):
    two.run(follows_adamw, way, PRESETS["stallfree"])


def follows_adamw_in_two_dimensions(rank, settings, width=6, hidden=8):
    model = in_two_dimensions(width, hidden)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, **settings)
    mirror = Mirror(optimizer)
    for call in range(CALLS):
        row = rank // 2  # ranks of one tensor-parallel group see the same batch
        model(drawn_batch(4, 10 * call + row, width)).square().sum().backward()
        norm = mirror.step()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(optimizer.metrics()["grad_norm"], norm.item(), rtol=1e-5, atol=0)
    optimizer.flush()
    mirror.compare(CALLS)
    optimizer.close()


@pytest.mark.parametrize("preset", ["deferred", "stallfree"])
def test_over_a_mesh_of_two_dimensions(four, preset):
    """FSDP x tensor parallelism by rows and by columns; gradients follow published weights, and are gathered."""
    four.run(follows_adamw_in_two_dimensions, PRESETS[preset] | dict(max_grad_norm=1.0))


@pytest.mark.parametrize("width, hidden", [(5, 7), (5, 3)])
def test_over_a_mesh_of_two_dimensions_that_does_not_divide(four, width, hidden):
    """Of seven rows of `up` ranks have 2, 2, 2 and 1; of three the last one has none."""
    four.run(follows_adamw_in_two_dimensions, PRESETS["stallfree"] | dict(max_grad_norm=1.0), width, hidden)


# 2: timing


def delayed(rank, way, slow):
    run = Run.of(way, PRESETS["stallfree"], alike=False)
    if rank == slow:
        times = random.Random(0)
        run.optimizer.engine.delay = lambda place: times.uniform(0, 0.003)
    seen = [*run.play(CALLS), run.flushed()]
    run.optimizer.close()
    return seen


@pytest.mark.parametrize("ranks, way", [("two", "sharded"), ("four", "sharded"), ("four", "hybrid")])
def test_a_slow_rank_changes_no_bit(request, ranks, way):
    ranks = request.getfixturevalue(ranks)
    expected = ranks.run(delayed, way, None)
    for others in expected[1:]:
        equal(others, expected[0], "another rank")
    for seen in ranks.run(delayed, way, 1):
        equal(seen, expected[0])


# 7: world size


def played(rank, way, settings):
    run = Run.of(way, settings)
    seen = [*run.play(CALLS), run.flushed()]
    run.optimizer.close()
    return seen


def alone(settings):
    return on_host(played(0, "plain", settings))


@pytest.mark.parametrize("ranks, way", [("two", "sharded"), ("four", "sharded"), ("four", "hybrid")])
def test_without_a_selection_the_number_of_ranks_changes_no_bit(request, ranks, way):
    """The same gradients on every rank: their mean is exact. Nothing is summed where nothing is clipped."""
    settings = PRESETS["deferred"]
    equal(request.getfixturevalue(ranks).run(played, way, settings)[-1], alone(settings))


@pytest.mark.parametrize(
    "ranks, way, dim", [("two", "sharded", 1), ("four", "sharded", 1), ("four", "hybrid", 1), ("two", "by_columns", 0)]
)
def test_a_selection_is_the_same_on_any_number_of_ranks(request, ranks, way, dim):
    """Channels of which ranks hold parts are scored over all of these. Of whole ones each rank chooses among its own."""
    settings = PRESETS["stallfree"] | dict(channel_dim=dim)
    split = [dim == 1 or not name.endswith("experts") for name, _ in Net().named_parameters()]
    seen, expected = request.getfixturevalue(ranks).run(played, way, settings)[0], alone(settings)
    equal(*([[*compress(call, split)] for call in run] for run in (seen, expected)))


def chosen_in_two_dimensions(rank):
    """By weight: which of all its columns this rank has, and which of them are selected, call by call; and scores are right."""
    model = in_two_dimensions()
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, channel_dim=1, **PRESETS["stallfree"])
    engine, decay, scores, seen = optimizer.engine, optimizer.config.score_decay, {}, []
    for call in range(CALLS):
        model(drawn_batch(4, 10 * call + rank // 2)).square().sum().backward()
        for weight in engine.channels.weights:
            squares = gathered(optimizer.full_gradient(weight.param)).square().sum(0)
            scores[weight.name] = decay * scores.get(weight.name, 0) + (1 - decay) * squares
        optimizer.step()
        optimizer.zero_grad()
        for block in engine.blocks:
            for state, selected in zip(block.weights, block.half.installed.selected, strict=True):
                weight = state.weight
                split = any(getattr(placement, "dim", None) == 1 for placement in weight.param.placements)
                expected = scores[weight.name].chunk(2)[rank % 2] if split else scores[weight.name]
                torch.testing.assert_close(
                    engine.channels.of(engine.channels.score, weight, weight), expected, rtol=1e-5, atol=0
                )
                seen.append((call, weight.name, rank % 2 if split else None, sorted(selected.tolist())))
    optimizer.close()
    return seen


def test_ranks_of_a_mesh_of_two_dimensions_select_alike(four):
    """By the columns' norms in the gathered gradients. Each pair of ranks sees its own batch, and each rank a part of the rows:
    by its own sums it would choose others."""
    answers = four.run(chosen_in_two_dimensions)
    chosen = {}
    for call, name, part, selected in (entry for answer in answers for entry in answer):
        assert chosen.setdefault((call, name, part), selected) == selected, f"call {call + 1}, {name}"
    for name in ("up", "down"):
        sets = {tuple(selected) for (_, label, _), selected in chosen.items() if f".{name}." in label and selected}
        assert len(sets) > 1, "channels change hands"


def test_clipping_is_the_same_up_to_rounding(two):
    settings = PRESETS["stallfree"] | dict(channel_dim=1, max_grad_norm=1.0)
    near(two.run(played, "sharded", settings)[0], alone(settings))


# 8: skips


def struck(rank, way, call, bad):
    """In one call a gradient is not finite on the last rank (bad), or there is none at all."""
    run = Run.of(way, PRESETS["stallfree"], alike=True)
    run.play(call)

    def spoil(grads):
        if rank == dist.get_world_size() - 1:
            grads["layers.1.narrow"][0, 3] = bad

    if bad is None:
        run.step()
    else:
        run.backward(change=spoil)
        run.step()
    seen = [weights(run.model), *run.play(CALLS), run.flushed()]
    skipped = run.optimizer.metrics()["skipped_steps"]
    run.optimizer.close()
    return skipped, seen


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("ranks, way", [("two", "sharded"), ("four", "sharded"), ("four", "hybrid")])
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(request, ranks, way, bad):
    ranks = request.getfixturevalue(ranks)
    spoiled, without = ranks.run(struck, way, 8, bad), ranks.run(struck, way, 8, None)
    assert [skipped for skipped, _ in spoiled] == [1] * ranks.world
    for (_, seen), (_, expected) in zip(spoiled, without, strict=True):
        equal(seen, expected)
