"""`stallfree bench step`: what cannot be measured is said before anything is built, and a run leaves its numbers."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from stallfree import ZenFlowConfig
from stallfree.cli import main
from stallfree.cli.bench import modes, run
from stallfree.cli.bench.environment import commit_of
from stallfree.cli.bench.measure import LocalRunner
from stallfree.cli.bench.modes import PEERS, parse_mode
from stallfree.cli.bench.peers import build_peer, deepspeed_settings
from stallfree.cli.bench.settings import BenchSettings, command_line
from stallfree.cli.bench.shapes import SHAPES, build_model, model_config, random_batch
from stallfree.cli.bench.trace import HOST
from stallfree.cli.bench.worker import PeerError, RemoteRunner
from stallfree.cli.errors import UsageError
from stallfree.cli.flags import DEBUG, flag, markdown_table

settings_of = BenchSettings.model_validate

QUICK = dict(model="tiny", batch=1, seq=16, rounds=2, steps=4, warm_up=6, dtype="float32", device="cpu")


@pytest.fixture
def bench(tmp_path, capfd):
    """Run `stallfree bench step`; returns (exit code, stdout, stderr, what it wrote)."""

    def run(*words, **options):
        options = QUICK | {"output": tmp_path / "out"} | options
        flags = [text for name, value in options.items() for text in (flag(name), str(value))]
        code = main(["bench", "step", *words, *flags])
        file = tmp_path / "out" / "step.json"
        return code, *capfd.readouterr(), json.loads(file.read_text()) if file.is_file() else None

    return run


@pytest.fixture
def without_peers(monkeypatch):
    monkeypatch.setattr(modes, "find_spec", lambda name: None)


# Modes


def test_modes_are_names_with_settings():
    mode = parse_mode("stallfree:update_interval=4,topk_ratio=2e-1,stagger=false")
    assert mode.config == ZenFlowConfig(update_interval=4, topk_ratio=0.2, stagger=False)
    zenflow = parse_mode("deepspeed-zenflow:update_interval=2")
    assert zenflow.options == PEERS["deepspeed-zenflow"].options | {"update_interval": 2}
    assert parse_mode("idle-host:update_interval=8").config == ZenFlowConfig(update_interval=8)
    section = deepspeed_settings(zenflow, settings_of({}))["zero_optimization"]["zenflow"]
    assert (section["update_interval"], section["topk_ratio"]) == (2, 0.1)
    assert "zenflow" not in deepspeed_settings(parse_mode("deepspeed-zero-offload"), settings_of({}))["zero_optimization"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("stalfree", r"^mode 'stalfree': there is no 'stalfree'; did you mean stallfree\?; there are: floor, adamw, stallfree"),
        ("stallfree:4", r"^mode 'stallfree:4': write NAME:SETTING=VALUE"),
        (
            "idle-host",
            r"^mode 'idle-host': an idle host has no time to decide by; say which S, as in idle-host:update_interval=4",
        ),
        ("idle-host:update_interval=auto", r"an idle host has no time to decide by"),
        ("stallfree:", r"write NAME:SETTING=VALUE"),
        ("stallfree:update_intervall=4", r"ZenFlowConfig has no setting 'update_intervall'; did you mean 'update_interval'\?"),
        ("stallfree:topk_ratio=2", r"topk_ratio must be a share from 0 to 1; got 2"),
        ("stallfree:preset=device", r"the preset is what stands before the colon, as in device:"),
        ("adamw:lr=1", r"adamw has no setting 'lr'; it takes none"),
        ("torchao:fused=1", r"torchao has no setting 'fused'; there are: offload_gradients"),
    ],
)
def test_wrong_modes_are_refused_before_anything_is_built(bench, monkeypatch, text, message):
    monkeypatch.setattr(run, "rehearse", None)
    with pytest.raises(UsageError, match=message):
        parse_mode(text)
    code, _, err, found = bench("--modes", "floor", text)
    assert (code, found) == (2, None)
    assert err.startswith("error: mode")


def test_peers_that_are_absent(bench, without_peers):
    code, out, _, found = bench(rounds=1, steps=1)
    assert code == 0
    assert [entry["mode"] for entry in found["rows"]] == ["floor", "adamw", "stallfree", "zero-offload"]
    assert "skipped: torchao: torchao is not installed: pip install torchao" in out
    code, _, err, _ = bench("--modes", "deepspeed-zenflow")
    assert code == 2
    assert "mode deepspeed-zenflow: deepspeed is not installed: pip install deepspeed==0.19.6" in err


def test_peers_need_a_gpu(monkeypatch):
    monkeypatch.setattr(modes, "find_spec", lambda name: object())
    assert parse_mode("torchao").why_absent("cpu") == "torchao needs a GPU"
    assert parse_mode("torchao").why_absent("cuda") == ""


# Settings and models


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(batch=0), "--batch 0: should be greater than or equal to 1"),
        (dict(seq="x"), "--seq x: should be a valid integer"),
        (dict(seq=100_000), "--seq 100000: tiny takes at most 32768 tokens"),
        (dict(model="2b"), "model '2b' is neither a directory with a config.json nor one of: tiny, 0.5b, 1.5b, 3b, 7b"),
        (dict(dtype="float16"), "--dtype float16: should be 'bfloat16' or 'float32'"),
        (dict(trace="t.txt"), "--trace t.txt: should be a file whose name ends in .json"),
        (dict(batch_size=3), "there is no flag --batch-size; did you mean --batch?"),
    ],
)
def test_wrong_settings(bench, options, message):
    code, _, err, _ = bench("--modes", "adamw", **options)
    assert code == 2
    assert message in err


def test_a_gpu_that_is_not_there(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err, _ = bench(device="cuda")
    assert code == 2
    assert "--device cuda: torch sees no GPU" in err


def test_a_trace_needs_a_preset(bench, tmp_path):
    code, _, err, _ = bench("--modes", "adamw", trace=tmp_path / "t.json")
    assert code == 2
    assert "--trace records a mode of Stallfree's own" in err


def test_output_is_checked_first(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "rehearse", None)
    (tmp_path / "numbers").write_text("")
    code, _, err, _ = bench("--modes", "floor", output=tmp_path / "numbers")
    assert code == 2
    assert "is a file: give a directory" in err


@pytest.mark.parametrize("name, parameters", [("0.5b", 494.0e6), ("1.5b", 1543.7e6), ("3b", 3085.9e6), ("7b", 7615.6e6)])
def test_shapes_are_those_of_qwen(name, parameters):
    settings = settings_of({"model": name})
    model = build_model(model_config(settings), settings, "meta")
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(parameters, rel=1e-4)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_a_directory_with_a_configuration(bench, tmp_path):
    config = model_config(settings_of({"model": "tiny"}))
    config.save_pretrained(tmp_path / "model")
    code, _, _, found = bench("--gradient-checkpointing", "--modes", "floor", model=tmp_path / "model", steps=1, rounds=1)
    assert code == 0
    settings = settings_of(QUICK)
    expected = sum(param.numel() for param in build_model(config, settings, "meta").parameters())
    assert found["rows"][0]["parameters"] == expected
    (tmp_path / "model" / "config.json").write_text("{")
    code, _, err, _ = bench("--modes", "floor", model=tmp_path / "model")
    assert code == 2
    assert "the config.json in" in err
    assert "cannot be loaded" in err


def test_the_command_can_be_repeated():
    settings = settings_of({"model": "tiny", "apart": True, "modes": ["floor", "stallfree:lag=1"], "steps": "7"})
    assert command_line(settings) == "stallfree bench step --model tiny --modes floor stallfree:lag=1 --steps 7 --apart"


def test_docs_list_every_flag():
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    table = markdown_table(BenchSettings, DEBUG)
    assert table in page, f"docs/bench.md needs this table:\n{table}"
    assert all(f"`{name}`" in page for name in (*PEERS, *SHAPES))


# Whole runs


def test_a_run_in_turns(bench, tmp_path):
    code, out, _, found = bench(
        "--modes", "adamw", "stallfree:update_interval=4", "zero-offload", "device", trace=tmp_path / "trace.json"
    )
    assert code == 0
    assert out.index("round 1 of 2: zero-offload") < out.index("round 2 of 2: floor")
    names = ["floor", "adamw", "stallfree:update_interval=4", "zero-offload", "device"]
    rows = {entry["mode"]: entry for entry in found["rows"]}
    assert list(rows) == names
    floor = rows["floor"]
    assert floor["ratio"] == 1
    for entry in rows.values():
        assert (entry["steps"], len(entry["round_ms"])) == (8, 2)
        assert entry["ratio"] == pytest.approx(entry["mean_ms"] / floor["mean_ms"])
        assert entry["floor_round_ms"] == floor["round_ms"]
        assert 0 < entry["median_ms"] <= entry["p99_ms"] <= entry["max_ms"]
        assert "device_peak_GiB" not in entry
    settings = settings_of(QUICK)
    model = build_model(model_config(settings), settings, "meta")
    deferred = sum(param.numel() for param in model.parameters() if param.numel() >= 16384)
    offload, own = rows["zero-offload"], rows["stallfree:update_interval=4"]
    for way in ("down", "up"):
        assert offload[f"{way}_bytes_per_parameter"] == pytest.approx(4 * deferred / offload["parameters"], rel=0.02)
    assert own["down_bytes_per_parameter"] == pytest.approx(0.9 * offload["down_bytes_per_parameter"], rel=0.1)
    assert own["up_bytes_per_parameter"] < 0.5 * offload["up_bytes_per_parameter"]
    assert rows["device"]["down_bytes_per_parameter"] == pytest.approx(0, abs=1e-3)
    assert "stall_ms" in own
    assert "stall_ms" not in rows["adamw"]

    environment = found["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["versions"]["transformers"]
    assert environment["cores"] >= 1
    assert environment["settings"]["seq"] == 16
    assert environment["commit"] == commit_of(Path(modes.__file__))
    assert environment["command"].startswith("stallfree bench step --model tiny --batch 1 --seq 16 --modes adamw stallfree:")
    assert not found["interrupted"]

    trace = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event.get("name") == "step" and event.get("cat") == "user_annotation" for event in trace["traceEvents"]) == 5
    assert any(event["ph"] == "M" and event.get("args", {}).get("name") == HOST for event in trace["traceEvents"])


def test_the_same_bytes_go_both_ways_with_an_idle_host(bench):
    code, _, _, found = bench("--modes", "stallfree:update_interval=2", "idle-host:update_interval=2", warm_up=14)
    assert code == 0
    _, own, idle = found["rows"]
    for way in ("down", "up"):
        assert idle[f"{way}_bytes_per_parameter"] == own[f"{way}_bytes_per_parameter"] > 0


def test_apart_the_floor_is_measured_beside_each_mode(bench):
    code, out, _, found = bench("--apart", "--modes", "adamw", "device", rounds=1, steps=3)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("building")] == [
        f"building {mode}" for mode in ("floor", "adamw", "floor", "device", "floor")
    ]
    floor, adamw, device = found["rows"]
    before, between, after = floor["round_ms"]
    assert adamw["floor_round_ms"] == [before, between]
    assert device["floor_round_ms"] == [between, after]
    assert adamw["ratio"] == pytest.approx(adamw["mean_ms"] / ((before + between) / 2))


def test_modes_that_do_not_fit_at_once_are_measured_apart(bench, monkeypatch):
    monkeypatch.setattr(run, "together", lambda *_: False)
    code, out, _, _ = bench("--modes", "adamw", rounds=1, steps=1)
    assert code == 0
    assert "not all modes fit into memory at once" in out
    assert out.count("building floor") == 2


def test_a_mode_that_is_too_large_alone(bench, monkeypatch, without_peers):
    monkeypatch.setattr(run, "why_too_large", lambda need, step, room: "needs about 9 GiB" if need.host else "")
    code, _, err, _ = bench("--modes", "adamw", "stallfree")
    assert code == 2
    assert "mode stallfree needs about 9 GiB; or leave it out" in err
    code, out, _, found = bench(rounds=1, steps=1)
    assert code == 0
    assert "skipped: zero-offload needs about 9 GiB" in out
    assert [entry["mode"] for entry in found["rows"]] == ["floor", "adamw"]


def test_a_mode_that_fails_leaves_the_others(bench, monkeypatch):
    def run_out(self):
        raise MemoryError("no more")

    monkeypatch.setattr(modes.WithStallfree, "update", run_out)
    code, out, _, found = bench("--modes", "stallfree", "adamw", rounds=1, steps=1)
    assert code == 1
    assert "stallfree failed: no more" in out
    assert found["rows"][1] == {"mode": "stallfree", "error": "failed: no more"}
    assert found["rows"][2]["ratio"] > 0


def test_ctrl_c_shows_what_was_measured(bench, monkeypatch):
    measured, rounds = LocalRunner.round, []

    def round_or_interrupt(self):
        rounds.append(self.mode.text)
        if len(rounds) == 4:
            raise KeyboardInterrupt
        return measured(self)

    monkeypatch.setattr(LocalRunner, "round", round_or_interrupt)
    code, out, _, found = bench("--modes", "adamw", "stallfree", rounds=3)
    assert code == 130
    assert found["interrupted"]
    assert "interrupted; measured so far:" in out
    assert [entry["steps"] for entry in found["rows"]] == [4, 4, 4]


def test_ctrl_c_while_memory_is_given_back_loses_nothing(bench, monkeypatch):
    close, closed = LocalRunner.close, []

    def close_or_interrupt(self):
        closed.append(self.mode.text)
        if closed.count("stallfree") == 1 and closed[-1] == "stallfree":
            raise KeyboardInterrupt
        close(self)

    monkeypatch.setattr(LocalRunner, "close", close_or_interrupt)
    code, out, _, found = bench("--modes", "stallfree", rounds=1)
    assert code == 130
    assert found["interrupted"]
    assert "interrupted; measured so far:" in out
    assert [entry["steps"] for entry in found["rows"]] == [4, 4]


def test_a_warm_up_that_is_too_short_is_noted(bench):
    code, out, _, found = bench("--modes", "stallfree:full_warm_up_rounds=50", rounds=1, steps=1)
    assert code == 0
    assert "was still warming up after 6 steps: raise --warm-up" in out
    assert "warming up" in found["rows"][1]["note"]


# Its parts


def test_a_process_of_its_own_takes_turns():
    settings = settings_of(QUICK | {"modes": ["adamw"]})
    runner = RemoteRunner(parse_mode("adamw"), settings)
    try:
        assert runner.build().parameters == 361_600
        assert len(runner.round().step_ms) == 4
        process = runner.process
        process.kill()
        process.wait()
        with pytest.raises(PeerError, match=r"^adamw ended: "):
            runner.round()
    finally:
        runner.close()
    assert process.returncode is not None


def test_a_peer_takes_turns_with_the_others(bench, monkeypatch):
    peer = modes.Peer("torch", "", {}, 8)
    monkeypatch.setattr(modes.Mode, "peer", property(lambda mode: peer if mode.name == "adamw" else None))
    monkeypatch.setattr(modes.Mode, "why_absent", lambda mode, device: "")
    code, out, _, found = bench("--modes", "adamw", "device", rounds=2, steps=2, peer_steps=3)
    assert code == 0
    assert [line.split(": ")[1] for line in out.splitlines() if line.startswith("round")] == ["floor", "adamw", "device"] * 2
    assert [entry["steps"] for entry in found["rows"]] == [4, 6, 4]
    assert found["rows"][1]["ratio"] > 0


def test_torchao_trains_every_weight_with_torchs_adamw(monkeypatch):
    made = []

    class CPUOffloadOptimizer(torch.optim.Optimizer):
        def __init__(self, params, optimizer_class, offload_gradients, **options):
            made.append((optimizer_class, offload_gradients))
            super().__init__(params, {})
            self.inner = optimizer_class(self.param_groups, **options)

        def step(self):
            self.inner.step()

    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", SimpleNamespace(CPUOffloadOptimizer=CPUOffloadOptimizer))
    settings = settings_of(QUICK)
    config = model_config(settings)
    model = build_model(config, settings, "cpu")
    before = [param.detach().clone() for param in model.parameters()]
    training = build_peer(parse_mode("torchao:offload_gradients=true"), model, random_batch(config, settings), settings)
    training.step()
    assert made == [(torch.optim.AdamW, True)]
    assert not any(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_a_process_of_its_own_says_why_it_failed():
    runner = RemoteRunner(SimpleNamespace(text="nothing"), settings_of(QUICK))
    try:
        with pytest.raises(PeerError, match=r"UsageError: mode 'nothing': there is no 'nothing'"):
            runner.build()
    finally:
        runner.close()
