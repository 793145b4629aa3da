"""The convergence study's simulator against the executable rule, and the rest of the study on a tiny model."""

import json
import math
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from oracle import Oracle  # noqa: E402

from benchmarks.convergence.layout import Layout, Shape  # noqa: E402
from benchmarks.convergence.rule import Method, learning_rates  # noqa: E402
from benchmarks.convergence.simulator import Simulator  # noqa: E402
from benchmarks.convergence.update import Hyper  # noqa: E402
from stallfree.config import ZenFlowConfig  # noqa: E402

HYPER = Hyper(weight_decay=0.1)
CALLS = 26
COMMON = dict(topk_ratio=0.4, full_warm_up_rounds=4, select_interval=7)
METHODS = [
    Method(name="replay S=4", **COMMON),
    Method(name="without look-ahead", lookahead=0.0, **COMMON),
    Method(name="S=2", update_interval=2, **COMMON),
    Method(name="S=8, one call of warm-up", update_interval=8, **COMMON | dict(full_warm_up_rounds=1)),
    Method(name="no warm-up", **COMMON | dict(full_warm_up_rounds=0)),
    Method(name="rounds, lag 0", update_interval=3, stagger=False, lag=0, **COMMON),
    Method(name="staggered, lag 0, often", update_interval=3, lag=0, **COMMON | dict(select_interval=2)),
    Method(name="deferred LR halved", deferred_lr_scale=0.5, **COMMON),
    Method(name="nothing selected", **COMMON | dict(topk_ratio=0.0)),
    Method(name="staggered mean", rule="mean", lookahead=0.0, **COMMON),
    Method(name="mean with look-ahead, lag 0", rule="mean", lag=0, **COMMON),
    Method(name="zenflow", rule="mean", lookahead=0.0, stagger=False, lag=4, **COMMON),
]


def tiny_layout(tile=16):
    per_layer = [Shape("wide", 3, 11), Shape("tall", 9, 5), Shape("norm", 1, 7, resident=True)]
    return Layout(3, per_layer, [Shape("embed", 13, 6, by_row=True), Shape("last", 1, 6, resident=True)], tile)


def members(layout):
    """(group, place in it) of every parameter."""
    return [(group, i) for group in layout.groups for i in range(group.count)]


def split(layout, flat):
    """[numel] -> each parameter's [rows, cols], sharing memory."""
    return [layout.view(flat[None], group)[0, i] for group, i in members(layout)]


def random_weights(layout, dtype=torch.float64):
    flat = torch.zeros(layout.numel, dtype=dtype)
    for view in split(layout, flat):
        view.normal_()
    return flat


def oracle_of(method, layout, weights):
    """The executable rule with the same parameters, blocks and settings."""
    parameters = members(layout)
    phases = {b: b % method.update_interval if method.stagger else 0 for b in range(layout.blocks)}
    blocks = [(phases[b], [i for i, (group, k) in enumerate(parameters) if group.blocks[k] == b]) for b in range(layout.blocks)]
    counts = [None if g.shape.resident else round(method.topk_ratio * g.shape.channels) for g, _ in parameters]
    names = {field.name for field in fields(ZenFlowConfig)}
    settings = {field.name: getattr(method, field.name) for field in fields(method) if field.name in names}
    config = ZenFlowConfig(max_grad_norm=HYPER.max_grad_norm, **settings)
    dims = [0 if group.shape.by_row else 1 for group, _ in parameters]
    return Oracle([w.clone() for w in weights], blocks, dims=dims, selected=counts, config=config)


def random_grads(layout, sim, dtype=torch.float64):
    """Another gradient for every run, with channel scales that change over time, so that selections do."""
    for run in range(sim.grad.shape[0]):
        for view in split(layout, sim.grad[run]):
            scale = torch.rand(view.shape[-1]).pow(3) * 2 + 0.01
            view.copy_(torch.randn(view.shape) * scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_weights_follow_the_executable_rule_call_by_call(dtype):
    layout = tiny_layout()
    start = random_weights(layout)
    lrs = [learning_rates(0.01 * (1 + i), CALLS, warm_up=5) for i in range(len(METHODS))]
    sim = Simulator(layout, start.to(dtype), METHODS, lrs, dtype=dtype, hyper=HYPER)
    oracles = [oracle_of(method, layout, split(layout, start)) for method in METHODS]
    close = dict(rtol=0, atol=1e-12) if dtype == torch.float64 else dict(rtol=1e-4, atol=1e-4)
    selections = 0
    for call in range(1, CALLS + 1):
        random_grads(layout, sim)
        grads = [split(layout, grad) for grad in sim.grad]
        sim.step()
        exact = sim.exact()
        for run, (method, oracle) in enumerate(zip(METHODS, oracles)):
            hyper = dict(lr=float(lrs[run][call]), betas=HYPER.betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay)
            oracle.step([g.double() for g in grads[run]], [hyper] * len(grads[run]))
            for kind, flat, expected in (("published", sim.weight, oracle.weights()), ("exact", exact, oracle.exact())):
                for (group, i), ours, theirs in zip(members(layout), split(layout, flat[run]), expected):
                    torch.testing.assert_close(
                        ours.double(), theirs.view_as(ours), **close,
                        msg=lambda text: f"{method.name}, call {call}, {kind}, {group.shape.name} {i}: {text}",  # noqa: B023
                    )  # fmt: skip
            for (group, i), parameter in zip(members(layout), oracle.parameters):
                mask = sim.selected[run, group.channels].view(group.count, -1)[i]
                assert group.shape.resident or torch.equal(mask, parameter.selected), (method.name, call, group.shape.name)
        selections += sum(call in schedule.selecting for schedule in sim.schedules)
    assert selections > 3 * len(METHODS)
