"""A command line run in this process, and data for it."""

import json
import os
import signal

import pytest
import torch

from stallfree.cli import main
from stallfree.cli.finetune.models import load_model
from stallfree.cli.finetune.train import Training


@pytest.fixture(scope="session")
def tiny():
    """(model, tokenizer); the model is not to be trained."""
    return load_model("tiny", torch.float32, 0)


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """60 conversations about sums of two digits."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    chats = [
        [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]
        for a in range(10)
        for b in range(6)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


@pytest.fixture
def finetune(tmp_path, capfd):
    """Run `stallfree finetune` on the tiny model; returns (exit code, stdout, stderr). Options are keywords."""

    def run(*flags, **options):
        # Not auto: what a test asserts must not depend on the machine.
        options = {"model": "tiny", "dtype": "float32", "output": tmp_path / "out"} | options
        arguments = [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]
        code = main(["finetune", *flags, *arguments])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def stop_after(monkeypatch):
    """Send this process a signal in the given step, as a person or a cluster would."""

    def arrange(step, number=signal.SIGINT):
        advance = Training.advance

        def advance_and_signal(self):
            if self.step + 1 == step:
                os.kill(os.getpid(), number)
            return advance(self)

        monkeypatch.setattr(Training, "advance", advance_and_signal)

    return arrange
