"""What `--data` names -> encoded training and held-out sequences."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stallfree.cli.errors import UsageError
from stallfree.cli.finetune.encode import Encoder, Example
from stallfree.cli.finetune.records import Chat, read_records
from stallfree.cli.finetune.settings import FinetuneSettings
from stallfree.cli.finetune.tasks import PREFIX, Task

HELD_OUT_SHARE, HELD_OUT_MOST = 0.1, 64


@dataclass(frozen=True, slots=True)
class Data:
    """Sequences to train on and to evaluate on."""

    train: list[Example]
    held_out: list[Example]
    task: Task | None  # scores answers to held_out[i]
    chats: bool  # a prompt is a user's turn, not plain text
    notes: list[str]  # what a person should know about how the data fitted

    @property
    def fingerprint(self) -> str:
        """Of every token, in order: a resumed run must see the same data."""
        digest = hashlib.sha256()
        for example in self.train + self.held_out:
            digest.update(example.ids.numpy().tobytes() + b"|" + example.learned.numpy().tobytes())
        return digest.hexdigest()


def load_data(settings: FinetuneSettings, tokenizer: Any) -> Data:
    """Read, encode and split the data.

    Raises:
        UsageError: if there is no such data, something is wrong with it, or too little of it.
    """
    encoder = Encoder(tokenizer, settings.seq_length)
    if settings.data.startswith(PREFIX):
        data = _task_data(settings, encoder)
    else:
        data = _file_data(settings, encoder)
    data.notes.extend(_notes(encoder))
    return data


def _task_data(settings: FinetuneSettings, encoder: Encoder) -> Data:
    count = _held_out(settings, settings.examples, f"--examples {settings.examples}")
    task = Task(settings.data.removeprefix(PREFIX), settings.examples, settings.seed)
    train, held_out = task.records(count)
    encoded = encoder.encode(held_out)
    if encoder.cut:
        raise UsageError(f"a problem of {settings.data} does not fit into --seq-length {settings.seq_length}: raise it")
    return Data(encoder.encode(train), encoded, task, True, [])


def _file_data(settings: FinetuneSettings, encoder: Encoder) -> Data:
    records = read_records(Path(settings.data))
    examples = encoder.encode(records)
    count = _held_out(settings, len(examples), settings.data)
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    held_out, train = sorted(order[:count]), sorted(order[count:])
    chats = any(isinstance(record, Chat) for record in records)
    return Data([examples[i] for i in train], [examples[i] for i in held_out], None, chats, [])


def _held_out(settings: FinetuneSettings, available: int, source: str) -> int:
    count = settings.eval_size or min(max(1, int(available * HELD_OUT_SHARE)), HELD_OUT_MOST)
    if count >= available:
        sequences = "1 sequence" if available == 1 else f"{available} sequences"
        raise UsageError(
            f"{source} gives {sequences} of at most {settings.seq_length} tokens, of which {count} would be held out: "
            f"give more data, or lower --eval-size or --seq-length"
        )
    return count


def _notes(encoder: Encoder) -> list[str]:
    notes = []
    if encoder.cut:
        lost = f", {encoder.dropped} of them before their answer began and so left out" if encoder.dropped else ""
        notes.append(f"{encoder.cut} sequences were cut at --seq-length {encoder.seq_length}{lost}")
    if encoder.rewritten:
        notes.append(
            f"of {encoder.rewritten} conversations only the last answer is learned: the chat template rewrites earlier turns"
        )
    return notes
