"""What the tests of whole fine-tuning runs share."""

import json

import torch
from safetensors.torch import load_file

from stallfree.cli import main

QUICK = {"lr": 3e-3, "micro_batch": 4, "seq_length": 48, "eval_size": 6}
UNTIMED = {"seconds", "stall_ms", "bytes_up"}  # bytes_up: evaluations send weights too


def metrics(output, kind):
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name not in UNTIMED} for record in records if record["kind"] == kind
    ]


def weights(output):
    return load_file(output / "model.safetensors")


def assert_equal_weights(first, second):
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def resume_here(output):
    assert main(["finetune", "--resume", "--output", str(output)]) == 0
