"""Whole runs on the tiny model: they learn, stop, resume bit for bit, and refuse bad input before writing."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import transformers
import yaml
from finetune_runs import QUICK, assert_equal_weights, metrics, resume_here, weights

import stallfree
from stallfree.cli import main
from stallfree.cli.finetune.batches import collate
from stallfree.cli.finetune.data import encode_source, read_source
from stallfree.cli.finetune.evaluation import token_losses
from stallfree.cli.finetune.models import load_model
from stallfree.cli.finetune.settings import FinetuneSettings, load_settings
from stallfree.cli.finetune.tasks import Task
from stallfree.cli.finetune.train import Training
from stallfree.cli.flags import ACTIONS, flag
from stallfree.config import FIELDS
from stallfree.convert import write_model


def test_a_run_learns_and_leaves_a_model_with_the_reported_loss(finetune, sums, tmp_path):
    code, out, _ = finetune(data=sums, steps=24, set="update_interval=2", **QUICK)  # "auto" may change S by then
    output = tmp_path / "out"
    assert code == 0
    evaluations = metrics(output, "eval")
    assert [record["step"] for record in evaluations] == [0, 6, 12, 18, 24]
    before, after = evaluations[0]["loss"], evaluations[-1]["loss"]
    assert before > 5  # a random model over 258 bytes: log 258 = 5.55
    assert after < 2.5
    assert f"held-out loss {before:.4f} -> {after:.4f}" in out

    settings = load_settings({"model": str(output), "data": str(sums)} | {name: str(value) for name, value in QUICK.items()})
    model, tokenizer = load_model(str(output), torch.float32, 0)
    held_out = encode_source(settings, read_source(settings), tokenizer).held_out
    batch = collate(held_out, tokenizer.pad_token_id)
    with torch.no_grad():
        torch.testing.assert_close(float(token_losses(model, batch)) / batch.learned, after, rtol=1e-5, atol=0)

    steps = metrics(output, "step")
    assert [record["step"] for record in steps] == list(range(1, 25))
    assert all(0 <= record["rho"] <= 1 and record["grad_norm"] > 0 for record in steps)
    assert steps[0]["lr"] == 3e-3  # the warm-up is 5% of 24 steps: one
    assert not (output / "checkpoints").exists()

    report = (output / "report.md").read_text()
    assert f"| 24 | {after:.4f} |" in report
    questions = re.findall(r"Prompt:\n\n````\n(\d)\+(\d)\n````", report)
    assert len(questions) == 3
    assert all(f"the data's own:\n\n````\n{int(a) + int(b)}\n````" in report for a, b in questions)
    assert_report_is_complete(report)
    assert report.count("rho: share of the squared gradient norm") == out.count("rho: share of the squared gradient norm") == 1
    assert (output / "loss.svg").read_text().count("<circle") == 5


def assert_report_is_complete(report):
    """Hardware, versions, memory, and every setting with the value that applied."""
    assert f"stallfree {stallfree.__version__}, transformers {transformers.__version__}, torch {torch.__version__}" in report
    host, device = map(float, re.search(r"(\S+) bytes per parameter on the host \(.*?\), (\S+) on the device", report).groups())
    assert 10 < host < 40
    assert 0 < device < 40
    run, optimizer = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", report, re.DOTALL))
    assert run["warmup"] == 1
    assert (run["steps"], run["eval_size"], run["eval_every"], run["max_grad_norm"]) == (24, 6, 6, 1.0)
    assert optimizer.keys() == set(FIELDS)
    assert "interval S 2, topk_ratio 0.1, lag 1, look-ahead 1 steps; warm-up calls: the first 4" in report


def test_the_report_says_which_S_there_were_and_for_which_there_is_room(finetune, sums, tmp_path):
    finetune(data=sums, steps=8, set="interval_schedule={0: 2, 6: 1}", **QUICK)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "interval S 2 until call 6, 1, topk_ratio" in report
    assert "Memory of the optimizer (S=1, with room for 8, topk_ratio=0.1)" in report


def test_evaluation_and_saving_do_not_change_training(finetune, sums, tmp_path):
    finetune(data=sums, steps=9, eval_every=0, output=tmp_path / "a", **QUICK)
    finetune(data=sums, steps=9, eval_every=1, save_every=2, output=tmp_path / "b", **QUICK)
    assert_equal_weights(tmp_path / "a", tmp_path / "b")
    assert metrics(tmp_path / "a", "step") == metrics(tmp_path / "b", "step")


def resume_in_new_process(output):
    code = f"import sys; from stallfree.cli import main; sys.exit(main({['finetune', '--resume', '--output', str(output)]}))"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=output)


@pytest.mark.parametrize(
    "step, number, dtype, resume",
    [(1, signal.SIGINT, "float32", resume_here), (7, signal.SIGTERM, "bfloat16", resume_in_new_process)],
)
def test_interrupted_and_resumed_equals_undisturbed(
    finetune, sums, tmp_path, stop_after, monkeypatch, step, number, dtype, resume
):
    run = {"data": sums, "steps": 11, "accumulation": 2, "eval_every": 5, "dtype": dtype} | QUICK
    whole, cut = tmp_path / "whole", tmp_path / "cut off"
    assert finetune(output=whole, **run)[0] == 0
    with monkeypatch.context():
        stop_after(step, number)
        code, out, _ = finetune(output=cut, **run)
    monkeypatch.undo()
    assert code == 128 + number
    assert f"stopped after step {step} of 11" in out
    assert f"stallfree finetune --resume --output '{cut}'" in out
    load_model(str(cut), torch.float32, 0)  # what is there so far can be used

    with (cut / "metrics.jsonl").open("a") as log:  # as after a crash that came later than the checkpoint
        log.write(json.dumps({"kind": "step", "step": step + 1}) + '\n{"kind": "st')
    resume(cut)
    assert_equal_weights(whole, cut)
    for kind in ("step", "eval"):
        assert metrics(whole, kind) == metrics(cut, kind)


def test_a_stop_during_the_first_evaluation_can_be_resumed(finetune, sums, tmp_path, monkeypatch):
    run = {"data": sums, "steps": 3} | QUICK
    finetune(output=tmp_path / "whole", **run)

    def signal_and_evaluate(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return token_losses(*args)

    monkeypatch.setattr("stallfree.cli.finetune.evaluation.token_losses", signal_and_evaluate)
    code, out, _ = finetune(output=tmp_path / "cut", **run)
    assert code == 130
    assert "stopped after step 0 of 3" in out
    monkeypatch.undo()
    assert main(["finetune", "--resume", "--output", str(tmp_path / "cut")]) == 0
    assert_equal_weights(tmp_path / "whole", tmp_path / "cut")


def test_resume_refuses_what_would_not_be_the_same_run(finetune, sums, tmp_path, stop_after):
    data = tmp_path / "data.jsonl"
    data.write_text(sums.read_text())
    stop_after(2)
    assert finetune(data=data, steps=4, **QUICK)[0] == 130
    data.write_text(sums.read_text().replace("1+1", "1+2"))
    code, _, err = finetune("--resume", data=data)
    assert code == 2
    assert "the data or the tokenizer changed since the run in" in err


@pytest.mark.parametrize("name, value", [("steps", 2), ("lr", 1e-3), ("micro_batch", 2), ("betas", [0.8, 0.9])])
def test_settings_that_were_edited_are_refused(finetune, sums, tmp_path, stop_after, monkeypatch, capfd, name, value):
    """With fewer steps than are done the run would never end."""
    stop_after(3)
    finetune(data=sums, steps=6, **QUICK)
    monkeypatch.undo()
    path = tmp_path / "out" / "settings.yaml"
    saved = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(saved | {name: value}))
    assert main(["finetune", "--resume", "--output", str(tmp_path / "out")]) == 2
    err = capfd.readouterr().err
    assert f"settings.yaml says {name}: {value}, and the run had {saved[name]}: restore it" in err
    path.write_text(yaml.safe_dump(saved | {"save_every": 1, "on_save_error": "continue"}))
    resume_here(tmp_path / "out")


def test_a_resumed_run_saves_as_it_is_told_now(finetune, sums, tmp_path, stop_after, monkeypatch):
    stop_after(3)
    assert finetune(data=sums, steps=6, **QUICK)[0] == 130
    stop_after(6)
    assert finetune("--resume", save_every=2, on_save_error="continue")[0] == 130
    saved = yaml.safe_load((tmp_path / "out" / "settings.yaml").read_text())
    assert (saved["save_every"], saved["on_save_error"], saved["steps"]) == (2, "continue", 6)
    # One after step 3, then after 4 and 6, of which two are kept.
    checkpoints = sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-00000002", "checkpoint-00000003"]


def test_a_complete_run_has_nothing_to_resume(finetune, sums):
    finetune(data=sums, steps=1, **QUICK)
    code, out, _ = finetune("--resume")
    assert code == 0, "whatever starts it until it has ended stops"
    assert "is complete: its result and report.md are there, nothing to resume" in out


def test_overwrite_keeps_what_is_not_its_own(finetune, sums, tmp_path):
    finetune(data=sums, steps=3, **QUICK)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    code, _, err = finetune(data=sums, steps=2, **QUICK)
    assert code == 2
    assert "is not empty: add --overwrite or --resume, or give another as --output" in err
    assert finetune("--overwrite", data=sums, steps=2, **QUICK)[0] == 0
    assert len(metrics(tmp_path / "out", "step")) == 2
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_presets_that_are_exact_train_alike(finetune, sums, tmp_path):
    for preset in ("zero-offload", "stronghold", "device"):
        assert finetune(data=sums, steps=4, preset=preset, max_grad_norm=0, output=tmp_path / preset, **QUICK)[0] == 0
    for name, tensor in weights(tmp_path / "zero-offload").items():
        for other in ("stronghold", "device"):
            torch.testing.assert_close(weights(tmp_path / other)[name], tensor, rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_changes_nothing_but_rounding(finetune, sums, tmp_path):
    for name, flags in (("with", ["--gradient-checkpointing"]), ("without", [])):
        assert finetune(*flags, data=sums, steps=3, output=tmp_path / name, **QUICK)[0] == 0
    for name, tensor in weights(tmp_path / "without").items():
        torch.testing.assert_close(weights(tmp_path / "with")[name], tensor, rtol=1e-4, atol=1e-6)


def test_builtin_task_is_scored_before_and_after(finetune, tmp_path):
    pytest.importorskip("reasoning_gym")
    code, out, _ = finetune(
        data="builtin:chain_sum",
        examples=40,
        steps=2,
        lr=1e-3,
        score_size=3,
        eval_size=5,
        seq_length=256,
        sample_prompt="1 + 1 =",
    )
    assert code == 0
    assert "solved: problems with the full score" in out
    evaluations = metrics(tmp_path / "out", "eval")
    assert [record["scored"] for record in (evaluations[0], evaluations[-1])] == [3, 3]
    assert "score 0.000 on 3 problems" in out
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Prompt:\n\n````\n1 + 1 =\n````" in report
    assert "the data's own" not in report


def test_samples_of_a_task_are_marked(finetune, tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    scores = {0: 1.0, 1: 0.25, 2: 0.0}
    monkeypatch.setattr(Task, "score", lambda self, index, answer: scores[index])
    code, out, _ = finetune(data="builtin:chain_sum", examples=40, steps=1, lr=1e-3, score_size=3, eval_size=5, seq_length=256)
    assert code == 0
    assert "score 0.417 -> 0.417, solved 1 -> 1 of 3" in out
    report = (tmp_path / "out" / "report.md").read_text()
    assert re.findall(r"Answer, after 1 steps \((.*)\):", report) == ["right", "wrong, score 0.25", "wrong, score 0.00"]
    assert "with partial credit. Exact matches: 1 of 3 before, 1 of 3 after." in report


@pytest.mark.parametrize(
    "options, message",
    [
        ({"data": "none.jsonl"}, "data file none.jsonl does not exist"),
        ({"model": "gpt7"}, "model 'gpt7' is neither a directory nor one of: smollm2-135m, tiny"),
        ({"data": "builtin:chain_sun"}, "reasoning-gym has no task 'chain_sun'; did you mean chain_sum"),
        ({"data": "builtin:composite"}, "task composite cannot be generated"),
        ({"data": "builtin:propositional_logic"}, "has problems without one written answer to learn from: choose another"),
        ({"eval_size": 60}, "gives 60 sequences of at most 512 tokens, of which 60 would be held out: give more data, or"),
        ({"seq_length": 8}, "no answer fits into --seq-length 8: the longest prompt has"),
        ({"steps": 3, "warmup": 5}, "warmup 5 is longer than the run of 3 steps: lower it, as in --warmup 0.05"),
        ({"preset": "zenflw"}, "optimizer settings (--preset, --set): preset 'zenflw' is unknown; there are:"),
        ({"set": "topk_ration=0.1"}, "ZenFlowConfig has no setting 'topk_ration'; did you mean topk_ratio?"),
        ({"set": "top_k=0.1"}, "--set top_k=0.1: ZenFlowConfig has no setting 'top_k'; did you mean topk_ratio?"),
        ({"set": "lr=0.1"}, "--set lr=0.1: this one is a flag of its own, --lr"),
        ({"set": "topk_ratio=2"}, "topk_ratio must be a share from 0 to 1; got 2"),
        ({"set": "preset=zenflow"}, "--set preset=zenflow: this one is a flag of its own, --preset"),
        ({"preset": "stronghold", "max_grad_norm": 1}, "max_grad_norm cannot be used with update_in_backward"),
        ({"output": __file__}, "is a file: give a directory as --output"),
        ({"lr": -1}, "--lr -1: should be greater than 0"),
        ({"data": os.devnull}, "data /dev/null is not a file"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(finetune, sums, tmp_path, options, message):
    code, _, err = finetune(**{"data": sums} | options)
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_no_command_shows_the_help(capfd):
    assert main([]) == 2
    out, err = capfd.readouterr()
    assert re.search(r"finetune +Fine-tune a causal language model", out)
    assert err == ""


def test_unknown_flag_is_one_sentence_too(finetune, sums):
    code, _, err = finetune(data=sums, learning_rate=1)
    assert code == 2
    assert err == "error: there is no flag --learning-rate; did you mean --lr?\n"
    for given, meant in (("top_k", "topk_ratio"), ("update_interval", "update_interval")):
        code, _, err = finetune(data=sums, **{given: 1})
        assert (code, err) == (2, f"error: there is no flag {flag(given)}; did you mean --set {meant}=...?\n")
    code, _, err = finetune(data=sums, micro_btch=1)
    assert (code, err) == (2, "error: there is no flag --micro-btch; did you mean --micro-batch?\n")


def test_version(capfd):
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"stallfree {stallfree.__version__}\n"


def test_help_names_every_flag_whole_at_80_columns(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["finetune", "--help"]) == 0
    out = capfd.readouterr().out
    assert [name for name in map(flag, (*FinetuneSettings.model_fields, *ACTIONS)) if f"  {name}" not in out] == []
    assert "--schedule cosine|linear|constant\n" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("options", [{"steps": 3, "warmup": 5}, {"model": "gpt7"}])
def test_what_needs_no_data_is_checked_before_it_is_read(finetune, options):
    code, out, err = finetune(**{"data": "none.jsonl"} | options)
    assert (code, out) == (2, "")
    assert "none.jsonl" not in err


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_output_may_not_be_the_model(finetune, sums, tmp_path, tiny, flags):
    write_model(*tiny, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    code, _, err = finetune(*flags, data=sums, model=tmp_path / "model", output=tmp_path / "x" / ".." / "model", steps=1)
    assert code == 2
    assert "is the directory of --model: give another" in err
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_dtype_auto_is_resolved_once(finetune, sums, tmp_path, stop_after, monkeypatch):
    choices = iter([("bfloat16", "as arranged")])
    monkeypatch.setattr("stallfree.cli.finetune.run.choose_dtype", lambda device: next(choices))
    stop_after(1)
    code, out, _ = finetune(data=sums, steps=2, dtype="auto", **QUICK)
    assert code == 130
    assert "in bfloat16 (dtype auto: as arranged)" in out
    assert yaml.safe_load((tmp_path / "out" / "settings.yaml").read_text())["dtype"] == "bfloat16"
    monkeypatch.undo()
    assert finetune("--resume", dtype="auto", device="auto")[0] == 0
    assert weights(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16


def test_too_little_memory_names_the_way_out(finetune, sums, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise MemoryError("a table")

    with monkeypatch.context() as patch:
        patch.setattr("stallfree.cli.finetune.optimizer.ZenFlowAdamW", refuse)
        code, _, err = finetune(data=sums, steps=1)
    assert (code, err) == (2, "error: a table\n")
    assert not (tmp_path / "out").exists()

    def run_out(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Training, "advance", run_out)
    code, _, err = finetune(data=sums, steps=1, micro_batch=8)
    assert code == 2
    assert "halve --micro-batch (8) and double --accumulation (1), or add --gradient-checkpointing" in err


def test_debug_shows_the_traceback(sums):
    with pytest.raises(ValueError, match="is neither a directory nor one of"):
        main(["finetune", "--debug", "--model", "gpt7", "--data", str(sums)])


def test_half_a_launcher_is_refused(finetune, sums, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = finetune(data=sums)
    assert code == 2
    assert "not: start several ranks with --nproc N, or by torchrun" in err
