"""Training of sharded parameters: the update rule's invariants, over ranks."""

import random

import pytest
import torch
import torch.distributed as dist
from nets import (
    LR,
    PRESETS,
    WAYS,
    Mirror,
    Net,
    Run,
    Transformerish,
    drawn,
    drawn_batch,
    gathered,
    in_two_dimensions,
    mesh_of,
    weights,
)
from ranks import DEVICE, on_host
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stallfree import ZenFlowAdamW, load_checkpoint, save_checkpoint, to_adamw_state
from stallfree.engine.gradient import StagedGradient
from stallfree.engine.interval import UpdateTime
from stallfree.engine.sharding import gradient_of
from stallfree.engine.tuner import Measured

CALLS = 14


def equal(actual, expected, what: str = "") -> None:
    for call, (now, then) in enumerate(zip(actual, expected, strict=True)):
        for place, (a, b) in enumerate(zip(now, then, strict=True)):
            assert torch.equal(a, b), f"{what}: call {call + 1}, parameter {place} differs by {(a - b).abs().max():.3g}"


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


def follows_adamw_in_two_dimensions(rank, settings):
    model = in_two_dimensions()
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, **settings)
    mirror = Mirror(optimizer)
    for call in range(CALLS):
        row = rank // 2  # ranks of one tensor-parallel group see the same batch
        model(drawn_batch(4, 10 * call + row)).square().sum().backward()
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


# 2: timing


def delayed(rank, slow):
    run = Run.of("sharded", PRESETS["stallfree"], alike=False)
    if rank == slow:
        times = random.Random(0)
        run.optimizer.engine.delay = lambda place: times.uniform(0, 0.003)
    seen = [*run.play(CALLS), run.flushed()]
    run.optimizer.close()
    return seen


def test_a_slow_rank_changes_no_bit(two):
    expected = two.run(delayed, None)
    equal(expected[1], expected[0], "another rank")
    equal(two.run(delayed, 1)[0], expected[0])


# 7: world size


def played(rank, way, settings):
    run = Run.of(way, settings)
    seen = [*run.play(CALLS), run.flushed()]
    run.optimizer.close()
    return seen


def near(actual, expected) -> None:
    for now, then in zip(actual, expected, strict=True):
        for a, b in zip(now, then, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def alone(settings):
    return on_host(played(0, "plain", settings))


@pytest.mark.parametrize("ranks, way", [("two", "sharded"), ("four", "sharded"), ("four", "hybrid")])
def test_without_a_selection_the_number_of_ranks_changes_no_bit(request, ranks, way):
    """The same gradients on every rank: their mean is exact. Nothing is summed where nothing is clipped."""
    settings = PRESETS["deferred"]
    equal(request.getfixturevalue(ranks).run(played, way, settings)[-1], alone(settings))


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_a_selection_is_the_same_on_any_number_of_ranks(request, ranks):
    """Input columns are scored over all ranks. A table's rows are chosen by each rank among its own."""
    settings = PRESETS["stallfree"] | dict(channel_dim=1)
    equal(request.getfixturevalue(ranks).run(played, "sharded", settings)[0], alone(settings))


def test_clipping_is_the_same_up_to_rounding(two):
    settings = PRESETS["stallfree"] | dict(channel_dim=1, max_grad_norm=1.0)
    near(two.run(played, "sharded", settings)[0], alone(settings))


# 8: skips


def struck(rank, call, bad):
    """In one call a gradient is not finite on the last rank (bad), or there is none at all."""
    run = Run.of("sharded", PRESETS["stallfree"], alike=True)
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
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(two, bad):
    spoiled, without = two.run(struck, 8, bad), two.run(struck, 8, None)
    assert [skipped for skipped, _ in spoiled] == [1, 1]
    for (_, seen), (_, expected) in zip(spoiled, without, strict=True):
        equal(seen, expected)


# The loop around it


def staged_beside_backward(rank):
    run = Run.of("sharded", PRESETS["stallfree"])
    run.play(3)
    params = dict(run.model.named_parameters())
    seen = []
    params["embed.weight"].register_post_accumulate_grad_hook(  # of the root, which comes last
        lambda _: seen.extend(type(gradient_of(params[f"layers.{i}.{name}"])) for i, name in enumerate(("up", "down", "gate")))
    )
    run.backward()
    assert seen == [StagedGradient] * 3
    bias = gradient_of(params["layers.0.bias"])
    assert bias.untyped_storage().nbytes() == bias.nbytes, "the buffer of the whole group stays"
    run.optimizer.close()


def test_blocks_are_staged_while_backward_goes_on_and_their_buffers_are_free(two):
    two.run(staged_beside_backward)


def keeps_gradients(rank):
    run = Run.of("sharded", PRESETS["stallfree"])
    run.play(3)
    bias, kept, places = dict(run.model.named_parameters())["layers.0.bias"], [], []
    for keep in (
        None,
        None,
        lambda grad: grad,
        lambda grad: grad.detach(),
        lambda grad: grad.to_local(),
        lambda grad: grad.to_local().view(-1)[:1],
        lambda grad: grad.to_local().untyped_storage(),
        None,
        None,
    ):
        run.backward()
        run.optimizer.step()
        places.append(gradient_of(bias).data_ptr())
        if keep is not None:
            kept.append((keep(bias.grad), keep(bias.grad).clone()))
        run.optimizer.zero_grad()
        run.call += 1
    for now, then in kept:
        storage = isinstance(now, torch.UntypedStorage)
        assert bytes(now) == bytes(then) if storage else torch.equal(gathered(now), gathered(then))
    assert places[0] == places[1] == places[2]
    assert places[-1] == places[-2]
    assert len(set(places[2:8])) == 6, "somebody has it still"
    run.optimizer.close()


def test_memory_of_small_gradients_is_used_again_unless_somebody_has_kept_it(two):
    two.run(keeps_gradients)


def accumulates(rank, sync):
    """Two backward passes per call: reduced each time, or only once; clipped by torch; a frozen parameter; two groups."""
    model = WAYS["sharded"](Net())
    frozen, *rest = model.named_parameters()
    frozen[1].requires_grad_(False)
    groups = [dict(params=rest[:3], weight_decay=0.0), dict(params=rest[3:], lr=LR / 2)]
    optimizer = ZenFlowAdamW(groups, lr=LR, **PRESETS["stallfree"])
    twin = WAYS["sharded"](Net())
    next(iter(twin.parameters())).requires_grad_(False)
    twins = list(twin.named_parameters())[1:]
    adamw = torch.optim.AdamW([dict(params=twins[:3], weight_decay=0.0), dict(params=twins[3:], lr=LR / 2)], lr=LR)
    guessed = 0
    for call in range(CALLS):
        for half in range(2):
            for each in (model, twin):
                each.set_requires_gradient_sync(sync or half == 1)
                each(drawn(Net(), 2 * call + half, rank)).backward()
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, twin)]
        torch.testing.assert_close(gathered(norms[0]), gathered(norms[1]), rtol=1e-5, atol=0)
        for each in (optimizer, adamw):
            each.step()
            each.zero_grad()
        guessed = guessed if call else optimizer.metrics()["restages"]
    optimizer.flush()
    for a, b in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert optimizer.metrics()["restages"] == guessed, "the number of passes is learned in the first call"
    optimizer.close()


@pytest.mark.parametrize("sync", [True, False])
def test_gradients_accumulate_and_are_clipped_as_usual(two, sync):
    two.run(accumulates, sync)


def in_mixed_precision(rank, dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Transformerish().to(dtype)
    mesh = mesh_of()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, **PRESETS["stallfree"])
    losses = []
    for _ in range(30):
        x = drawn_batch(8, rank)
        loss = (model(x.to(torch.bfloat16)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_policies_work_with_any_type_of_shard(two, dtype):
    for losses in two.run(in_mixed_precision, dtype):
        assert losses[-1] < 0.5 * losses[0]


def refuses(rank):
    plain = nn.Linear(4, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match="fully_shard"):
        ZenFlowAdamW(plain.named_parameters(), lr=LR)
    with pytest.raises(RuntimeError, match=r"extra.*fully_shard"):
        ZenFlowAdamW([*WAYS["sharded"](Net()).named_parameters(), ("extra", plain.weight)], lr=LR)


def test_replicas_are_refused_with_the_way_out(two):
    two.run(refuses)


def memory_of_one(rank):
    from stallfree import planner

    real = planner.available_host_bytes
    planner.available_host_bytes = lambda: 0 if rank == 1 else real()
    try:
        with pytest.raises(MemoryError, match="host memory"):
            Run.of("sharded", PRESETS["stallfree"])
    finally:
        planner.available_host_bytes = real


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
