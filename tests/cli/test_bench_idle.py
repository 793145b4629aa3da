"""A host that replays nothing, as `idle-host` measures it."""

import pytest
import torch

from stallfree import ZenFlowAdamW
from stallfree.cli.bench.idle import take_host_away


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_an_idle_host_replays_nothing_and_hands_channels_over(kernel):
    """The weights of deferred channels stay as they are, those of selected ones are trained."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False), torch.nn.Linear(48, 64, bias=False))
    config = dict(update_interval=2, full_warm_up_rounds=2, select_interval=4, min_numel=0, host_kernel=kernel)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=1e-2, topk_ratio=0.25, **config)
    take_host_away(optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    ever = [torch.zeros(param.shape[1], dtype=torch.bool) for param in model.parameters()]  # selected at some time
    for _ in range(20):
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for state, chosen in zip(optimizer.engine.weights.values(), ever, strict=True):
            chosen[state.block.half.installed.selected[state.place]] = True
    assert optimizer.engine.worker.queue.stats().elements == 0
    assert optimizer.metrics()["reselections_total"] > 4
    for old, param, chosen in zip(before, model.parameters(), ever, strict=True):
        assert 0 < chosen.sum() < len(chosen)
        changed = (old != param).any(dim=0)
        assert torch.equal(changed, chosen)
    optimizer.close()


def test_where_nothing_is_deferred_there_is_nothing_to_take_away():
    optimizer = ZenFlowAdamW([torch.nn.Parameter(torch.ones(8, 8))], lr=1e-2)  # a resident
    take_host_away(optimizer)
    param = optimizer.param_groups[0]["params"][0]
    param.sum().backward()
    optimizer.step()
    assert (param < 1).all()
    optimizer.close()
