"""Configuration, settings and data that nobody meant to write: accepted, or refused with the error that is for it.

`--seed N` repeats the random choices, and a failure says which text it was. STALLFREE_FAULTS=20 tries twenty times as much.
"""

import json
import os
import random
from pathlib import Path

import pytest
import yaml

from stallfree import ZenFlowConfig
from stallfree.cli.errors import UsageError
from stallfree.cli.finetune.records import read_records
from stallfree.cli.finetune.settings import FinetuneSettings, load_settings
from stallfree.config import FIELDS

TRIES = 400 * int(os.environ.get("STALLFREE_FAULTS", "1"))
CODE = "!!python/object/apply:os.system ['touch {0}']"
VALUES = [
    *(None, True, False, 0, 1, -1, 2**70, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "auto", "1", "1e-3", "true", "null", "\u2028", "x" * 5000, "2026-11-29", "stallfree", "mean"),
    *([], [1, 2], ["auto"], {}, {"a": {"b": [1]}}, {"embed": 0}, {1: 2}, [[[[[[]]]]]]),
]


def mutated(text: str, choice: random.Random) -> bytes:
    """With something cut, doubled, replaced or inserted."""
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(choice.randrange(4)):
        start = choice.randrange(len(raw) + 1)
        end = min(len(raw), start + choice.randrange(1, 20))
        raw[start:end] = choice.choice(
            [
                b"",
                bytes(raw[start:end]) * 3,
                choice.randbytes(end - start),
                choice.choice(
                    [
                        b"{",
                        b"[" * 3000,
                        b'"',
                        b"\x00",
                        b": ",
                        b"- ",
                        b"\n\t",
                        b"&a *a",
                        b"!!",
                        b"\xff\xfe",
                        b"9" * 5000,
                        b"<<: 3",
                    ]
                ),
            ]
        )
    return bytes(raw)


def a_mapping(names: list[str], choice: random.Random) -> dict:
    names = [*names, "", "lr-", "preset", "set", "steps", "__class__"]
    return {choice.choice(names): choice.choice(VALUES) for _ in range(choice.randrange(6))}


def a_text(names: list[str], suffix: str, choice: random.Random, marker: Path) -> bytes:
    given = a_mapping(names, choice)
    if choice.random() < 0.1:
        return (CODE.format(marker) if suffix != ".json" else "[" * 100_000).encode()
    if suffix == ".json":
        return mutated(json.dumps({str(name): value for name, value in given.items()}), choice)
    return mutated(yaml.safe_dump(given, allow_unicode=True), choice)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_configuration_is_read_or_refused(tmp_path, seed, suffix):
    path, marker, read = tmp_path / f"config{suffix}", tmp_path / "ran", 0
    for number in range(TRIES):
        text = a_text([*FIELDS], suffix, random.Random(f"{seed} {number}"), marker)
        path.write_bytes(text)
        try:
            config = ZenFlowConfig.load(path)
        except (ValueError, TypeError):
            continue
        except Exception as error:
            pytest.fail(f"--seed {seed}, try {number}: {type(error).__name__}: {error} for {text[:300]!r}")
        assert ZenFlowConfig.from_dict(config.to_dict()) == config
        read += 1
    assert not marker.exists()
    assert read, "some of them are configurations"


def test_settings_of_a_run_are_read_or_refused(tmp_path, seed):
    path, marker, read = tmp_path / "run.yaml", tmp_path / "ran", 0
    for number in range(TRIES):
        choice = random.Random(f"{seed} {number}")
        text = a_text([*FinetuneSettings.model_fields, *FIELDS], ".yaml", choice, marker)
        path.write_bytes(text)
        given = {"config": str(path), "model": "tiny", "data": "builtin:chain_sum"}
        if choice.random() < 0.5:
            given["set"] = [f"{choice.choice([*FIELDS, 'x', ''])}{choice.choice(['=', '==', ''])}{choice.choice(VALUES)}"]
        refusal = ""
        try:
            load_settings(given)
        except UsageError as error:
            refusal = str(error)
        except Exception as error:
            pytest.fail(f"--seed {seed}, try {number}: {type(error).__name__}: {error} for {given}, {text[:300]!r}")
        assert "\n" not in refusal, f"--seed {seed}, try {number}: more than a line: {refusal}"
        read += not refusal
    assert not marker.exists()
    assert read, "some of them are settings"


def a_record(choice: random.Random) -> object:
    if choice.random() < 0.3:
        return {"text": "a"}

    def value() -> object:
        return choice.choice(["a", "\u2028b", "\ud800", *VALUES])

    message = {"role": choice.choice(["user", "assistant", "system", *VALUES]), "content": value()}
    whole = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return choice.choice(
        [
            {"text": value()},
            {"prompt": value(), "completion": value()},
            {"messages": [message] * choice.randrange(3)},
            {"messages": choice.choice([whole, [*whole, message], value()])},
            value(),
        ]
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_data_is_read_or_refused(tmp_path, seed, suffix):
    path, read = tmp_path / f"data{suffix}", 0
    for number in range(TRIES):
        choice = random.Random(f"{seed} {number}")
        text = mutated("\n".join(json.dumps(a_record(choice)) for _ in range(choice.randrange(1, 3))), choice)
        path.write_bytes(text)
        refusal = ""
        try:
            read_records(path)
        except UsageError as error:
            refusal = str(error)
        except Exception as error:
            pytest.fail(f"--seed {seed}, try {number}: {type(error).__name__}: {error} for {text[:300]!r}")
        assert "\n" not in refusal, f"--seed {seed}, try {number}: more than a line: {refusal}"
        read += not refusal
    assert read > TRIES // 20, "some of them are data"
