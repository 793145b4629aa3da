"""What `--data` names -> encoded training and held-out sequences."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stallfree.cli.errors import UsageError
from stallfree.cli.finetune.encode import Encoder, Example
from stallfree.cli.finetune.records import Chat, Record, read_records
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


def read_source(settings: FinetuneSettings) -> Task | list[Record]:
    """What can be read before the model is there.

    Raises:
        UsageError: if there is no such data, or something is wrong with it.
    """
    if settings.data.startswith(PREFIX):
        return Task(settings.data.removeprefix(PREFIX), settings.examples, settings.seed)
    return read_records(Path(settings.data))


def encode_source(settings: FinetuneSettings, source: Task | list[Record], tokenizer: Any) -> Data:
    """Encode and split.

    Raises:
        UsageError: if it does not fit the model, or is too little.
    """
    encoder = Encoder(tokenizer, settings.seq_length)
    data = _task_data(settings, source, encoder) if isinstance(source, Task) else _file_data(settings, source, encoder)
    data.notes.extend(_notes(encoder))
    return data


def _task_data(settings: FinetuneSettings, task: Task, encoder: Encoder) -> Data:
    count = _held_out(settings, settings.examples, f"--examples {settings.examples}")
    train, held_out = task.records(count)
    encoded = encoder.encode(held_out)
    if encoder.cut:
        raise UsageError(f"a problem of {settings.data} does not fit into --seq-length {settings.seq_length}: raise it")
    return Data(encoder.encode(train), encoded, task, True, [])


def _file_data(settings: FinetuneSettings, records: list[Record], encoder: Encoder) -> Data:
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
