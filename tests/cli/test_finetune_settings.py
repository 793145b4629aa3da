"""Flags, the YAML file and the docs say the same."""

from pathlib import Path

import pytest

from stallfree.cli.errors import UsageError, did_you_mean
from stallfree.cli.finetune import machine
from stallfree.cli.finetune.optimizer import warmup_steps
from stallfree.cli.finetune.settings import FREE, FinetuneSettings, load_settings, save_settings
from stallfree.cli.flags import ACTIONS, flag, markdown_table

NEEDED = {"model": "tiny", "data": "x.txt"}


def test_flags_win_over_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 2e-4\nmicro-batch: 7\nbetas: [0.8, 0.9]\nset: {topk_ratio: 0.3, lookahead: 1e-1}\n")
    settings = load_settings(NEEDED | {"config": str(file), "lr": "5e-4", "set": ["topk_ratio=0.2", "lag=2"]})
    assert (settings.lr, settings.micro_batch, settings.betas) == (5e-4, 7, (0.8, 0.9))
    assert settings.set == {"topk_ratio": 0.2, "lookahead": 0.1, "lag": 2}


def test_a_flag_that_is_wrong_is_named_although_a_file_is_read(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-4\nset: {lag: 1}\n")
    with pytest.raises(UsageError, match=r"^--lr -1: should be"):
        load_settings(NEEDED | {"config": str(file), "lr": "-1"})
    with pytest.raises(UsageError, match=r"^optimizer settings \(--preset, --set\): topk_ratio must be"):
        load_settings(NEEDED | {"config": str(file), "set": ["topk_ratio=2"]})


def test_either_flag_of_length_replaces_the_file_s(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 60\n")
    settings = load_settings(NEEDED | {"config": str(file), "epochs": "2"})
    assert (settings.steps, settings.epochs) == (None, 2)


@pytest.mark.parametrize(
    "name, known",
    [
        ("learning_rate", "lr"),
        ("batch_size", "micro_batch"),
        ("gradient_accumulation_steps", "accumulation"),
        ("num_train_epochs", "epochs"),
        ("max_steps", "steps"),
        ("warmup_steps", "warmup"),
        ("warmup_ratio", "warmup"),
        ("output_dir", "output"),
    ],
)
def test_names_of_other_tools_are_known(name, known):
    assert did_you_mean(name, FinetuneSettings.model_fields) == f"; did you mean {known}?"
    assert did_you_mean(flag(name), map(flag, FinetuneSettings.model_fields)) == f"; did you mean {flag(known)}?"


@pytest.mark.parametrize(
    "flags, dtype",
    [
        ("sse avx512f avx512_bf16", "bfloat16"),
        ("amx_bf16 amx_tile", "bfloat16"),
        ("avx2 avx512f", "float32"),
        (None, "float32"),
    ],
)
def test_dtype_auto_follows_the_cpu(tmp_path, monkeypatch, flags, dtype):
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n")
    monkeypatch.setattr(machine, "CPU_INFO", info)
    assert machine.choose_dtype("cpu")[0] == dtype


def test_the_demo_can_be_shortened():
    demo = Path(__file__).parents[2] / "examples" / "demo.yaml"
    for given, steps, warmup in (({}, 60, 8), ({"steps": "6"}, 6, 1)):
        settings = load_settings({"config": str(demo)} | given)
        assert (settings.steps, warmup_steps(settings, steps), settings.dtype) == (steps, warmup, "auto")


def test_values_from_flags_have_types():
    settings = load_settings(
        NEEDED | {"betas": "0.9,0.95", "steps": "12", "set": ["update_interval=auto", "stagger=false", "score_decay=9e-1"]}
    )
    assert (settings.betas, settings.steps) == ((0.9, 0.95), 12)
    assert settings.set == {"update_interval": "auto", "stagger": False, "score_decay": 0.9}


@pytest.mark.parametrize(
    "given, message",
    [
        ({"lr": "0"}, "--lr 0: should be greater than 0"),
        ({"lr": "nan"}, "--lr nan: should be a finite number"),
        ({"lr": "fast"}, "--lr fast: should be a valid number, unable to parse string as a number"),
        ({"steps": "0"}, "--steps 0: should be greater than or equal to 1"),
        ({"steps": "2.5"}, "--steps 2.5: should be a valid integer, unable to parse string as an integer"),
        ({"steps": "5", "epochs": "1"}, "--steps and --epochs both say how long to train: give one of them"),
        ({"seq_length": "4"}, "--seq-length 4: should be greater than or equal to 8"),
        ({"betas": "0.9,1"}, "--betas 0.9,1: both must be at least 0 and less than 1"),
        ({"schedule": "cosin"}, "--schedule cosin: should be 'cosine', 'linear' or 'constant'"),
        ({"set": ["topk_ratio"]}, "--set topk_ratio: write NAME=VALUE, as in --set topk_ratio=0.2"),
    ],
)
def test_impossible_settings(given, message):
    with pytest.raises(UsageError) as error:
        load_settings(NEEDED | given)
    assert str(error.value) == message


def test_missing_setting_says_what_it_takes():
    with pytest.raises(UsageError, match=r"^--data is missing: Text file, JSONL file, or `builtin:TASK`"):
        load_settings({"model": "tiny"})


@pytest.mark.parametrize(
    "text, message",
    [
        ("mcro_batch: 4", r"there is no setting 'mcro_batch'; did you mean micro_batch\?"),
        ("qqqq: 4", r"there is no setting 'qqqq'; see stallfree finetune --help"),
        ("resume: true", r"resume belongs on the command line, as --resume"),
        ("- lr", r"holds no settings: write lines like 'lr: 2e-5' or 'set: \{topk_ratio: 0.2\}'"),
        ("lr: [", r"is not YAML: while parsing"),
        ("lr: -1", r"^\S+run\.yaml: lr -1: should be greater than 0$"),
        ("learning_rate: 1", r"there is no setting 'learning_rate'; did you mean lr\?"),
        ("batch-size: 1", r"there is no setting 'batch_size'; did you mean micro_batch\?"),
        ("set: {top_k: 0.1}", r"run\.yaml: top_k: 0.1 in set: ZenFlowConfig has no setting 'top_k'; did you mean topk_ratio\?"),
        ("set: {lr: 0.1}", r"run\.yaml: lr: 0.1 in set: this one is a flag of its own, --lr"),
        ("set: {topk_ratio: 2}", r"optimizer settings \(\S+run\.yaml: preset, set\): topk_ratio must be a share from 0 to 1"),
        ("set: 3", r"holds no settings"),
    ],
)
def test_wrong_yaml(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_settings(NEEDED | {"config": str(file)})


def test_saved_settings_are_those_of_the_resumed_run(tmp_path):
    settings = load_settings(NEEDED | {"lr": "3e-4", "betas": "0.8,0.9", "set": ["topk_ratio=0.2"], "output": str(tmp_path)})
    save_settings(settings, tmp_path)
    assert load_settings({"output": str(tmp_path)}, resume=True) == settings
    assert load_settings({"output": str(tmp_path), "lr": "0.0003", "set": ["topk_ratio=0.2"]}, resume=True) == settings
    with pytest.raises(UsageError, match=r"^--lr was 0.0003 in the run in .*, not 0.1: leave it out, or start anew"):
        load_settings({"output": str(tmp_path), "lr": "0.1"}, resume=True)


def test_a_resumed_run_may_write_otherwise_and_remembers_it(tmp_path):
    settings = load_settings(NEEDED | {"save_every": "5", "output": str(tmp_path)})
    save_settings(settings, tmp_path)
    given = {"output": str(tmp_path), "save_every": "7", "on_save_error": "continue", "log_every": "3"}
    resumed = load_settings(given, resume=True)
    assert resumed == settings.model_copy(update={"save_every": 7, "on_save_error": "continue", "log_every": 3})
    save_settings(resumed, tmp_path)
    assert load_settings({"output": str(tmp_path)}, resume=True) == resumed
    assert [path.name for path in tmp_path.iterdir()] == ["settings.yaml"]


@pytest.mark.parametrize("name", sorted(FinetuneSettings.model_fields.keys() - FREE - {"output", "nproc"}))
def test_what_decides_a_run_stays_as_it_was(tmp_path, name):
    other = {"set": ["lag=2"], "betas": "0.8,0.9", "gradient_checkpointing": True, "sample_prompt": "?", "model": "other"}
    other |= {"data": "y.txt", "schedule": "linear", "dtype": "float32", "device": "cpu", "preset": "zero-offload"}
    save_settings(load_settings(NEEDED | {"output": str(tmp_path)}), tmp_path)
    with pytest.raises(UsageError, match=rf"^{flag(name)} was .*: leave it out, or start anew with --overwrite"):
        load_settings({"output": str(tmp_path), name: other.get(name, "9")}, resume=True)


def test_docs_list_every_flag():
    page = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    table = markdown_table(FinetuneSettings)
    assert all(f"| `{flag(name)}` |" in table for name in (*FinetuneSettings.model_fields, *ACTIONS))
    assert table in page, f"docs/finetune.md needs this table:\n{table}"
