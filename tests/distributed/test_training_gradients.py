"""Gradients of sharded parameters: when they are staged, who keeps their memory, accumulation, clipping, mixed precision."""

import pytest
import torch
from nets import CALLS, LR, PRESETS, WAYS, Mirror, Net, Run, Transformerish, drawn, drawn_batch, gathered, mesh_of, weights
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stallfree import ZenFlowAdamW
from stallfree.engine.gradient import StagedGradient
from stallfree.engine.sharding import gradient_of


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
        if call:
            assert optimizer.metrics()["restages"] == 0, "the number of passes is learned in the first call"
    optimizer.flush()
    for a, b in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    optimizer.close()


@pytest.mark.parametrize("sync", [True, False])
def test_gradients_accumulate_and_are_clipped_as_usual(two, sync):
    two.run(accumulates, sync)


def in_mixed_precision(rank, dtype, reduced):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    model = Transformerish().to(dtype)
    mesh = mesh_of()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, **PRESETS["stallfree"])
    losses, mirror = [], Mirror(optimizer)
    for _ in range(30):
        x = drawn_batch(8, rank)
        loss = (model(x.to(torch.bfloat16)).float() - 1).square().mean()
        loss.backward()
        mirror.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.flush()
    if dtype is torch.float32:
        mirror.compare(30)
    optimizer.close()
    return losses


@pytest.mark.parametrize(
    "dtype, reduced", [(torch.float32, torch.float32), (torch.float32, None), (torch.bfloat16, torch.float32)], ids=str
)
def test_mixed_precision_policies_work_with_any_type_of_shard(two, dtype, reduced):
    """fp32 shards end with AdamW's weights on the gathered gradients, be these reduced in bf16."""
    for losses in two.run(in_mixed_precision, dtype, reduced):
        assert losses[-1] < 0.5 * losses[0]
