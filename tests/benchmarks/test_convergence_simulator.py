"""The convergence study's simulator against the executable rule and torch's AdamW, and its probe against the simulator."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from oracle import Oracle  # noqa: E402

from benchmarks.convergence.layout import Layout, Shape  # noqa: E402
from benchmarks.convergence.probe import Probe  # noqa: E402
from benchmarks.convergence.rule import Method, learning_rates, windows_of  # noqa: E402
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
    Method(name="S=1, lag 1", update_interval=1, **COMMON),
    Method(name="S grows", ramp=((2, 12),), **COMMON),
    Method(name="S grows twice, S=8", update_interval=8, ramp=((1, 7), (3, 15)), **COMMON),
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
    return Layout(3, per_layer, [Shape("embed", 13, 6, by_row=True), Shape("last", 1, 6, resident=True)], tile=tile)


def members(layout):
    """(group, place in it) of every parameter."""
    return [(group, i) for group in layout.groups for i in range(group.count)]


def split(layout, flat):
    """[numel] -> each parameter's [rows, cols], sharing memory."""
    return [layout.view(flat[None], group)[0, i] for group, i in members(layout)]


def random_flat(layout, dtype=torch.float64):
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
    start = random_flat(layout)
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
        for run, (method, oracle) in enumerate(zip(METHODS, oracles, strict=True)):
            hyper = dict(lr=float(lrs[run][call]), betas=HYPER.betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay)
            oracle.interval = method.interval_at(call + 1)  # what set_update_interval does
            oracle.step([g.double() for g in grads[run]], [hyper] * len(grads[run]))
            for kind, flat, expected in (("published", sim.weight, oracle.weights()), ("exact", exact, oracle.exact())):
                for (group, i), ours, theirs in zip(members(layout), split(layout, flat[run]), expected, strict=True):
                    torch.testing.assert_close(
                        ours.double(), theirs.view_as(ours), **close,
                        msg=lambda text: f"{method.name}, call {call}, {kind}, {group.shape.name} {i}: {text}",  # noqa: B023
                    )  # fmt: skip
            for (group, i), parameter in zip(members(layout), oracle.parameters, strict=True):
                mask = sim.selected[run, group.channels].view(group.count, -1)[i]
                assert group.shape.resident or torch.equal(mask, parameter.selected), (method.name, call, group.shape.name)
        selections += sum(call in schedule.selecting for schedule in sim.schedules)
    assert selections > 3 * len(METHODS)


def test_look_ahead_of_the_warm_up_may_differ():
    method = Method(name="", lookahead=3.0, warm_up_lookahead=0.5, full_warm_up_rounds=4)
    assert [window.lookahead for window in windows_of(method, 2, 12)] == [0.5] * 3 + [3.0] * 3


def test_deferred_channels_may_have_a_beta1_of_their_own():
    """With nothing selected, masters of channels are AdamW's with another beta1 from the end of the warm-up on."""
    layout, method = tiny_layout(), Method(name="", topk_ratio=0.0, full_warm_up_rounds=3, deferred_beta1=0.7)
    start, lr = random_flat(layout), learning_rates(0.01, 14, warm_up=5)
    sim = Simulator(layout, start, [method], [lr], dtype=torch.float64, hyper=HYPER)
    weight, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    ours = ~sim.selected[0][layout.elements[0]]  # not those of resident parameters
    beta1, beta2 = HYPER.betas
    for call in range(1, 15):
        random_grads(layout, sim)
        grad = sim.grad[0] * min(1.0, HYPER.max_grad_norm / (sim.grad[0].norm().item() + 1e-6))
        sim.step()
        own = 0.7 if call > 3 else beta1
        exp_avg = own * exp_avg + (1 - own) * grad
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
        step = exp_avg / (1 - beta1**call) / ((exp_avg_sq / (1 - beta2**call)).sqrt() + HYPER.eps)
        weight = weight * (1 - lr[call] * HYPER.weight_decay) - lr[call] * step
        torch.testing.assert_close(sim.exact()[0][ours], weight[ours], rtol=0, atol=1e-12)


def test_synchronous_is_torch_adamw():
    layout = tiny_layout()
    start = random_flat(layout)
    lr = learning_rates(0.01, 12, warm_up=4)
    sim = Simulator(layout, start, [Method(name="synchronous", topk_ratio=1.0)], [lr], dtype=torch.float64, hyper=HYPER)
    params = [torch.nn.Parameter(view.clone()) for view in split(layout, start)]
    adamw = torch.optim.AdamW(params, betas=HYPER.betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay)
    for call in range(1, 13):
        random_grads(layout, sim)
        for param, grad in zip(params, split(layout, sim.grad[0]), strict=True):
            param.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(params, HYPER.max_grad_norm)
        adamw.param_groups[0]["lr"] = float(lr[call])
        adamw.step()
        sim.step()
        for ours, theirs in zip(split(layout, sim.weight[0]), params, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-12)
    assert sim.deferred_share.sum() == 0
    torch.testing.assert_close(sim.exact(), sim.weight)


def test_bf16_weights_are_the_rounded_masters():
    """Masters stay fp32 however coarse the weights are, and a flush shows them rounded once."""
    layout = tiny_layout()
    sim = Simulator(layout, random_flat(layout, torch.float32), METHODS[:1], [learning_rates(1e-5, 20)], hyper=HYPER)
    before = sim.states[0].master.clone()
    for _ in range(12):
        random_grads(layout, sim)
        sim.step()
    assert sim.weight.dtype == sim.states[0].ring.dtype == torch.bfloat16
    assert not torch.equal(sim.states[0].master, before)
    on = sim.selected[0][layout.elements[0]]
    assert torch.equal(sim.exact()[0][on], sim.states[0].master[on].bfloat16())


def test_triton_kernel_matches_the_torch_one():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "benchmarks.convergence.smoke", "--device", "cpu"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | dict(TRITON_INTERPRET="1"), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_probe_measures_what_the_rule_defers():
    """With the same gradients and selections, rho of the linear weights by column is the simulator's."""
    layout, method, calls = (
        tiny_layout(),
        Method(name="", topk_ratio=0.4, full_warm_up_rounds=2, select_interval=4, stagger=False),
        14,
    )
    sim = Simulator(layout, random_flat(layout), [method], [learning_rates(1e-3, calls)], dtype=torch.float64)
    probe, resident = Probe(layout, method, calls), []
    for call in range(1, calls + 1):
        random_grads(layout, sim)
        sim.step()
        probe.measure(sim.grad[0].float(), call)
        resident.append(sum(sim.squares[0, g.channels].sum() for g in layout.groups if g.shape.resident) / sim.squares.sum())
    result = probe.result()
    ours = sim.deferred_share[3:, 0] / (1 - torch.stack(resident)[2:])
    assert result["together, auto"]["rho"] == pytest.approx(ours.mean().item(), rel=1e-4)
    assert result["together, columns only"]["rho"] != pytest.approx(result["together, auto"]["rho"], rel=1e-4)
    for kind in ("wide", "tall", "embed"):
        assert 0 < result[kind]["columns"]["retention"] <= 1
        assert 0 < result[kind]["rows"]["rho"] < 1
