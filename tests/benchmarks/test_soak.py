"""The soak in small."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import soak


def arguments(**changed) -> argparse.Namespace:
    settings = dict(device="cpu", dtype="bfloat16", steps=320, save_every=40, evaluate_every=25, twin_steps=None, seed=0)
    return argparse.Namespace(**settings | changed)


def test_a_short_run_passes_and_is_reported():
    rows = dict(soak.soak(arguments()))
    assert rows["without saves and evaluations"] == "bit-identical after 320 calls and a flush"
    assert "8 saves and 12 evaluations" in rows["calls, seconds"]
    assert rows["skipped calls"] == "3, the last one 291"


def test_growth_is_the_slope_over_the_last_part():
    usage = soak.Usage(calls=list(range(100)), memory=[0] * 20 + [3 * call for call in range(20, 100)], threads=[2] * 100)
    assert usage.growth("memory") == pytest.approx(3 * 79)
    assert usage.growth("threads") == 0


def test_a_run_that_drifts_is_found(monkeypatch):
    monkeypatch.setattr(soak, "rate", lambda call, steps: soak.LR * (1 + 1e-3 * (call % 2)))
    adamw = soak.adamw

    def slower(*settings):
        with monkeypatch.context() as patch:
            patch.setattr(soak, "rate", lambda call, steps: soak.LR * 0.9)
            return adamw(*settings)

    monkeypatch.setattr(soak, "adamw", slower)
    with pytest.raises(AssertionError, match="drifted"):
        soak.soak(arguments(steps=60))
