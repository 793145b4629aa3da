"""The GPU's path without a GPU, as benchmarks/thread_cost.py times it."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernels' tables are on the GPU then", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import thread_cost

from stallfree.engine import pipeline
from stallfree.kernels import driver


@pytest.mark.parametrize("more", [[], ["--cold", "1", "--interval", "2"]])
def test_hooks_and_steps_are_timed(more):
    before = pipeline.link_to, driver._runner, getattr(torch._C, "_cuda_getDevice", None)
    options = thread_cost.parse(["--layers", "4", "--block", "3000", "--rounds", "2", "--steps", "3", *more])
    found = thread_cost.measure(options)
    assert found["blocks"] >= 5, "the layers, or parts of them, and the embedding"
    for name in ("hooks", "step"):
        assert 0 < found[name]["least"] <= found[name]["median"]
    assert (pipeline.link_to, driver._runner, getattr(torch._C, "_cuda_getDevice", None)) == before


def test_the_path_is_a_gpu_s():
    """Every block calls the driver in a hook of its own; what is published comes up."""
    run, calls = driver.run, []

    def noted(*commands):
        calls.append([driver.RUN[command[0]] for command in commands if command])
        run(*commands)

    with thread_cost.mock.patch.object(driver, "run", noted):
        thread_cost.measure(thread_cost.parse(["--layers", "2", "--block", "3000", "--rounds", "1", "--steps", "1"]))
    flat = [name for call in calls for name in call]
    assert {"cuLaunchKernel", "cuMemcpyAsync", "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"} == set(flat)
    assert any(call.count("cuLaunchKernel") == 2 for call in calls), "a split, and its sums"


def test_a_profile_is_shown(capsys):
    thread_cost.measure(thread_cost.parse(["--layers", "1", "--rounds", "1", "--steps", "2", "--profile"]))
    assert "_stage_ready" in capsys.readouterr().out
