"""The launches that benchmarks/launches.py times: in triton's interpreter, or on a GPU."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import launches
from block_cases import triton_block


@pytest.fixture
def device(device):
    triton_block(device, small=False)  # or skips
    return device


@pytest.mark.parametrize("name", ["split", "publish", "adamw"])
def test_every_kernel_is_launched_both_ways_with_its_arguments(device, name):
    for launch in launches.pairs(device)[name]:
        launch()


def test_every_call_is_made(device, monkeypatch):
    monkeypatch.setattr(launches, "LAYERS", 2)
    monkeypatch.setattr(launches, "LAYER", [(16, 24, 1), (24, 16, 1)])
    calls = launches.calls(device)
    assert list(calls) == ["split", "publish", "AdamW, all layers", "AdamW, all layers, a new rate"]
    for call in calls.values():
        call()
        call()
