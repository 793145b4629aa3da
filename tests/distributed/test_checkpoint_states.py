"""State on another mesh, bit for bit, before a step could hide a difference: what has been loaded is what was saved."""

import pytest
import torch
from nets import LR, PRESETS, Run, drawn_batch, gathered, in_one_dimension, in_two_dimensions
from test_checkpoints import OPTIONS, load, load_full, save, save_full

from stallfree import ZenFlowAdamW

NAMES = ("master", "exp_avg", "exp_avg_sq", "step", "score", "published")  # what any mesh can load
HOWS = pytest.mark.parametrize("full", [None, *OPTIONS.values()], ids=["sharded", *OPTIONS])


def state_of(optimizer):
    """By parameter's name, gathered. The optimizer is done."""
    exported = optimizer.state_dict()
    state = {}
    for number, label in enumerate(exported["param_groups"][0]["param_names"]):
        entry = exported["state"][number]
        state[label] = {name: gathered(entry[name]) for name in NAMES if name in entry}
    optimizer.close()
    return state


def saved(run, full, path):
    run.optimizer.flush()
    (save_full if full else save)(run, path)
    return state_of(run.optimizer)


def loaded(run, full, path):
    load_full(run, path, full) if full else load(run, path, more_ranks=True)
    return state_of(run.optimizer)


def compare(answers, expected):
    for rank, state in enumerate(answers):
        assert state.keys() == expected.keys()
        for label, entry in state.items():
            assert entry.keys() == expected[label].keys()
            for name, tensor in entry.items():
                assert torch.equal(tensor, expected[label][name]), f"rank {rank}, {label}: {name}"


def saved_by_ranks(rank, full, path):
    """With a weight that has no gradient in one call, so that numbers of steps differ."""
    run = Run.of("sharded", PRESETS["stallfree"], alike=False)
    run.play(4)
    run.backward(change=lambda grads: grads.pop("layers.0.up"))
    run.step()
    run.play(8)
    return saved(run, full, path)


def loaded_by_ranks(rank, way, full, path):
    """By an optimizer that has trained, and has a selection and gradients of its own."""
    run = Run.of(way, PRESETS["stallfree"])
    run.play(5)
    return loaded(run, full, path)


@HOWS
def test_what_two_ranks_save_any_number_loads_bit_for_bit(one, two, four, tmp_path, full):
    path = tmp_path / "state"
    expected = two.run(saved_by_ranks, full, path)[0]
    assert {int(step) for entry in expected.values() for step in entry["step"].flatten()} == {7, 8}
    assert all(entry["score"].any() for entry in expected.values() if "score" in entry)
    for ranks, way in ((four, "sharded"), (four, "hybrid"), (one, "sharded"), (two, "by_columns")):
        compare(ranks.run(loaded_by_ranks, way, full, path), expected)


def trained(model, calls):
    """With channels that are rows, which tensor parallelism and FSDP both split, and columns, which the former does."""
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, channel_dim=dict(up=0, down=1), **PRESETS["stallfree"])
    for call in range(calls):
        model(drawn_batch(4, call)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Run(model, optimizer)


def saved_in_one_dimension(rank, full, path):
    return saved(trained(in_one_dimension(), 8), full, path)


def loaded_in_two_dimensions(rank, full, path, again):
    """And what this rank has of one number per row."""
    run = trained(in_two_dimensions(), 5)
    load_full(run, path, full) if full else load(run, path, more_ranks=True)
    engine, param = run.optimizer.engine, run.model.layers[0].up.weight
    weight = engine.weights[param].weight
    score = engine.channels.of(engine.channels.score, weight, weight).clone()
    return saved(run, full, again), score


def loaded_in_one_dimension(rank, full, path):
    return loaded(trained(in_one_dimension(), 5), full, path)


@HOWS
def test_there_and_back_through_two_dimensions_no_bit_changes(two, four, tmp_path, full):
    first, second = tmp_path / "first", tmp_path / "second"
    expected = two.run(saved_in_one_dimension, full, first)[0]
    states, scores = zip(*four.run(loaded_in_two_dimensions, full, first, second), strict=True)
    compare(states, expected)
    whole = torch.cat([scores[0], scores[2], scores[1], scores[3]])  # rows are split by tensor parallelism first
    assert torch.equal(whole, expected["layers.0.up.weight"]["score"])
    compare(two.run(loaded_in_one_dimension, full, second), expected)
