"""`stallfree finetune` on two ranks: the loss curve of one process, one voice, one end, checkpoints for any number of ranks."""

import json
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from ranks import DEVICE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stallfree import ZenFlowAdamW
from stallfree.checkpoints import CheckpointError
from stallfree.cli import main
from stallfree.cli.errors import UsageError
from stallfree.cli.finetune import sharded_checkpoint
from stallfree.cli.finetune.launch import PROGRAM, launch
from stallfree.cli.finetune.ranks import Ranks, _shown
from stallfree.cli.finetune.run import _choose_device, _with_ranks
from stallfree.cli.finetune.settings import FinetuneSettings

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compares losses of the CPU's arithmetic, and starts its own ranks")

UNTIMED = {"seconds", "stall_ms", "bytes_up", "bytes_down"}
SYNCHRONOUS = {"preset": "zero-offload", "steps": 8, "eval_every": 3}  # flushing, as every save does, changes nothing
AT_STEPS = """
import os, signal, warnings
from torch.distributed.checkpoint import FileSystemWriter
from stallfree.cli.finetune.train import Training

def patched(self, advance=Training.advance):
    if self.ranks.rank == 1:
        exec({events}.get(self.step, ""))
    return advance(self)

def full(*args, written=FileSystemWriter.write_data):
    FileSystemWriter.write_data = written  # once
    raise OSError(28, "No space left on device")

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


def command(output, data=None, **options):
    chosen = {"model": "tiny", "dtype": "float32", "lr": 3e-3, "micro_batch": 2, "seq_length": 48, "eval_size": 5}
    chosen |= {"device": "cpu", "data": data, "output": output} | options
    return ["finetune", *(text for name, value in chosen.items() for text in ("--" + name.replace("_", "-"), str(value)))]


def on_two_ranks(arguments, events=None):
    """events: what rank 1 does before a step, by the number of steps done."""
    return launch(2, [*arguments, "--nproc", "2"], AT_STEPS.format(events=events or {}) + PROGRAM)


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
    events = {2: "warnings.warn('of rank 1'); print('so')"}
    assert on_two_ranks(command(tmp_path / "two", sums, **SYNCHRONOUS), events) == 0
    out, err = capfd.readouterr()
    assert_near(tmp_path / "two", one)
    assert err == ""
    assert "2 ranks, 8 steps of 4 sequences" in out
    assert "so\n" not in out
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(lines) == len(set(lines)) == 8 + 4  # steps, evaluations
    report = (tmp_path / "two" / "report.md").read_text()
    assert re.search(r"of rank 0 of 2 ranks\): \d\d\.\d bytes per parameter on the host", report)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "two" / "checkpoints").exists()


def test_the_default_rule_is_the_same_on_two_ranks_of_torchrun_and_answers_are_scored(sums, tmp_path):
    """Selections of columns are made over all ranks; of rows (the embedding) rank by rank, so columns it is here."""
    pytest.importorskip("reasoning_gym")
    options = {"data": "builtin:chain_sum", "examples": 40, "steps": 8, "seq_length": 128, "score_size": 3, "eval_every": 0}
    flags = ["--set", "channel_dim=1", "--set", "update_interval=2"]
    assert main([*command(tmp_path / "one", accumulation=2, **options), *flags]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    program = [*torchrun, sys.executable, "-c", PROGRAM, *command(tmp_path / "two", **options), *flags]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, 8 steps of 4 sequences" in done.stdout
    assert "nproc: 2" in (tmp_path / "two" / "settings.yaml").read_text()
    assert_near(tmp_path / "two", tmp_path / "one")
    assert [record["scored"] for record in records(tmp_path / "two", "eval")] == [3, 3]


def test_a_stop_on_one_rank_stops_all_and_one_rank_can_go_on(one, sums, tmp_path, capfd):
    """After a save on the way that failed, on rank 1 alone."""
    output = tmp_path / "cut"
    events = {1: "FileSystemWriter.write_data = full", 4: "os.kill(os.getpid(), signal.SIGTERM)"}
    saving = {"save_every": 2, "on_save_error": "continue"}
    assert on_two_ranks(command(output, sums, **SYNCHRONOUS, **saving), events) == 143
    out, err = capfd.readouterr()
    failed = (
        r"step 2 could not be saved, and training goes on: no checkpoint .* \(rank 1: .*No space left on device\): make room"
    )
    assert len(re.findall(failed, out)) == 1
    assert out.count("stopped after step 5 of 8") == 1
    assert err == ""
    assert len(list((output / "checkpoints").glob("*checkpoint-*"))) == 2
    AutoModelForCausalLM.from_pretrained(output)  # what is there so far can be used

    assert main(["finetune", "--resume", "--output", str(output), "--nproc", "1"]) == 0
    assert "1 rank, 8 steps of 4 sequences" in capfd.readouterr().out
    assert_near(output, one)


def test_a_killed_rank_ends_the_others_and_the_resumed_run_is_bit_identical(sums, tmp_path, capfd):
    """The undisturbed run saves at the same steps; its evaluations change nothing."""
    run = {"steps": 12, "save_every": 4, "set": "update_interval=2"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert on_two_ranks(command(whole, sums, eval_every=3, **run)) == 0
    capfd.readouterr()
    last_words = f"open({str(tmp_path / 'last_words')!r}, 'w').close(); "
    events = {9: last_words + "os.kill(os.getpid(), signal.SIGKILL)"}
    assert on_two_ranks(command(cut, sums, eval_every=0, **run), events) == 137
    assert time.time() - (tmp_path / "last_words").stat().st_mtime < 60
    err = capfd.readouterr().err
    assert err == "error: rank 1 was killed by SIGKILL; complete checkpoints stay: go on with --resume\n"

    assert main(["finetune", "--resume", "--output", str(cut)]) == 0
    assert records(cut, "step") == records(whole, "step")
    ours, theirs = (load_file(output / "model.safetensors") for output in (cut, whole))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_save_and_end(sums, tmp_path):
    program = AT_STEPS.format(events={4: "os.kill(os.getppid(), signal.SIGKILL)"}) + PROGRAM
    arguments = [*command(tmp_path / "out", sums, steps=100_000), "--nproc", "2"]
    code = f"from stallfree.cli.finetune.launch import launch; launch(2, {arguments}, {program!r})"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    ).stdout  # of the ranks too
    assert "of 100000; to continue:" in output
    assert len(list((tmp_path / "out" / "checkpoints").glob("checkpoint-*"))) == 1


def test_an_error_on_one_rank_is_the_only_one_shown(sums, tmp_path, capfd):
    last_words = f"open({str(tmp_path / 'last_words')!r}, 'w').close(); "
    assert on_two_ranks(command(tmp_path / "out", sums, steps=20), {2: last_words + "1 / 0"}) == 1
    assert time.time() - (tmp_path / "last_words").stat().st_mtime < 60
    assert re.fullmatch(r"(\[rank1\]: .*\n)+\[rank1\]: ZeroDivisionError: division by zero\n", capfd.readouterr().err)


def test_a_mistake_in_the_input_is_one_sentence_whichever_rank_finds_it():
    assert str(_shown(UsageError("no luck"), 0)) == "no luck"
    assert str(_shown(UsageError("no luck"), 1)) == "rank 1: no luck"
    lost = _shown(RuntimeError("[gloo/pair.cc:537] Read\nerror"), 1)
    assert (
        str(lost)
        == "rank 1 cannot reach the other ranks ([gloo/pair.cc:537] Read error); complete checkpoints stay: go on with --resume"
    )


def test_a_torn_checkpoint_is_refused_and_the_one_before_is_named(tmp_path):
    paths = [tmp_path / f"checkpoint-0000000{number}" for number in (1, 2)]
    for path in paths:
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"torn")
        (path / "run.json").write_text(json.dumps({"files": {"__0_0.distcp": 5}}))
    with pytest.raises(CheckpointError, match=f"__0_0.distcp does not have the size .*; the one before is {paths[0]}"):
        sharded_checkpoint.load(tmp_path, None, None)
    (paths[1] / "run.json").unlink()
    with pytest.raises(CheckpointError, match=f"is not whole .*run.json.*; the one before is {paths[0]}"):
        sharded_checkpoint.load(tmp_path, None, None)


def test_damaged_checkpoints_are_neither_counted_nor_removed(tmp_path):
    """As those of one process: the last two whole ones stay."""
    model = torch.nn.Linear(4, 4)
    optimizer = ZenFlowAdamW(model.named_parameters(), min_numel=0)
    training = SimpleNamespace(ranks=Ranks(0, 1, sharded=False), model=model, optimizer=optimizer, reseed=lambda: None)
    for number in range(1, 6):
        sharded_checkpoint.save(tmp_path, training, {"number": number})
        if number == 2:
            (tmp_path / "checkpoint-00000002" / "run.json").unlink()
    assert sorted(path.name[-1] for path in tmp_path.glob("*checkpoint-*")) == ["2", "4", "5"]
    assert sharded_checkpoint.load(tmp_path, training, lambda run: None)["number"] == 5
    optimizer.close()


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
    settings = FinetuneSettings(model="tiny", data="x", dtype="float32", nproc=2)
    with pytest.raises(UsageError, match="4 ranks need a GPU each, and torch sees 2: use --nproc 2, or --device cpu"):
        _choose_device(settings, Ranks(0, 4, sharded=True))
    monkeypatch.undo()

    with pytest.raises(UsageError, match=r"3 ranks cannot share the 8 sequences .*: go on with --nproc 1 or 2 or 4 or 8"):
        _with_ranks(settings, Ranks(0, 3, sharded=True), resume=True)
    with pytest.raises(UsageError, match="--nproc 2 under a launcher that has started 3 ranks: leave --nproc out"):
        _with_ranks(settings, Ranks(0, 3, sharded=True), resume=False)

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
