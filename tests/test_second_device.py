"""A model on a GPU that is not the current one: the same bits, also of what is read while channels change hands."""

import copy

import pytest
import torch

from stallfree import ZenFlowAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SETTINGS = dict(topk_ratio=0.25, update_interval=2, full_warm_up_rounds=2, select_interval=2, min_numel=0, block_numel=1)


def train(current: int) -> list[list[torch.Tensor]]:
    """What a run on the second GPU shows after each call, with that GPU being the current one, or the first."""
    seen = []
    with torch.cuda.device(current):
        generator = torch.Generator("cuda:1").manual_seed(0)
        params = [torch.nn.Parameter(torch.ones(512, 384, device="cuda:1", dtype=torch.bfloat16)) for _ in range(6)]
        optimizer = ZenFlowAdamW(params, lr=1e-2, max_grad_norm=1.0, **SETTINGS)
        for call in range(12):
            optimizer.zero_grad()
            grads = [torch.randn(param.shape, device="cuda:1", generator=generator).bfloat16() for param in params]
            sum((param * grad).sum() for param, grad in zip(params, grads, strict=True)).backward()
            if call == 5:
                torch.nn.utils.clip_grad_norm_(params, 0.5)
                seen.append([optimizer.full_gradient(param).clone() for param in params])
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict()["state"])
            seen.append([value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)])
            with optimizer.exact_weights():
                seen.append([param.detach().clone() for param in params])
        optimizer.flush()
        seen.append([param.detach().clone() for param in params])
        optimizer.close()
    return seen


def test_the_current_device_changes_no_bit():
    for there, elsewhere in zip(train(1), train(0), strict=True):
        assert len(there) == len(elsewhere) > 0
        for one, other in zip(there, elsewhere, strict=True):
            assert torch.equal(one, other)
