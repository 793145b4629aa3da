"""A data file -> records, with an error that names the line and the field for whatever is wrong with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallfree.cli.errors import UsageError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
FIELDS = '{"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...} or {"text": ...}'


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text: every token is learned."""

    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and what is to follow it, verbatim: the completion is learned."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: the assistant's turns are learned."""

    where: str
    messages: list[dict[str, str]]


Record = Text | Pair | Chat
FORM = {Text: "'text'", Pair: "'prompt' and 'completion'", Chat: "'messages'"}


def read_records(path: Path) -> list[Record]:
    """The records of a UTF-8 file: one per line of a `.jsonl` file, one in all of any other.

    Raises:
        UsageError: naming the file, the line and the field.
    """
    if not path.exists():
        raise UsageError(f"data file {path} does not exist: give a text file, a JSONL file or builtin:TASK as --data")
    if not path.is_file():
        raise UsageError(f"data {path} is not a file: give one text file or one JSONL file as --data")
    text = _decode(path)
    if not text.strip():
        raise UsageError(f"data file {path} is empty: give one with text in it")
    if path.suffix.lower() not in JSONL_SUFFIXES:
        return [Text(str(path), text)]
    # Not splitlines(): JSON strings may hold U+2028 and the like unescaped.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    records = [_record(f"{path}, line {number}", line) for number, line in lines]
    for (number, _), record in zip(lines, records, strict=True):
        if type(record) is not type(records[0]):
            raise UsageError(
                f"{path}, line {number} has {FORM[type(record)]} where line {lines[0][0]} has {FORM[type(records[0])]}: "
                f"give one form a file"
            )
    return records


def _decode(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)  # the codec counts from behind the byte order mark
        line = raw.count(b"\n", 0, offset) + 1
        raise UsageError(
            f"data file {path} is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset} (line {line}); "
            f"convert it, for example with iconv -f latin1 -t utf-8"
        ) from None


def _record(where: str, line: str) -> Record:
    try:
        value = json.loads(line)
    except RecursionError:
        raise UsageError(f"{where}: the JSON is nested too deeply; write {FIELDS}") from None
    except ValueError as error:
        raise UsageError(f"{where} is not JSON ({error}): write one object a line") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where} is a JSON {_kind(value)}: write one object a line, {FIELDS}")
    if "messages" in value:
        return Chat(where, _messages(where, value["messages"]))
    if "prompt" in value or "completion" in value:
        return Pair(where, _string(where, value, "prompt"), _string(where, value, "completion"))
    if "text" in value:
        return Text(where, _string(where, value, "text"))
    found = ", ".join(map(repr, list(value)[:5])) or "no field"
    raise UsageError(f"{where} has {found} but not 'messages', 'prompt' or 'text': write {FIELDS}")


def _messages(where: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: field 'messages' must be a list of messages, not {_kind(value)}")
    for index, message in enumerate(value):
        name = f"messages[{index}]"
        if not isinstance(message, dict):
            raise UsageError(f"{where}: field '{name}' must be an object with 'role' and 'content', not {_kind(message)}")
        for field in ("role", "content"):
            _string(
                where, message, field, prefix=f"{name}.", may_be_empty=field == "content" and message.get("role") != "assistant"
            )
    if not any(message["role"] == "assistant" for message in value[1:]):
        raise UsageError(
            f"{where}: field 'messages' has no 'assistant' message after the first, so there is no answer to learn"
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _string(where: str, fields: dict[str, Any], field: str, *, prefix: str = "", may_be_empty: bool = False) -> str:
    name = prefix + field
    if field not in fields:
        raise UsageError(f"{where}: field '{name}' is missing")
    value = fields[field]
    if not isinstance(value, str):
        raise UsageError(f"{where}: field '{name}' must be a string, not {_kind(value)}")
    if not value and not may_be_empty:
        raise UsageError(f"{where}: field '{name}' is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{where}: field '{name}' has half of a surrogate pair (\\ud800 to \\udfff), which no text has"
        ) from None
    return value


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null") + (" without elements" if value == [] else "")
