"""`stallfree finetune` on two ranks: the loss curve of one process, one voice, one end, and checkpoints that any number resumes."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stallfree.cli import main
from stallfree.cli.finetune.launch import PROGRAM, launch
from stallfree.cli.finetune.settings import FinetuneSettings
from stallfree.cli.finetune.ranks import Ranks
from stallfree.cli.finetune.run import _choose_device

UNTIMED = {"seconds", "stall_ms", "restages", "bytes_up", "bytes_down"}
SYNCHRONOUS = {"preset": "zero-offload", "steps": 8, "eval_every": 3}  # flushing, as every save does, changes nothing
AT_A_STEP = """
import os, signal, sys, time, warnings
from stallfree.cli.errors import UsageError
from stallfree.cli.finetune.train import Training

def patched(self, advance=Training.advance):
    if self.ranks.rank == 1 and self.step == {step}:
        {what}
    return advance(self)

Training.advance = patched
"""


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """60 conversations about sums of two digits."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    turns = [(f"{a}+{b}", str(a + b)) for a in range(10) for b in range(6)]
    chats = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in turns]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def command(output, data, *flags, **options):
    chosen = {"model": "tiny", "dtype": "float32", "lr": 3e-3, "micro_batch": 2, "seq_length": 48, "eval_size": 5}
    chosen |= {"device": "cpu", "data": data, "output": output} | options
    return ["finetune", *flags, *(text for name, value in chosen.items() for text in ("--" + name.replace("_", "-"), str(value)))]


def on_two_ranks(arguments, what="pass", step=-1):
    """`what` is done by rank 1 before a step."""
    return launch(2, [*arguments, "--nproc", "2"], AT_A_STEP.format(what=what, step=step) + PROGRAM)


@pytest.fixture(scope="module")
def one(tmp_path_factory, sums):
    """What one process comes to, with the batch of two."""
    output = tmp_path_factory.mktemp("one") / "out"
    assert main(command(output, sums, accumulation=2, **SYNCHRONOUS)) == 0
    return output


def records(output, kind):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNTIMED} for line in lines if line["kind"] == kind]


def assert_near(first, second):
    for kind in ("step", "eval"):
        theirs = records(second, kind)
        for a, b in zip(records(first, kind), theirs, strict=True):
            assert (a["step"], a.get("tokens")) == (b["step"], b.get("tokens"))
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    ours, theirs = (load_file(output / "model.safetensors") for output in (first, second))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-4)


def test_two_ranks_follow_the_curve_of_one_process_and_only_one_speaks(one, sums, tmp_path, capfd):
    assert on_two_ranks(command(tmp_path / "two", sums, **SYNCHRONOUS), "warnings.warn('of rank 1'); print('so')", 2) == 0
    out, err = capfd.readouterr()
    assert_near(tmp_path / "two", one)
    assert err == ""
    assert "2 ranks, 8 steps of 4 sequences" in out
    assert "so\n" not in out
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(lines) == len(set(lines)) == 8 + 4  # steps, evaluations
    assert re.search(r"of rank 0 of 2 ranks\): 1\d\.\d bytes per parameter on the host", (tmp_path / "two" / "report.md").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "two" / "checkpoints").exists()


def test_the_default_rule_is_the_same_on_two_ranks_and_answers_are_scored(sums, tmp_path):
    """Selections of columns are made over all ranks; of rows (the embedding) rank by rank, so columns it is here."""
    pytest.importorskip("reasoning_gym")
    options = {"data": "builtin:chain_sum", "examples": 40, "steps": 8, "seq_length": 128, "score_size": 3, "eval_every": 0}
    options |= {"set": "update_interval=2"}
    arguments = ["--set", "channel_dim=1"]
    assert main([*command(tmp_path / "one", accumulation=2, **options), *arguments]) == 0
    assert on_two_ranks([*command(tmp_path / "two", **options), *arguments]) == 0
    assert_near(tmp_path / "two", tmp_path / "one")
    assert [record["scored"] for record in records(tmp_path / "two", "eval")] == [3, 3]


def test_a_stop_on_one_rank_stops_all_and_one_rank_can_go_on(one, sums, tmp_path, capfd):
    output = tmp_path / "cut"
    assert on_two_ranks(command(output, sums, **SYNCHRONOUS), "os.kill(os.getpid(), signal.SIGTERM)", 4) == 143
    out, err = capfd.readouterr()
    assert out.count("stopped after step 5 of 8") == 1
    assert err == ""
    AutoModelForCausalLM.from_pretrained(output)  # what is there so far can be used

    assert launch(3, ["finetune", "--resume", "--output", str(output), "--nproc", "3"]) == 2
    assert "3 ranks cannot share the 4 sequences of this run's steps: go on with --nproc 1 or 2 or 4" in capfd.readouterr().err
    assert main(["finetune", "--resume", "--output", str(output), "--nproc", "1"]) == 0
    assert "1 ranks, 8 steps of 4 sequences" in capfd.readouterr().out
    assert_near(output, one)


def test_a_killed_rank_ends_the_others_and_the_resumed_run_is_bit_identical(sums, tmp_path, capfd):
    """The undisturbed run saves at the same steps; its evaluations change nothing."""
    run = {"steps": 12, "save_every": 4, "set": "update_interval=2"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert on_two_ranks(command(whole, sums, eval_every=3, **run)) == 0
    capfd.readouterr()
    began = time.monotonic()
    assert on_two_ranks(command(cut, sums, eval_every=0, **run), "os.kill(os.getpid(), signal.SIGKILL)", 9) == 137
    assert time.monotonic() - began < 60
    err = capfd.readouterr().err
    assert err == "error: rank 1 was killed by SIGKILL; complete checkpoints stay: go on with --resume\n"

    newest = cut / "checkpoints" / "checkpoint-00000002"
    shutil.copytree(newest, torn := newest.with_name("checkpoint-00000003"))
    os.truncate(torn / "__1_0.distcp", 100)
    assert main(["finetune", "--resume", "--output", str(cut)]) == 2
    assert f"does not have the size it was written with; the one before is {newest}" in capfd.readouterr().err
    shutil.rmtree(torn)
    assert main(["finetune", "--resume", "--output", str(cut)]) == 0
    assert records(cut, "step") == records(whole, "step")
    ours, theirs = (load_file(output / "model.safetensors") for output in (cut, whole))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    "what, code, said",
    [
        ("raise UsageError('no luck')", 2, r"error: rank 1: no luck\n"),
        ("1 / 0", 1, r"(\[rank1\]: .*\n)+\[rank1\]: ZeroDivisionError: division by zero\n"),
    ],
)
def test_an_error_on_one_rank_is_the_only_one_shown(sums, tmp_path, capfd, what, code, said):
    began = time.monotonic()
    assert on_two_ranks(command(tmp_path / "out", sums, steps=20), what, 2) == code
    assert time.monotonic() - began < 60
    assert re.fullmatch(said, capfd.readouterr().err)


def test_a_save_that_fails_on_one_rank_fails_on_all(sums, tmp_path, capfd):
    fill = "exec('from torch.distributed.checkpoint import FileSystemWriter as W\\ndef full(*a): raise OSError(28, chr(70))\\nW.write_data = full')"
    run = {"steps": 6, "save_every": 2, "on_save_error": "continue"}
    assert on_two_ranks(command(tmp_path / "out", sums, **run), fill, 3) == 0
    out = capfd.readouterr().out
    assert re.search(r"step 4 could not be saved, and training goes on: no checkpoint could be written into .*rank 1: .*28", out)


def test_torchrun_starts_ranks_too(sums, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    program = [*launcher, "--no-python", sys.executable, "-c", PROGRAM]
    done = subprocess.run([*program, *command(tmp_path / "out", sums, steps=2)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, 2 steps of 4 sequences" in done.stdout
    assert "nproc: 2" in (tmp_path / "out" / "settings.yaml").read_text()


def test_what_cannot_be_is_refused_with_the_way_out(one, sums, tmp_path, capfd, monkeypatch):
    output = tmp_path / "out"
    (output / "checkpoints").mkdir(parents=True)
    shutil.copy(one / "settings.yaml", output)
    assert main(["finetune", "--resume", "--output", str(output), "--nproc", "2"]) == 2
    assert "began as one process, and can go on as that only: leave --nproc out" in capfd.readouterr().err

    assert main(command(tmp_path / "new", sums, nproc=0)) == 2
    assert "--nproc 0: should be greater than or equal to 1" in capfd.readouterr().err

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="4 ranks need a GPU each, and torch sees 2: use --nproc 2, or --device cpu"):
        _choose_device(FinetuneSettings(model="tiny", data="x", dtype="float32"), Ranks(0, 4, sharded=True))
    monkeypatch.undo()

    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert main(command(tmp_path / "new", sums)) == 2
    assert "runs on one machine, and this launcher has started ranks on several" in capfd.readouterr().err
    monkeypatch.delenv("RANK")
    assert main(command(tmp_path / "new", sums)) == 2
    assert "WORLD_SIZE is set, and RANK not: start several ranks with --nproc N, or by torchrun" in capfd.readouterr().err
    assert not (tmp_path / "new").exists()
