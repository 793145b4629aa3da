"""A model for Transformers: the exact weights, in place of an earlier export, and nothing of the user's is touched."""

import itertools
import os
from pathlib import Path

import pytest
import torch

from stallfree import ZenFlowAdamW, export_model
from stallfree.convert import write_model

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


def small() -> transformers.LlamaForCausalLM:
    """A model of 16 kB."""
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def test_the_exported_model_is_the_exact_one(tmp_path):
    model = small()
    optimizer = ZenFlowAdamW(
        model.named_parameters(), lr=1e-2, min_numel=0, topk_ratio=0.25, update_interval=4, full_warm_up_rounds=1
    )
    ids = torch.arange(32).view(2, 16)
    for _ in range(6):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    published = {name: value.clone() for name, value in model.state_dict().items()}
    export_model(model, optimizer, tmp_path)
    assert all(torch.equal(value, published[name]) for name, value in model.state_dict().items())
    optimizer.flush()
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(value, published[name]) for name, value in exported.items())
    optimizer.close()


def test_a_model_with_several_chat_templates_is_exported_again_and_again(tmp_path):
    model = small()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    optimizer = ZenFlowAdamW(model.named_parameters(), min_numel=0)
    for more in ({}, {"tools": "1"}, {"tools": "2"}, {"search": "3"}):
        tokenizer.chat_template = {"default": "0"} | more
        export_model(model, optimizer, tmp_path, tokenizer=tokenizer)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template == {"default": "0", "search": "3"}
    optimizer.close()


def filled(value: float, shard_size: str = "1GB") -> transformers.LlamaForCausalLM:
    """With one value everywhere; a small shard_size makes several files of it."""
    model = small()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    save = model.save_pretrained
    model.save_pretrained = lambda directory, **options: save(directory, max_shard_size=shard_size, **options)
    return model


def values_in(directory: Path) -> set[float]:
    """Of all weights that Transformers finds there."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not found["missing_keys"]
    return {value for param in model.parameters() for value in param.unique().tolist()}


SIZES = {"one file": "1GB", "a few files": "8KB", "more files": "4KB"}


@pytest.mark.parametrize("old", SIZES)
@pytest.mark.parametrize("new", SIZES)
def test_a_new_export_leaves_nothing_of_the_old_one_and_all_that_is_the_users(tmp_path, old, new):
    write_model(filled(1.0, SIZES[old]), None, tmp_path)
    users = ["model_v1_best.safetensors", "model-lora.safetensors", "model.fp16.safetensors", "model-00001.safetensors"]
    for name in users:
        (tmp_path / name).write_text(name)
    write_model(filled(2.0, SIZES[new]), None, tmp_path)
    write_model(filled(2.0, SIZES[new]), None, tmp_path / "alone")
    alone = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == alone | {*users, "alone"}
    assert all((tmp_path / name).read_text() == name for name in users)
    assert values_in(tmp_path) == {2.0}


def test_the_new_files_are_on_the_disk_before_they_have_their_names(tmp_path, monkeypatch):
    """A run's checkpoints are removed after its last export: a loss of power must not take both."""
    synced, sync, replace = set(), os.fsync, os.replace

    def record(file):
        synced.add(Path(os.readlink(f"/proc/self/fd/{file}")))
        return sync(file)

    def checked(source, target):
        assert Path(source) in synced
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "replace", checked)
    write_model(filled(1.0, SIZES["a few files"]), None, tmp_path)
    assert tmp_path in synced
    assert values_in(tmp_path) == {1.0}


class Killed(BaseException):
    pass


def killed_at(moment: int, patch: pytest.MonkeyPatch) -> None:
    """Before the n-th time that a name in a directory changes."""
    count = itertools.count(1)

    def dying(change):
        def maybe(*args, **options):
            if next(count) == moment:
                raise Killed
            return change(*args, **options)

        return maybe

    for name in ("rename", "replace", "unlink", "remove", "rmdir"):
        patch.setattr(os, name, dying(getattr(os, name)))


@pytest.mark.parametrize("old", SIZES)
@pytest.mark.parametrize("new", SIZES)
def test_a_kill_at_any_moment_of_an_export_leaves_a_model_that_loads(tmp_path, monkeypatch, old, new):
    """The old one or the new one; a mixture only where the files of both have the same names and are several."""
    found: list[set[float]] = []
    for moment in itertools.count(1):
        directory = tmp_path / str(moment)
        write_model(filled(1.0, SIZES[old]), None, directory)
        with monkeypatch.context() as patch:
            killed_at(moment, patch)
            try:
                write_model(filled(2.0, SIZES[new]), None, directory)
            except Killed:
                complete = False
            else:
                complete = True
        found.append(values_in(directory))
        if complete:
            break
        write_model(filled(3.0), None, directory)  # what is left is in nobody's way
        assert values_in(directory) == {3.0}
        assert [path.name for path in directory.glob("*model*")] == ["model.safetensors"]
    assert found[0] == {1.0}
    assert found[-1] == {2.0}
    assert len(found) > 3
    if old != new or old == "one file":
        assert {1.0, 2.0} not in found
