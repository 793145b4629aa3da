"""The examples say what they need, and run."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from stallfree.convert import write_model

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Run an example in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


@pytest.mark.parametrize("name", ["plain_loop.py", "trainer.py"])
def test_usage(example, capfd, name):
    with pytest.raises(SystemExit) as left:
        example(name)
    assert left.value.code == 2
    assert f"usage: {name} [-h] directory text_file" in capfd.readouterr().err


@pytest.mark.parametrize("name, needed", [("plain_loop.py", 5 * 256), ("trainer.py", 9 * 256)])
def test_too_little_text_says_so(example, tiny, tmp_path, capfd, name, needed):
    write_model(*tiny, tmp_path)
    text = tmp_path / "short.txt"
    text.write_text("a" * (needed - 1))
    with pytest.raises(SystemExit) as left:
        example(name, tmp_path, text)
    assert left.value.code == 2
    assert f"short.txt has {needed - 1} tokens; this example needs at least {needed}" in capfd.readouterr().err


def test_plain_loop_runs(example, tiny, tmp_path, capfd):
    write_model(*tiny, tmp_path)
    text = tmp_path / "long.txt"
    text.write_text("abcd" * (9 * 64))
    example("plain_loop.py", tmp_path, text)
    assert "step 2: held-out loss" in capfd.readouterr().out
    assert (tmp_path / "plain-loop-output" / "model.safetensors").is_file()


@pytest.mark.slow
def test_fsdp_runs_on_two_ranks_and_goes_on(tiny, tmp_path):
    write_model(*tiny, tmp_path / "model")
    text = tmp_path / "long.txt"
    text.write_text("abcd" * (9 * 64))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / "fsdp.py"]
    command += [tmp_path / "model", text, "--output", tmp_path / "output", "--steps"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for steps, printed in (("3", ["1", "2", "3"]), ("5", ["4", "5"])):
        done = subprocess.run(
            [*map(str, command), steps], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert [line.split(":")[0].split()[1] for line in done.stdout.splitlines() if "loss" in line] == printed
        assert (tmp_path / "output" / f"checkpoint-{steps}" / ".metadata").is_file()
    assert (tmp_path / "output" / "checkpoint-3" / ".metadata").is_file()
