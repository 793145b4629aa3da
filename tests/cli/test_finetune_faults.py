"""Runs that go wrong: losses that are not finite, full disks, signals, damage, a second run beside the first."""

import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from finetune_runs import QUICK, assert_equal_weights, metrics, resume_here

from stallfree.cli import main
from stallfree.cli.finetune import checkpoint
from stallfree.cli.finetune.evaluation import token_losses
from stallfree.cli.finetune.train import Training
from stallfree.cli.flags import flag


def test_a_signal_of_another_kind_does_not_end_a_save(finetune, sums, tmp_path, stop_after, monkeypatch):
    """As of a scheduler whose patience ends while the run saves after Ctrl-C."""
    finetune(data=sums, steps=6, output=tmp_path / "whole", **QUICK)
    stop_after(3)
    save = checkpoint.save

    def told_to_end(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        save(*args)

    monkeypatch.setattr(checkpoint, "save", told_to_end)
    code, out, _ = finetune(data=sums, steps=6, **QUICK)
    assert code == 130
    assert "stopped after step 3 of 6" in out
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == [
        signal.default_int_handler,
        signal.SIG_DFL,
    ]
    monkeypatch.undo()
    resume_here(tmp_path / "out")
    assert_equal_weights(tmp_path / "whole", tmp_path / "out")


def test_a_run_without_finite_losses_is_given_up(finetune, sums, tmp_path, monkeypatch):
    calls = iter(range(100))
    monkeypatch.setattr(
        "stallfree.cli.finetune.train.token_losses",
        lambda *args: token_losses(*args) * (1.0 if next(calls) < 3 else float("nan")),
    )
    code, out, err = finetune(data=sums, steps=20, **QUICK)
    assert code == 2
    assert "step 4 was skipped: gradients not finite in" in out
    assert "q_proj" in out
    assert "the loss was not finite in 5 steps up to 8: lower --lr or raise --warmup, and add --overwrite" in err
    assert metrics(tmp_path / "out", "step")[-1]["skipped_steps"] == 5
    assert metrics(tmp_path / "out", "step")[-1]["last_skipped_call"] == 8


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_diverged_run_whose_loss_is_finite_is_given_up_too(finetune, sums, log_every):
    """Its logits are those of a broken model, all alike, and every gradient is inf: it stands still."""
    code, _, err = finetune(data=sums, steps=40, log_every=log_every, **QUICK | {"lr": 1e30, "warmup": 0})
    assert code == 2
    assert re.search(r"the gradients were not finite in [5-8] steps up to \d+: lower --lr or raise --warmup", err)


def test_a_resumed_run_is_given_up_for_its_own_steps(finetune, sums, tmp_path, stop_after, monkeypatch):
    calls = iter(range(100))
    monkeypatch.setattr(
        "stallfree.cli.finetune.train.token_losses",
        lambda *args: token_losses(*args) * (float("nan") if next(calls) in (0, 1, 2, 4, 5, 6, 7) else 1.0),
    )
    stop_after(4)
    assert finetune(data=sums, steps=10, **QUICK)[0] == 130
    resume_here(tmp_path / "out")


def test_a_save_does_not_keep_a_run_without_finite_losses_alive(finetune, sums, tmp_path, monkeypatch):
    monkeypatch.setattr("stallfree.cli.finetune.train.token_losses", lambda *args: token_losses(*args) * float("nan"))
    code, out, err = finetune(data=sums, steps=8, save_every=5, on_save_error="continue", **QUICK)
    assert code == 2
    assert err.startswith("error: the loss was not finite in 5 steps up to 5")
    assert "could not be saved" not in out


def test_a_held_out_loss_that_is_not_finite_is_no_success(finetune, sums, tmp_path, monkeypatch):
    calls = iter(range(100))
    monkeypatch.setattr(
        "stallfree.cli.finetune.evaluation.token_losses",
        lambda *args: token_losses(*args) * (1.0 if next(calls) < 2 else float("nan")),
    )
    code, out, _ = finetune(data=sums, steps=2, eval_every=0, **QUICK)
    assert code == 0
    assert "-> nan" in out
    assert "note: the held-out loss did not fall" in out
    assert "| 2 | nan |" in (tmp_path / "out" / "report.md").read_text()


def test_the_end_of_a_run_tells_of_skipped_steps(finetune, sums, monkeypatch):
    calls = iter(range(100))
    monkeypatch.setattr(
        "stallfree.cli.finetune.train.token_losses",
        lambda *args: token_losses(*args) * (float("nan") if next(calls) in (3, 5) else 1.0),
    )
    code, out, _ = finetune(data=sums, steps=8, **QUICK)
    assert code == 0
    assert "note: 2 of 8 steps were skipped, because their gradients were not finite" in " ".join(out.split())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_output(finetune, sums, tmp_path):
    tmp_path.chmod(0o500)
    code, _, err = finetune(data=sums, steps=1)
    assert (code, "is read-only for you; give another as --output" in err) == (2, True)


def full_after(step, monkeypatch):
    """No file of a checkpoint can be written from this step on."""
    written = checkpoint.save_checkpoint

    def fill(*args):
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    def save(directory, optimizer, **parts):
        with monkeypatch.context() as patch:
            if optimizer.metrics()["call"] >= step:
                patch.setattr("stallfree.checkpoints.write.write_tensors", fill)
            return written(directory, optimizer, **parts)

    monkeypatch.setattr(checkpoint, "save_checkpoint", save)


def test_a_full_disk_stops_the_run_and_keeps_the_previous_checkpoint(finetune, sums, tmp_path, monkeypatch):
    finetune(data=sums, steps=6, output=tmp_path / "whole", **QUICK)
    full_after(4, monkeypatch)
    code, _, err = finetune(data=sums, steps=6, save_every=2, **QUICK)
    assert code == 2
    assert "step 4 could not be saved: no checkpoint could be written into" in err
    assert "No space left on device" in err
    monkeypatch.undo()
    resume_here(tmp_path / "out")
    assert_equal_weights(tmp_path / "whole", tmp_path / "out")


def test_a_full_disk_does_not_stop_a_run_that_is_told_so(finetune, sums, tmp_path, monkeypatch):
    finetune(data=sums, steps=6, output=tmp_path / "whole", **QUICK)
    full_after(4, monkeypatch)
    code, out, _ = finetune(data=sums, steps=6, save_every=2, on_save_error="continue", **QUICK)
    assert code == 0
    assert "step 4 could not be saved, and training goes on: no checkpoint could be written into" in out
    assert_equal_weights(tmp_path / "whole", tmp_path / "out")


@pytest.fixture
def room_for_the_log(monkeypatch):
    """Before given steps, let files be no larger than the log then is and some bytes more, or as large as they like (None)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    def arrange(log, rooms):
        advance = Training.advance

        def advance_in_little_room(self):
            if self.step + 1 in rooms:
                room = rooms[self.step + 1]
                limit(None if room is None else log.stat().st_size + room)
            return advance(self)

        monkeypatch.setattr(Training, "advance", advance_in_little_room)

    yield arrange
    limit(None)


def test_a_log_without_room_does_not_stop_a_run_that_is_told_so(finetune, sums, tmp_path, room_for_the_log):
    finetune(data=sums, steps=6, output=tmp_path / "whole", **QUICK)
    room_for_the_log(tmp_path / "out" / "metrics.jsonl", {3: 40, 5: None})
    code, out, _ = finetune(data=sums, steps=6, on_save_error="continue", **QUICK)
    assert code == 0
    assert out.count("metrics.jsonl cannot be written, and training goes on: File too large") == 1
    for kind in ("step", "eval"):
        assert metrics(tmp_path / "out", kind) == metrics(tmp_path / "whole", kind)


def test_a_log_without_room_stops_a_run(finetune, sums, tmp_path, room_for_the_log):
    room_for_the_log(tmp_path / "out" / "metrics.jsonl", {4: 40})
    code, _, err = finetune(data=sums, steps=6, **QUICK)
    assert code == 2
    assert f"{tmp_path / 'out'} cannot be written ([Errno 27] File too large): make room; there is no checkpoint" in err
    assert [record["step"] for record in metrics(tmp_path / "out", "step")] == [1, 2, 3]


@pytest.mark.parametrize("saved", [True, False])
def test_a_model_without_room_is_said_with_the_way_out(finetune, sums, tmp_path, room_for_the_log, saved, monkeypatch):
    finetune(data=sums, steps=4, output=tmp_path / "whole", **QUICK)
    room_for_the_log(tmp_path / "out" / "metrics.jsonl", {4: 20_000})
    code, _, err = finetune(data=sums, steps=4, save_every=2 if saved else 0, **QUICK)
    assert code == 2
    assert f"{tmp_path / 'out'} cannot be written (" in err
    assert "File too large" in err
    assert not (tmp_path / "out" / ".saving").exists()
    if not saved:
        assert "there is no checkpoint to go on from" in err
        return
    assert "make room; go on with --resume" in err
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    monkeypatch.undo()
    resume_here(tmp_path / "out")
    assert_equal_weights(tmp_path / "whole", tmp_path / "out")


def test_a_damaged_checkpoint_is_refused_and_the_one_before_resumes(finetune, sums, tmp_path, stop_after, monkeypatch):
    finetune(data=sums, steps=6, output=tmp_path / "whole", **QUICK)
    stop_after(3)
    finetune(data=sums, steps=6, save_every=2, **QUICK)
    monkeypatch.undo()
    older, newer = sorted((tmp_path / "out" / "checkpoints").glob("checkpoint-*"))
    os.truncate(newer / "tensors-00000.safetensors", 100)
    code, _, err = finetune("--resume")
    assert code == 2
    assert f"{newer} is refused: tensors-00000.safetensors has 100 bytes" in err
    assert f"the newest good one is {older}. Remove the refused one" in err
    shutil.rmtree(newer)
    resume_here(tmp_path / "out")
    assert_equal_weights(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_told_to_end_saves_and_says_how_to_go_on(sums, tmp_path, number):
    """As by a scheduler: the exit code is the shell's for this signal, and the command that is printed works."""
    run = {"data": sums, "steps": 2000, "eval_every": 0} | QUICK
    arguments = [text for name, value in run.items() for text in (flag(name), str(value))]
    start = ["finetune", "--model", "tiny", "--dtype", "float32", *arguments, "--output", str(tmp_path / "cut off")]
    code = f"import sys; from stallfree.cli import main; sys.exit(main({start}))"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)
    log = tmp_path / "cut off" / "metrics.jsonl"
    while not log.exists() or log.read_text().count('"kind": "step"') < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, "")
    assert f"{number.name}: finishing this step, then saving" in out
    step = int(re.search(r"stopped after step (\d+) of 2000; to continue:", out)[1])
    assert len(metrics(tmp_path / "cut off", "step")) == step
    assert shlex.split(out.splitlines()[-1]) == ["stallfree", "finetune", "--resume", "--output", str(tmp_path / "cut off")]
    assert list((tmp_path / "cut off" / "checkpoints").glob("checkpoint-*"))


def test_a_run_saves_though_nobody_hears_it_any_more(sums, tmp_path):
    """As in `stallfree finetune ... | tee log`, where Ctrl-C ends tee too."""
    run = {"data": sums, "steps": 2000, "eval_every": 0} | QUICK
    arguments = [text for name, value in run.items() for text in (flag(name), str(value))]
    start = ["finetune", "--model", "tiny", "--dtype", "float32", *arguments, "--output", str(tmp_path / "out")]
    code = f"import sys; from stallfree.cli import main; sys.exit(main({start}))"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)
    log = tmp_path / "out" / "metrics.jsonl"
    while not log.exists() or log.read_text().count('"kind": "step"') < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert (process.wait(timeout=60), process.stderr.read()) == (130, "")
    process.stderr.close()
    assert list((tmp_path / "out" / "checkpoints").glob("checkpoint-*"))


def test_a_run_needs_no_stdout(finetune, sums, tmp_path, monkeypatch):
    with open("/dev/full", "w", buffering=1) as full:
        for stream in (None, full):
            monkeypatch.setattr(sys, "stdout", stream)
            assert finetune(data=sums, steps=1, output=tmp_path / str(stream is None), **QUICK)[0] == 0
            assert (tmp_path / str(stream is None) / "report.md").exists()


def test_a_second_run_in_one_directory_is_refused(finetune, sums, tmp_path, monkeypatch):
    codes = []
    advance = Training.advance

    def advance_beside_another(self):
        if self.step == 3:
            monkeypatch.setattr(Training, "advance", advance)
            arguments = ["finetune", "--model", "tiny", "--data", str(sums), "--output", str(tmp_path / "out")]
            resumed = ["finetune", "--resume", *arguments[-2:]]
            codes.extend(map(main, (arguments, [*arguments, "--overwrite"], resumed)))
        return advance(self)

    monkeypatch.setattr(Training, "advance", advance_beside_another)
    code, _, err = finetune(data=sums, steps=5, save_every=2, **QUICK)
    assert (code, codes) == (0, [2, 2, 2])
    assert err.count(f"another run is going on in {tmp_path / 'out'}: stop it first, or give another --output") == 3
    assert [record["step"] for record in metrics(tmp_path / "out", "step")] == [1, 2, 3, 4, 5]


def test_what_became_of_the_log_does_not_matter_to_a_resumed_run(finetune, sums, tmp_path, stop_after, monkeypatch):
    finetune(data=sums, steps=6, output=tmp_path / "whole", **QUICK)
    stop_after(3)
    finetune(data=sums, steps=6, **QUICK)
    monkeypatch.undo()
    (tmp_path / "out" / "metrics.jsonl").write_bytes(b'[1]\n{"kind": "step"}\n\xff\n{"kind": "step", "step": "2"}\n')
    resume_here(tmp_path / "out")
    assert_equal_weights(tmp_path / "whole", tmp_path / "out")
    assert [record["step"] for record in metrics(tmp_path / "out", "step")] == [4, 5, 6]
    reports = [(tmp_path / name / "report.md").read_text() for name in ("whole", "out")]
    ends = [report[report.index("| step |") : report.index("![loss]")] for report in reports]
    assert ends[0] == ends[1]
    assert re.findall(r": 6 steps, [\d,]+ tokens", reports[0]) == re.findall(r": 6 steps, [\d,]+ tokens", reports[1]) != []


def test_a_run_that_died_while_it_removed_its_checkpoints_is_complete(finetune, sums, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)
    finetune(data=sums, steps=3, save_every=1, **QUICK)
    monkeypatch.undo()
    code, out, _ = finetune("--resume")
    assert code == 0
    assert "is complete" in out
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.slow
def test_killed_again_and_again_a_run_ends_as_if_undisturbed(finetune, sums, tmp_path, seed):
    """kill -9 at random moments, most of them in a save; then --resume."""
    run = {"data": sums, "steps": 40, "save_every": 1, "eval_every": 0} | QUICK
    finetune(output=tmp_path / "whole", **{**run, "save_every": 0})
    arguments = [text for name, value in run.items() for text in (flag(name), str(value))]
    start = ["finetune", "--model", "tiny", "--dtype", "float32", *arguments]
    moments, kills = random.Random(seed), 0
    while True:
        code = f"import sys; from stallfree.cli import main; sys.exit(main({[*start, '--output', str(tmp_path / 'cut')]}))"
        process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
        found = len(metrics(tmp_path / "cut", "step")) if kills else 0
        while process.poll() is None and (
            not list((tmp_path / "cut").glob("checkpoints/checkpoint-*")) or len(metrics(tmp_path / "cut", "step")) <= found
        ):
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.2))
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        start = ["finetune", "--resume"]
    assert process.returncode == 0
    assert kills > 3
    assert_equal_weights(tmp_path / "whole", tmp_path / "cut")
    assert metrics(tmp_path / "whole", "step") == metrics(tmp_path / "cut", "step")
