"""The convergence study's simulator against the executable rule, and the rest of the study on a tiny model."""

import json
import math
import os
import subprocess
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

from benchmarks.convergence import study  # noqa: E402
from benchmarks.convergence.layout import Layout, Shape  # noqa: E402
from benchmarks.convergence.llama import BatchedLlama, Llama, flatten, random_weights  # noqa: E402
from benchmarks.convergence.plan import GROUPS, MODERATE, START, Run, batch_of, missing  # noqa: E402
from benchmarks.convergence.plan import METHODS as METHODS_STUDIED  # noqa: E402
from benchmarks.convergence.pretrained import dequantize  # noqa: E402
from benchmarks.convergence.probe import Probe  # noqa: E402
from benchmarks.convergence.report import report  # noqa: E402
from benchmarks.convergence.rule import Method, learning_rates, windows_of  # noqa: E402
from benchmarks.convergence.simulator import Simulator  # noqa: E402
from benchmarks.convergence.tasks import Task  # noqa: E402
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


TINY = Llama(vocab=61, hidden=24, layers=2, heads=4, kv_heads=2, ffn=40)


def tiny_task(count=40, held_out=16, length=9):
    """A language with a rule: each token is the one before plus one."""
    first = torch.arange(count)[:, None] * 7 % 50
    data = dict(tokens=(first + torch.arange(length)).int(), starts=torch.full((count,), 4), ends=torch.full((count,), 7))
    data["ends"][::3] = 6
    return Task(data | dict(held_out=torch.tensor(held_out)), "cpu")


def tiny_start():
    layout = TINY.layout(tile=64)
    weights = {name: w * 5 if w.std() > 0 else w for name, w in random_weights(TINY, torch.Generator().manual_seed(1)).items()}
    return layout, weights, flatten(weights, layout)


def test_llama_gives_the_logits_of_transformers():
    transformers = pytest.importorskip("transformers")
    layout, weights, flat = tiny_start()
    config = transformers.LlamaConfig(
        vocab_size=TINY.vocab, hidden_size=TINY.hidden, num_hidden_layers=TINY.layers, num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads, intermediate_size=TINY.ffn, tie_word_embeddings=True, rms_norm_eps=TINY.eps,
        rope_parameters=dict(rope_type="default", rope_theta=TINY.theta),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    names = dict(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj", gate="mlp.gate_proj",
                 up="mlp.up_proj", down="mlp.down_proj",
                 input_norm="input_layernorm", post_norm="post_attention_layernorm")  # fmt: skip
    state = {
        "model.embed_tokens.weight": weights["embed"],
        "model.norm.weight": weights["norm"][0],
        "lm_head.weight": weights["embed"],
    }
    for name, weight in weights.items():
        kind, _, layer = name.partition(".")
        if layer:
            state[f"model.layers.{layer}.{names[kind]}.weight"] = weight[0] if "norm" in kind else weight
    model.load_state_dict(state)
    tokens = torch.randint(0, TINY.vocab, (3, 7))
    ours = BatchedLlama(TINY, layout, flat[None]).logits(tokens[None], torch.arange(7).expand(1, 3, 7))[0]
    torch.testing.assert_close(ours, model(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)


def trained(names, monkeypatch, steps=12, **overrides):
    methods = {name: replace(METHODS_STUDIED[name], full_warm_up_rounds=3, select_interval=4, **overrides) for name in names}
    monkeypatch.setattr(study, "METHODS", METHODS_STUDIED | methods)
    layout, _, flat = tiny_start()
    runs = [Run("tiny", name, 1e-2, seed, steps) for seed, name in enumerate(names)]
    return study.train(runs, tiny_task(), TINY, layout, flat, batch=4, backend="torch", dtype=torch.float32, chunk=5)


def test_runs_side_by_side_do_not_touch_each_other(monkeypatch):
    names = ["replay S=4", "synchronous AdamW", "zenflow S=4"]
    together = trained(names, monkeypatch)
    alone = trained(names[:1], monkeypatch)
    assert together[0]["held_out"] == pytest.approx(alone[0]["held_out"], rel=1e-4)
    assert len({record["held_out"][-1] for record in together}) == 3
    for record in together:
        assert record["held_out"][-1] < record["held_out"][0]
        json.dumps(record)


def test_synchronous_training_is_plain_training(monkeypatch):
    """The whole loop against autograd, clip_grad_norm_ and torch.optim.AdamW on one model."""
    (record,) = trained(["synchronous AdamW"], monkeypatch)
    layout, _, flat = tiny_start()
    model, task, hyper = BatchedLlama(TINY, layout, flat[None].clone()), tiny_task(), Hyper()
    params = [p for stack in model.params.values() for p in stack]
    adamw = torch.optim.AdamW(params, betas=hyper.betas, eps=hyper.eps, weight_decay=hyper.weight_decay)
    lr, order = learning_rates(1e-2, 12, 6), task.order(0, 12, 4)
    for call in range(1, 13):
        model.loss(*(tensor[None] for tensor in task.batch(order[call - 1]))).sum().backward()
        torch.nn.utils.clip_grad_norm_(params, hyper.max_grad_norm)
        adamw.param_groups[0]["lr"] = float(lr[call])
        adamw.step()
        adamw.zero_grad()
    tokens, positions, labels = task.batch(torch.arange(task.held_out))
    with torch.no_grad():
        logits = model.logits(tokens[None], positions[None])[0]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert record["held_out"][-1] == pytest.approx(loss.item(), rel=1e-4)


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


def test_blocks_of_quantized_weights_are_read_as_gguf_reads_them():
    gguf = pytest.importorskip("gguf")
    weights = torch.randn(4, 96).numpy()
    for kind in ("Q4_1", "Q8_0"):
        raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
        expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
        torch.testing.assert_close(dequantize(torch.from_numpy(raw), kind), expected)
    with pytest.raises(ValueError, match="Q6_K"):
        dequantize(torch.zeros(1, 34, dtype=torch.uint8), "Q6_K")


def play(best, tasks=("a",), methods=tuple(METHODS_STUDIED)[:2]):
    """Run the plan to its end on a made-up loss with its minimum at `best`; returns the runs in order."""
    results, made = {}, []
    while todo := missing(results, tasks, methods):
        for run in batch_of(todo, 3):
            assert run not in results
            results[run] = abs(math.log(run.lr / best)) + run.seed
            made.append(run)
    return made


def test_plan_brackets_the_best_rate_and_then_repeats_it():
    made = play(best=2e-4)
    assert len(made) == len(set(made))
    firsts = [run for run in made if run.seed == 0]
    assert {run.lr for run in firsts} == set(START) == {run.lr for run in made[: len(firsts)]}
    for method in tuple(METHODS_STUDIED)[:2]:
        repeated = {run.lr for run in made if run.seed == 2 and run.method == method}
        assert repeated == {MODERATE, 1e-4, 2e-4, 4e-4}


def test_plan_goes_beyond_the_grid_it_started_with():
    rates = {run.lr for run in play(best=2e-3) if run.seed == 0}
    assert rates == {*START, 2e-3, 4e-3}


def test_groups_with_a_list_of_runs_go_in_order_of_importance():
    todo = missing({}, ["a", "b"], METHODS_STUDIED, groups=("refine", "long"))
    stages = list(dict.fromkeys((run.steps, run.seed, run.task) for run in todo))
    assert stages == [(300, 0, "a"), (300, 0, "b"), (1200, 0, "a"), (1200, 0, "b"), (300, 1, "a"), (300, 1, "b")]
    assert len(todo) == len(set(todo)) == 2 * (2 * 3 * len(GROUPS["refine"]) + 4 * len(GROUPS["long"]))
    done = dict.fromkeys(batch_of(todo, 1000), 1.0)
    assert {(run.task, run.steps) for run in done} == {("a", 300)}
    assert missing(done, ["a", "b"], METHODS_STUDIED, groups=("refine",)) == [
        run for run in todo if run.steps == 300 and run.task == "b"
    ]
    assert {run.steps for run in missing({}, ["a"], ["replay S=4"], 24, ("default", "long"))} == {24, 96}


def test_report_compares_seed_by_seed(tmp_path):
    file = tmp_path / "results.jsonl"
    common = dict(kind="run", task="sum", steps=3, batch=4, untrained=2.0, device="none", torch="0", date="today", rho=0.1)
    records = []
    for seed, base in enumerate((1.0, 1.2, 1.1)):
        for lr, extra in ((MODERATE, 0.3), (1e-4, 0.0), (2e-4, None if seed == 0 else 0.05)):
            for method, above in (("synchronous AdamW", 0.0), ("replay S=4", 0.01)):
                loss = None if extra is None else base + extra + above
                record = dict(method=method, lr=lr, seed=seed, held_out=[1.5, loss], exact_match=[0.1, 0.5], train_last_50=loss)
                records.append(common | record)
    axis = dict(rho=0.25, retention=0.5)
    records.append(
        common | dict(kind="probe", table=dict(q=dict(share=0.5, columns=axis, rows=axis), together=dict(rho=0.125)))
    )
    longer = dict(method="synchronous AdamW", lr=5e-5, seed=0, held_out=[0.5], exact_match=[0.9], train_last_50=0.5)
    records.append(common | longer | dict(steps=12))
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = report([file])
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## sum, 3 steps", "## sum, 12 steps"]
    assert "| synchronous AdamW | 5e-05 (edge) | 1 | 0.5000 | +0.0000 |" in text
    row = next(line for line in text.splitlines() if line.startswith("| replay S=4 |"))
    assert "| 0.0001 | 3 | 1.1100 ± 0.1000 | +0.0100 ± 0.0000 | 0.500 | 1.4100 ± 0.1000 | +0.0100 ± 0.0000 |" in row
    assert "inf (diverged)" in text
    assert "| q | 0.500 | 0.250 | 0.500 | 0.250 | 0.500 |" in text


def test_study_runs_to_its_end_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "SMOLLM2", TINY)
    _, weights, _ = tiny_start()
    raw = {name: (weight.view(torch.uint8), "F32") for name, weight in weights.items()}
    parts = [tmp_path / "part1.pt", tmp_path / "part2.pt"]
    data = dict(tokens=torch.randint(0, TINY.vocab, (40, 9)).int(), starts=torch.full((40,), 4), ends=torch.full((40,), 7))
    torch.save(dict(weights=dict(list(raw.items())[:7])), parts[0])
    torch.save(dict(weights=dict(list(raw.items())[7:]), tasks=dict(tiny=data | dict(held_out=torch.tensor(8)))), parts[1])
    out = tmp_path / "results.jsonl"
    common = ["--out", str(out), "--device", "cpu", "--backend", "torch", "--steps", "24", "--batch", "2", "--concurrency", "4"]
    common += ["--parts", *map(str, parts), "--methods", "synchronous AdamW", "replay S=4"]
    study.main([*common, "--time-limit", "0"])
    assert not out.exists()
    study.main(common)
    assert "0 are known to be left" in capsys.readouterr().out
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [run["task"] for run in runs if run["kind"] == "probe"] == ["tiny"]
    assert {run["seed"] for run in runs if run["kind"] == "run"} == {0, 1, 2}
    study.main(common)
    assert len(out.read_text().splitlines()) == len(runs)
    capsys.readouterr()
    study.main([*common, "--group", "long"])
    assert "8 runs known to be left, about 4 s" in capsys.readouterr().out
    longer = [json.loads(line) for line in out.read_text().splitlines()][len(runs) :]
    assert [(run["kind"], run["steps"]) for run in longer].count(("run", 96)) == 8
    assert "| replay S=4 |" in report([out])
