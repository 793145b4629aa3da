"""The engine comes to the same weights with the Triton kernels, in the interpreter, as with their definition."""

import math

import pytest
import torch
from block_cases import triton_block
from torch import nn

from stallfree import ZenFlowAdamW
from stallfree.engine import pipeline

CPU = torch.device("cpu")
SHAPES = {"layers.0.up.weight": (12, 8), "layers.1.down.weight": (8, 16), "norm.weight": (5,), "norm.bias": (6,)}
SETTINGS = dict(
    lr=1e-2, topk_ratio=0.25, update_interval=2, full_warm_up_rounds=2, select_interval=2, min_numel=20, block_numel=100
)


def train(settings, scaled):
    """Nine calls: some with a part of the gradients, one that is not finite."""
    generator = torch.Generator().manual_seed(1)
    params = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    optimizer = ZenFlowAdamW(params.items(), **SETTINGS | settings)
    found = []
    for call in range(9):
        used = list(params.values())[call % 2 :: 2] if call in (3, 6) else params.values()
        loss = sum((p * p * torch.randn(p.shape, generator=generator)).sum() for p in used)
        (loss * (math.nan if call == 4 else 1)).backward()
        if scaled:
            nn.utils.clip_grad_norm_(params.values(), 3.0)
            if call % 3 == 1:
                params["layers.0.up.weight"].grad.mul_(0.5)
        optimizer.step()
        found.append(optimizer.metrics())
        optimizer.zero_grad()
    optimizer.flush()
    optimizer.close()
    return found, {name: param.detach() for name, param in params.items()}


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, in triton's interpreter
@pytest.mark.parametrize("settings, scaled", [(dict(max_grad_norm=1.0), False), (dict(), True)])
def test_the_same_weights_with_triton(monkeypatch, settings, scaled):
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, all tests of the engine run there")
    expected = train(settings, scaled)
    kernel = triton_block(CPU, small=True)
    monkeypatch.setattr(pipeline, "block_kernel", lambda device: kernel)
    found = train(settings, scaled)
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine["rho_by_kind"] == pytest.approx(other["rho_by_kind"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5, nan_ok=True)
        for name in ("skipped_steps", "last_skipped_call", "last_skipped_kinds"):
            assert mine[name] == other[name]
    assert found[0][-1]["last_skipped_call"] == 5
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-5, atol=1e-6)
