"""Around the training of sharded parameters: what ranks refuse and agree on; weights that are read, written, handed on."""

import functools
import mmap
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nets import (
    CALLS,
    LR,
    PRESETS,
    WAYS,
    Mirror,
    Net,
    Run,
    drawn,
    drawn_batch,
    equal,
    gathered,
    in_two_dimensions,
    weights,
)
from ranks import DEVICE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stallfree import ZenFlowAdamW, load_checkpoint, save_checkpoint, to_adamw_state
from stallfree.engine.interval import UpdateTime
from stallfree.engine.tuner import Measured


def refuses(rank):
    plain = nn.Linear(4, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match="fully_shard"):
        ZenFlowAdamW(plain.named_parameters(), lr=LR)
    with pytest.raises(RuntimeError, match=r"extra.*fully_shard"):
        ZenFlowAdamW([*WAYS["sharded"](Net()).named_parameters(), ("extra", plain.weight)], lr=LR)


def test_plain_parameters_are_refused_with_the_way_out(two):
    two.run(refuses)


def refuses_replicas(rank):
    """And leaves them as they were: without hooks, without pages of host memory, in training."""
    model = DistributedDataParallel(nn.Linear(4, 4, device=DEVICE))
    before = weights(model)
    refused = pytest.raises(RuntimeError, match=r"module\.weight.*DistributedDataParallel.*fully_shard")
    with mock.patch.object(mmap, "mmap", wraps=mmap.mmap) as pages, refused:
        ZenFlowAdamW(model.named_parameters(), lr=LR, min_numel=0)
    assert not pages.called
    assert not any(param._post_accumulate_grad_hooks or param._backward_hooks for param in model.parameters())
    equal([weights(model)], [before])
    model(torch.full((1, 4), 1.0 + rank, device=DEVICE)).sum().backward()
    equal([[param.grad for param in model.parameters()]], [[torch.full_like(before[0], 1.5), torch.ones_like(before[1])]])


def test_what_is_wrapped_in_ddp_is_refused_untouched_with_the_way_out(two):
    two.run(refuses_replicas)


def memory_of_one(rank):
    from stallfree import limits

    real = limits.available_host_bytes
    limits.available_host_bytes = lambda: 0 if rank == 1 else real()
    try:
        with pytest.raises(MemoryError, match="host memory"):
            Run.of("sharded", PRESETS["stallfree"])
    finally:
        limits.available_host_bytes = real


def test_what_does_not_fit_on_one_rank_is_refused_on_all(two):
    two.run(memory_of_one)


def automatic(rank, wants):
    """Rank by rank other times are measured: on two hosts, one needs a larger S than the other."""
    run = Run.of("sharded", AUTO | dict(update_interval="auto"))
    tuner, clock = run.optimizer.engine.tuner, run.optimizer.engine.clock
    tuner._measure = lambda engine: Measured(1.0, 0.0, UpdateTime(clock.interval, 0.8 * wants[rank] + 0.01 * clock.interval))
    seen = [*run.play(40), run.flushed()]
    changes = {change.call: change.interval for change in run.optimizer.interval_history}
    run.optimizer.close()
    run = Run.of("sharded", AUTO | dict(update_interval="auto", interval_schedule=changes))
    equal([*run.play(40), run.flushed()], seen)
    run.optimizer.close()
    return changes


AUTO = dict(min_numel=0, block_numel=100, full_warm_up_rounds=2, staleness_budget=50.0, max_update_interval=8)


def test_ranks_agree_on_the_largest_interval_that_one_of_them_needs(two):
    """At the same call, so that windows close together; the record repeats the run."""
    first, second = two.run(automatic, (2, 4))
    assert first == second
    assert list(first) == [16]
    assert first[16] >= 4


def with_two_optimizers(rank):
    model = WAYS["sharded"](Net())
    named = list(model.named_parameters())
    optimizers = [ZenFlowAdamW(part, lr=LR, **PRESETS["stallfree"]) for part in (named[:3], named[3:])]
    mirrors = [Mirror(optimizer) for optimizer in optimizers]
    for call in range(CALLS):
        model(drawn(Net(), call, rank)).backward()
        for optimizer, mirror in zip(optimizers, mirrors, strict=True):
            mirror.step()
            optimizer.step()
            optimizer.zero_grad()
    for optimizer, mirror in zip(optimizers, mirrors, strict=True):
        optimizer.flush()
        mirror.compare(CALLS)
        optimizer.close()


def test_several_optimizers_of_one_model(two):
    two.run(with_two_optimizers)


def shows_exact_weights(rank):
    run = Run.of("sharded", PRESETS["stallfree"], alike=False)
    expected = [*run.play(CALLS), run.flushed()]
    run.optimizer.close()
    run = Run.of("sharded", PRESETS["stallfree"], alike=False)
    seen = run.play(9)
    with run.optimizer.exact_weights():
        shown = weights(run.model)
    equal([*seen, *run.play(CALLS), run.flushed()], expected)
    run.optimizer.close()
    run = Run.of("sharded", PRESETS["stallfree"], alike=False)
    run.play(9)
    equal([run.flushed()], [shown])
    run.optimizer.close()


def test_exact_weights_are_those_of_a_flush_and_change_nothing(two):
    two.run(shows_exact_weights)


def written_from_outside(rank):
    """Through the DTensor, and into the rank's part: both are noticed, and become the masters."""
    run = Run.of("sharded", PRESETS["stallfree"])
    run.play(6)
    params = dict(run.model.named_parameters())
    with torch.no_grad():
        params["layers.0.up"].mul_(0.5)
        params["layers.1.down"].to_local().mul_(0.5)
        params["layers.0.bias"].zero_()
    mirror = [gathered(params[name]).clone() for name in ("layers.0.up", "layers.1.down", "layers.0.bias")]
    run.optimizer.flush()
    equal([[gathered(params[name]) for name in ("layers.0.up", "layers.1.down", "layers.0.bias")]], [mirror])
    run.optimizer.close()


def test_weights_written_from_outside_are_honoured(two):
    two.run(written_from_outside)


def leaves_for_adamw(rank, directory):
    run = Run.of("sharded", PRESETS["stallfree"])
    run.play(7)
    state, masters = to_adamw_state(run.optimizer)
    twin = WAYS["sharded"](Net())
    with torch.no_grad():
        for param, master in zip(twin.parameters(), masters, strict=True):
            param.copy_(master)
    adamw = torch.optim.AdamW(twin.named_parameters(), lr=LR)
    adamw.load_state_dict(state)
    for call in range(7, 10):
        twin(drawn(Net(), call, 0)).backward()
        adamw.step()
        adamw.zero_grad()
    run.play(10)
    for a, b in zip(run.flushed(), weights(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for refused in (save_checkpoint, load_checkpoint):
        with pytest.raises(TypeError, match=r"torch\.distributed\.checkpoint"):
            refused(directory, run.optimizer)
    run.optimizer.close()


def test_torchs_adamw_goes_on_from_here(two, tmp_path):
    two.run(leaves_for_adamw, tmp_path)


def counts_collectives(rank, way):
    run = Run.of(way, COUNTED)
    run.play(8)  # what is agreed on once has been
    seen = []
    for _ in range(9):
        run.backward()
        seen.append(counted(run.optimizer, run.step))
    run.optimizer.close()
    return seen


COUNTED = PRESETS["stallfree"] | dict(select_interval=9, channel_dim=1, max_grad_norm=1.0)


def counted(optimizer, step):
    """Whether a step selects, and which collectives it makes."""
    before, made = optimizer.metrics()["reselections_total"], []
    with ExitStack() as patches:
        for name in COLLECTIVES:
            noted = functools.partial(note, made, name, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, noted))
        step()
    return optimizer.metrics()["reselections_total"] > before, made


def note(made, name, collective, *args, **options):
    made.append(name)
    return collective(*args, **options)


COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
}


@pytest.mark.parametrize("ranks, way", [("two", "sharded"), ("four", "sharded"), ("four", "hybrid")])
def test_a_step_makes_one_collective_with_a_selection_or_without(request, ranks, way):
    for answer in request.getfixturevalue(ranks).run(counts_collectives, way):
        assert {selects for selects, _ in answer} == {True, False}
        assert [made for _, made in answer] == [["all_reduce"]] * len(answer)


def counts_collectives_in_two_dimensions(rank, norms):
    """And over which dimensions numbers add up, by placements. norms: whether those train, which are on one dimension alone."""
    model = in_two_dimensions()
    for layer in model.layers:
        layer.norm.requires_grad_(norms)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, **COUNTED)
    sums = set()
    for param in (param for param in model.parameters() if param.requires_grad):
        axes = zip(param.device_mesh.mesh_dim_names, param.placements, strict=True)
        split = {name: placement.dim for name, placement in axes if not placement.is_replicate()}
        sums.add(tuple(split))  # its norm
        if param.dim() > 1:
            sums.add(tuple(name for name, axis in split.items() if axis == 0))  # its columns'
    seen = []
    for call in range(17):
        model(drawn_batch(4, 10 * call + rank // 2)).square().sum().backward()
        seen.append(counted(optimizer, optimizer.step))
        optimizer.zero_grad()
    optimizer.close()
    return sums, seen[8:]


@pytest.mark.parametrize("norms, expected", [(False, 3), (True, 5)])
def test_over_two_dimensions_a_step_makes_a_collective_for_each_dimension_of_each_set(four, norms, expected):
    """Sums over both dimensions take one over each, and others are over one. Where some parameters are on one dimension alone,
    all ranks agree on the norm, over each."""
    for sums, answer in four.run(counts_collectives_in_two_dimensions, norms):
        assert sums == {("dp", "tp"), ("dp",)}
        assert sum(map(len, sums)) + 2 * norms == expected
        assert {selects for selects, _ in answer} == {True, False}
        assert [made for _, made in answer] == [["all_reduce"] * expected] * len(answer)
