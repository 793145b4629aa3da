"""What a model will need: the planner's numbers, for the shards of as many GPUs, judged by what there is."""

import json
import re
from pathlib import Path

import pytest
import torch

from stallfree import ZenFlowConfig, channel_dims, planner
from stallfree.cli import main
from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.bench.shapes import build_model, model_config
from stallfree.cli.flags import DEBUG, markdown_table
from stallfree.cli.plan import DEFAULT, Need, PlanSettings, work_out
from stallfree.limits import GIB

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
LARGE = 1 << 50  # bytes


@pytest.fixture
def plan(capfd):
    """Run `stallfree plan`; returns (exit code, lines, stderr)."""

    def run(*arguments):
        code = main(["plan", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, [line.rstrip() for line in out.splitlines()], err

    return run


def test_the_numbers_are_the_planner_s():
    settings = PlanSettings.model_validate({"model": "1.5b", "modes": ["stallfree:update_interval=4"]})
    numel, needs = work_out(settings, LARGE)
    shape = BenchSettings.model_validate({"model": "1.5b"})
    model = build_model(model_config(shape), shape, "meta")
    config = ZenFlowConfig(update_interval=4, channel_dim=channel_dims(model))
    need = needs["stallfree:update_interval=4"]
    assert need.plan == planner.plan(list(model.named_parameters()), config, "cuda")
    assert (numel, need.weights) == (1_543_714_304, 2 * 1_543_714_304)
    assert need.plan.down == pytest.approx(1.8 * numel, rel=0.01), "2 (1 - k) bytes per parameter"
    selected = 2 * 0.1 * numel
    assert need.plan.device_gradients == pytest.approx(2 * 151936 * 1536 + selected, rel=0.01), "the embedding's, and these"
    assert need.plan.device_state == pytest.approx(1.2 * numel, rel=0.01)
    assert need.gpu == need.weights + need.plan.device + need.plan.device_gradients, "nothing is gathered"


def test_a_rank_of_several_needs_its_shards():
    """The first one's, which are the largest; of the host's memory all ranks need a share."""
    alone, shared = (
        work_out(PlanSettings.model_validate({"model": "0.5b", "gpus": gpus, "modes": ["stallfree:update_interval=4"]}), LARGE)
        for gpus in (1, 3)
    )
    assert alone[0] == shared[0]
    shape = BenchSettings.model_validate({"model": "0.5b"})
    shapes = [param.shape for param in build_model(model_config(shape), shape, "meta").parameters()]
    need = shared[1]["stallfree:update_interval=4"]
    assert need.weights == sum(2 * -(-shape[0] // 3) * shape[1:].numel() for shape in shapes)
    whole = alone[1]["stallfree:update_interval=4"]
    assert need.host == 3 * need.plan.host
    assert need.plan.host_state == pytest.approx(whole.plan.host_state / 3, rel=0.01)
    assert need.plan.device_state > 1.1 * whole.plan.device_state / 3, "a rank holds more of a table's rows than its share"
    assert whole.gathered == 0
    assert need.gathered == 2 * 2 * (151936 * 896 + 896), "table and norm, which are more than four layers, with gradients"
    assert need.gpu == need.weights + need.plan.device + need.plan.device_gradients + need.gathered
    assert not torch.distributed.is_initialized()


def test_room_is_what_the_host_given_has():
    """With update_interval="auto" the largest S is one that fits."""
    rooms = []
    for host in (LARGE, 11 * GIB, 1 * GIB):
        _, needs = work_out(PlanSettings.model_validate({"model": "0.5b", "modes": ["stallfree"]}), host)
        rooms.append(needs["stallfree"].plan.config.max_update_interval)
    assert rooms == [8, 4, 2]


@pytest.mark.parametrize(
    ("gpu", "host", "said"),
    [
        (None, 2048, "fits: GPU unknown, host 1.00"),
        (1002, 2048, "fits: GPU 0.50 left, host 1.00"),
        (490, 1138, "fits: GPU 0.00 left, host 0.11"),
        (490, 1137, "tight: GPU 0.00 left, host 0.11"),
        (490, 1024, "tight: GPU 0.00 left, host 0.00"),
        (398, 2048, "no: GPU 0.09 short"),
        (1000, 901, "no: host 0.12 short"),
        (398, 901, "no: GPU 0.09 short, host 0.12 short"),
        (None, 901, "no: host 0.12 short"),
    ],
)
def test_the_verdict_names_what_is_short_and_what_is_left(gpu, host, said):
    """Tight: less than a tenth of the host's memory is left."""
    parts = dict(host_state=400 << 20, host_slots=112 << 20, device_state=140 << 20, device_staging=50 << 20)
    needed = planner.Plan([], ZenFlowConfig(), **parts, device_gradients=90 << 20, down=0)
    need = Need(200 << 20, 10 << 20, needed, 2)
    assert (need.gpu, need.host) == (490 << 20, 1024 << 20)
    assert need.verdict(None if gpu is None else gpu << 20, host << 20) == said


def test_a_line_for_each_mode(plan):
    code, lines, _ = plan("--model", "7b", "--gpu-memory", 80, "--host-memory", 200)
    assert code == 0
    assert lines[0] == "7b: 7.616 billion parameters in bfloat16. GiB; bus: in a step"
    rows = {
        text: next(line for line in lines if line.startswith(text.replace(":", ": ").replace(",", ", ") + " "))
        for text in DEFAULT
    }
    assert rows["device"].endswith("no: GPU 47.7 short")
    assert "  1.60-6.38  fits: GPU 54.0 left, host 40.0" in rows["stallfree"], "auto: from the largest S to the first"
    assert rows["stallfree:update_interval=4,moments_dtype=bfloat16"].split()[3:6] == ["14.2", "8.52", "0.88"]
    assert rows["stallfree:update_interval=4"].endswith("12.8       3.19  fits: GPU 54.0 left, host 72.2")
    for line in PAGE.read_text(encoding="utf-8").split("```")[3].splitlines()[2:]:
        assert line in lines, "docs/plan.md shows what the command prints"


@pytest.mark.parametrize("modes, expected", [(["device"], 1), (["device", "stallfree"], 0)])
def test_the_exit_code_says_whether_any_mode_fits(plan, modes, expected):
    code, lines, _ = plan("--model", "7b", "--gpu-memory", 80, "--host-memory", 200, "--modes", *modes)
    assert code == expected
    assert any("no: GPU 47.7 short" in line for line in lines)


def test_a_narrow_terminal_shows_the_sums(plan, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    _, lines, _ = plan("--model", "7b", "--gpu-memory", 80, "--host-memory", 200, "zero-offload")
    rows = [re.sub("\x1b.*?m", "", line) for line in lines]
    assert all(len(row) <= 80 for row in rows[2:5])
    assert rows[4].split() == ["zero-offload", "16.1", "99.3", "fits:", "GPU", "63.9", "left,", "host", "100.7"]


def test_modes_are_words_behind_the_flag(plan):
    code, lines, _ = plan("--model", "tiny", "--gpus", 2, "--modes", "zero-offload", "stallfree:topk_ratio=0.2")
    assert code == 0
    assert "on each of 2 GPUs; on the host for all of them" in lines[0]
    assert [line.split("  ")[0] for line in lines[4:6]] == ["zero-offload", "stallfree: topk_ratio=0.2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nope"], "model 'nope' is neither a directory with a config.json nor one of"),
        (["--model", "some/model"], "(hf download some/model config.json --local-dir DIR"),
        (["--modes", "adamw"], "mode 'adamw': there is no preset 'adamw'; presets are planned: stallfree, zenflow"),
        (["--modes", "stalfree"], "mode 'stalfree': there is no preset 'stalfree'; did you mean stallfree"),
        (["7b"], "'7b' is a model: write --model 7b"),
        (["--gpu-memory", "inf"], "--gpu-memory inf: should be a finite number"),
        (["--modes", "stallfree:topk=0.2"], "topk_ratio"),
        (["--gpus", "0"], "--gpus 0: should be greater than or equal to 1"),
        (["--gpu-memory", "-1"], "--gpu-memory -1: should be greater than 0"),
        (["--gpu-mem", "80"], "there is no flag --gpu-mem; did you mean --gpu-memory"),
        (["--zzz"], "there is no flag --zzz; see stallfree plan --help"),
    ],
)
def test_mistakes_are_named(plan, arguments, message):
    code, _, err = plan(*arguments)
    assert code == 2
    assert message in err


def test_the_page_lists_every_flag():
    assert markdown_table(PlanSettings, DEBUG) in PAGE.read_text(encoding="utf-8")


def test_ranks_of_a_launcher_do_not_share_what_is_planned(plan, monkeypatch):
    """The host's memory is all ranks', whoever asks."""
    _, alone, _ = plan("--model", "0.5b", "--gpus", 2, "stallfree")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    _, among, _ = plan("--model", "0.5b", "--gpus", 2, "stallfree")
    host = [float(re.search(r", (\S+) on the host", lines[-1])[1]) for lines in (alone, among)]
    assert host[0] == pytest.approx(host[1], rel=0.2)


def test_a_stack_of_experts_has_no_channels_of_a_few_elements(tmp_path, plan):
    config = dict(model_type="mixtral", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_local_experts=8)
    config |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=1000, architectures=["MixtralForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (tmp_path, tmp_path / "config.json"):
        settings = PlanSettings.model_validate({"model": str(model), "modes": ["stallfree:update_interval=4", "zero-offload"]})
        numel, needs = work_out(settings, LARGE)
        assert needs["stallfree:update_interval=4"].plan.device_state == pytest.approx(1.2 * numel, rel=0.05)
        assert needs["zero-offload"].plan.device_state < 0.1 * numel
    _, shards = work_out(settings.model_copy(update={"gpus": 4}), LARGE)
    whole, part = (found["stallfree:update_interval=4"].plan.device_state for found in (needs, shards))
    assert part == pytest.approx(whole / 4, rel=0.15), "as many rows of the experts that a rank has; of the tables twice"


def test_code_in_a_model_directory_is_never_run(tmp_path, plan, monkeypatch):
    auto = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    code, _, err = plan("--model", tmp_path)
    assert code == 2
    assert "has code of its own, which is never run" in err
    assert not (tmp_path / "ran").exists()
