"""What the planner promises is what the process grows by, and what it grows by follows the formula for slots."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from stallfree import ZenFlowAdamW, ZenFlowConfig, planner
from stallfree.engine.blocks import build_blocks, classify
from stallfree.engine.slots import plan_slots

GROWTH = """
import ctypes, json, sys, torch
from torch import nn
from stallfree import ZenFlowAdamW, ZenFlowConfig, planner

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

settings = json.loads(sys.argv[1])
torch.set_num_threads(1)
weights = [torch.full((1024, 1024), 0.1, dtype=torch.bfloat16) for _ in range(24)]
gradient = torch.full((1024, 1024), 1e-3, dtype=torch.bfloat16)
named = [(f"layers.{i}.weight", nn.Parameter(weight)) for i, weight in enumerate(weights)]
small = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
warm = ZenFlowAdamW([small], min_numel=0, full_warm_up_rounds=2)  # loads what has to be loaded, in steps with a selection
for _ in range(8):
    small.sum().backward()
    warm.step()
    warm.zero_grad()
warm.close()
config = ZenFlowConfig(**settings)
plan = planner.plan(named, config)
before = resident()
optimizer = ZenFlowAdamW(named, lr=1e-5, config=config)
for _ in range(3 * config.max_update_interval + 6):
    for _, param in named:
        (param * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.engine.worker.finish()
grown, pool = resident() - before, optimizer.engine.pool.nbytes
print(json.dumps([grown, plan.host + plan.device_state, pool, plan.host_slots]))
"""


def test_the_device_s_share_is_what_the_planner_says():
    """Also of small parameters, which are on the device whole, with room for their gradients."""
    layers = [nn.Linear(96, 96, dtype=torch.bfloat16) for _ in range(30)]
    named = list(nn.Sequential(*layers, nn.Linear(400, 400)).named_parameters())
    config = ZenFlowConfig(update_interval=2, min_numel=10_000, block_numel=1 << 20)
    optimizer = ZenFlowAdamW(named, lr=1e-5, config=config)
    assert optimizer.metrics()["device_bytes"] == pytest.approx(planner.plan(named, config).device_state, rel=0.01)
    optimizer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_a_gpu_holds_what_the_planner_says(ratio):
    """Between steps all of it is state and staging memory, and beside them a step takes what gradients there are at once."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    named = [
        (f"layers.{i}.weight", nn.Parameter(torch.full((2048, 2048), 0.1, dtype=torch.bfloat16, device="cuda")))
        for i in range(24)
    ]
    gradient = torch.full((2048, 2048), 1e-3, dtype=torch.bfloat16, device="cuda")
    config = ZenFlowConfig(update_interval=4, topk_ratio=ratio, select_interval=8, full_warm_up_rounds=2, block_numel=1 << 22)
    plan = planner.plan(named, config)
    weight = named[0][1].nbytes
    held = torch.cuda.memory_allocated()
    optimizer = ZenFlowAdamW(named, lr=1e-5, config=config)
    for call in range(24):
        if call == 20:
            torch.cuda.reset_peak_memory_stats()
        for _, param in named:
            (param * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.metrics()["reselections_total"] > 0
    assert torch.cuda.memory_allocated() - held == pytest.approx(plan.device, rel=0.05)
    products = 2 * weight  # what this loss's backward pass itself holds
    assert torch.cuda.max_memory_allocated() - held < 1.05 * (plan.device + plan.device_gradients + products)
    optimizer.close()


@pytest.mark.parametrize(
    "settings",
    [
        dict(update_interval=4, block_numel=1 << 20, full_warm_up_rounds=2),
        dict(update_interval=4, block_numel=1 << 20, full_warm_up_rounds=2, moments_dtype="bfloat16"),
        dict(preset="zero-offload", block_numel=1 << 20),
    ],
    ids=["stallfree", "bf16 moments", "zero-offload"],
)
def test_a_process_grows_by_what_the_planner_says(settings):
    command = [sys.executable, "-c", GROWTH, json.dumps(settings)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    grown, planned, pool, slots = json.loads(finished.stdout)
    assert grown == pytest.approx(planned, rel=0.05)
    assert pool == slots, "the pool never had to grow"


@pytest.mark.parametrize("interval", [1, 2, 4, 8])
def test_slots_follow_their_formula(interval):
    """(S+3)/2 slots for each block on average at most, where blocks are equal, and those of hand-overs."""
    named = [
        (f"layers.{i}.weight", nn.Parameter(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"))) for i in range(32)
    ]
    config = ZenFlowConfig(update_interval=interval, topk_ratio=0.1, block_numel=1)
    _, weights = classify(named, config)
    blocks = build_blocks(weights, config)
    gradients = sum(block.deferred_numel for block in blocks) * 2
    handed_over = sum(block.exchange_bytes for block in blocks) / interval
    assert plan_slots(blocks, config).nbytes <= 1.01 * (gradients * (interval + 3) / 2 + handed_over)
    assert planner.plan(named, config).host_slots == plan_slots(blocks, config).nbytes
