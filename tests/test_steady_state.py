"""Call after call: nobody asks the device for a number, and nothing is made that was not there."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from streams import StandIn, use
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stallfree import ZenFlowAdamW, ZenFlowConfig

CONFIG = ZenFlowConfig(
    update_interval=3,
    select_interval=6,
    full_warm_up_rounds=1,
    min_numel=0,
    block_numel=800,
    topk_ratio=0.25,
    max_grad_norm=1.0,
)
# For a device's numbers.
WAITING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique"}
CALLS = 20


class Seen(TorchDispatchMode):
    """Counts operations by name, the hooks' too."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ratio", [0.25, 0.0])
def test_no_call_asks_for_a_number_or_makes_a_stream(monkeypatch, ratio):
    """Also one that closes windows, selects, or lets channels change hands."""
    use(monkeypatch, staging_bytes=1 << 20)
    params = [*(nn.Parameter(torch.randn(24, 16)) for _ in range(5)), nn.Parameter(torch.randn(16))]
    optimizer = ZenFlowAdamW(params, lr=1e-3, config=CONFIG.replace(topk_ratio=ratio, select_interval=6 if ratio else 64))
    monkeypatch.setattr(StandIn, "__init__", None)  # whoever makes streams fails
    made = 0
    for call in range(CALLS):
        drawn = [torch.randn_like(param) for param in params]
        steady = call >= CALLS // 2
        with Seen() if steady else nullcontext() as seen:
            sum((param * grad).sum() for param, grad in zip(params, drawn, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if steady:
            assert not WAITING & seen.operations.keys(), f"call {call + 1}"
            made = max(made, seen.operations["empty"])
    assert bool(optimizer.metrics()["reselections_total"]) == (ratio > 0)
    assert made <= 5, "memory for selected gradients, and a few numbers of each selection"
    optimizer.close()


@pytest.mark.gpu
def test_no_call_waits_for_the_device_makes_a_stream_or_takes_memory(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    make, made = torch.cuda.Stream.__new__, []

    def counted(kind, *args, **options):
        if "stream_id" not in options:  # a name for one that is there
            made.append(kind)
        return make(kind, *args, **options)

    device = torch.device("cuda")
    params = [
        *(nn.Parameter(torch.randn(24, 16, device=device)) for _ in range(5)),
        nn.Parameter(torch.randn(16, device=device)),
    ]
    optimizer = ZenFlowAdamW(params, lr=1e-3, config=CONFIG)
    for call in range(CALLS):
        drawn = [torch.randn_like(param) for param in params]
        if call == CALLS // 2:
            monkeypatch.setattr(torch.cuda.Stream, "__new__", staticmethod(counted))
            segments = torch.cuda.memory_stats(device)["segment.all.allocated"]
        torch.cuda.set_sync_debug_mode("error" if call >= CALLS // 2 else "default")
        try:
            sum((param * grad).sum() for param, grad in zip(params, drawn, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not made
    assert torch.cuda.memory_stats(device)["segment.all.allocated"] == segments
    assert optimizer.metrics()["reselections_total"]
    optimizer.close()
