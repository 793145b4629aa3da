"""Whatever is wrong with a data file is said in one sentence that names the place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.cli.errors import UsageError
from stallfree.cli.finetune.encode import Encoder
from stallfree.cli.finetune.records import Chat, Pair, Text, read_records

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def write(tmp_path, content, name="data.jsonl"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "line, record",
    [
        (json.dumps(CHAT | {"extra": 1}), lambda where: Chat(where, CHAT["messages"])),
        (json.dumps({"prompt": "a", "completion": "b"}), lambda where: Pair(where, "a", "b")),
        ('{"text": "c\u2028d"}', lambda where: Text(where, "c\u2028d")),
    ],
)
def test_all_forms(tmp_path, line, record):
    path = write(tmp_path, "\ufeff" + "\r\n".join([line, "", line]))
    assert read_records(path) == [record(f"{path}, line 1"), record(f"{path}, line 3")]


def test_mixed_forms_are_refused(tmp_path):
    path = write(tmp_path, '{"text": "a"}\n\n{"text": "b"}\n{"prompt": "a", "completion": "b"}\n' + json.dumps(CHAT))
    with pytest.raises(UsageError, match="line 4 has 'prompt' and 'completion' where line 1 has 'text': give one form a file"):
        read_records(path)


def test_other_files_are_one_text(tmp_path):
    path = write(tmp_path, '{"text": 1}\nand more\n', "notes.md")
    assert read_records(path) == [Text(str(path), '{"text": 1}\nand more\n')]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty: give one with text in it"),
        (b" \n\t\n", "is empty: give one with text in it"),
        (b'{"text": "a"}\n{"text": "\xff"}', r"is not UTF-8: byte 0xff at offset 24 \(line 2\); convert it"),
        (b'\xef\xbb\xbf{"text": "\xff"}', r"is not UTF-8: byte 0xff at offset 13 \(line 1\); convert it"),
        ('{"text": "a"}\n\n{"text": ', r"line 3 is not JSON \(Expecting value: .*\): write one object a line"),
        ("[" * 100_000, "line 1(: the JSON is nested too deeply| is not JSON)"),
        ('[{"text": "a"}]', "line 1 is a JSON list: write one object a line"),
        ('{"txt": "a"}', "line 1 has 'txt' but not 'messages', 'prompt' or 'text'"),
        ("{}", "line 1 has no field but not"),
        ('{"text": 5}', "line 1: field 'text' must be a string, not number"),
        ('{"text": ""}', "line 1: field 'text' is empty"),
        ('{"text": "\\ud800"}', "line 1: field 'text' has half of a surrogate pair"),
        ('{"prompt": "a"}', "line 1: field 'completion' is missing"),
        ('{"prompt": "a", "completion": null}', "line 1: field 'completion' must be a string, not null"),
        ('{"messages": []}', "line 1: field 'messages' must be a list of messages, not list without elements"),
        ('{"messages": ["a"]}', r"line 1: field 'messages\[0\]' must be an object with 'role' and 'content', not string"),
        ('{"messages": [{"role": "user"}]}', r"line 1: field 'messages\[0\].content' is missing"),
        (
            '{"messages": [{"role": "user", "content": [1]}]}',
            r"line 1: field 'messages\[0\].content' must be a string, not list",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "line 1: field 'messages' has no 'assistant' message after the first",
        ),
    ],
)
def test_errors_name_the_place(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(UsageError, match=message) as error:
        read_records(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(UsageError, match="does not exist: give a text file, a JSONL file or builtin:TASK as --data"):
        read_records(tmp_path / "none.txt")
    with pytest.raises(UsageError, match="is not a file: give one text file or one JSONL file as --data"):
        read_records(tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]) | values, "content": values})
)
lines = st.one_of(
    st.fixed_dictionaries({"messages": messages | values}),
    st.fixed_dictionaries({"prompt": values, "completion": values}),
    st.fixed_dictionaries({"text": values}),
    values,
).map(json.dumps)
files = st.binary(max_size=60) | st.lists(lines | st.text(max_size=10), max_size=4).map(
    lambda parts: "\n".join(parts).encode(errors="surrogatepass")
)


@given(content=files, suffix=st.sampled_from([".jsonl", ".txt"]))
def test_any_file_is_read_or_refused(content, suffix, tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / f"data{suffix}"
    path.write_bytes(content)
    encoder = Encoder(tiny[1], seq_length=16)
    try:
        examples = encoder.encode(read_records(path))
    except UsageError:
        return
    assert all(example.learned.any() and not example.learned[0] and len(example.ids) <= 16 for example in examples)
