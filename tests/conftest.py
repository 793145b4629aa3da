"""Devices, seeds and hypothesis profiles of the test suite.

`pytest` runs everything on the CPU and, where there is one, on a GPU (`-m gpu` or `-m "not gpu"` chooses).
`--hypothesis-profile=ci` runs many more random histories. `--seed N` repeats a run's random numbers.
"""

import os
import random
import signal

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton: its kernels then run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

COMMON = dict(deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow])
# Where changes are judged (CI is set), the same histories every time; elsewhere new ones at every run.
hypothesis.settings.register_profile("fast", max_examples=60, derandomize="CI" in os.environ, **COMMON)
hypothesis.settings.register_profile("ci", max_examples=400, **COMMON)
hypothesis.settings.load_profile("fast")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for what a shell starts in the background: some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # tensors are tiny here: threads would only wait for each other

from stallfree.engine import window  # noqa: E402 (behind the choice of kernels)

window.LEAST_PORTION = 8  # elements: small windows go to the host in portions, too


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--seed", type=int, default=0, help="of torch's and Python's generators, at the start of each test")


def pytest_report_header(config):
    return f"seed: {config.getoption('--seed')} (--seed), CUDA devices: {torch.cuda.device_count()}"


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--run-slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: --run-slow"))


@pytest.fixture(autouse=True)
def seed(request):
    value = request.config.getoption("--seed")
    torch.manual_seed(value)
    random.seed(value)
    yield value
    left_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert left_on, "gradients are off now: every test after this one would fail"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)
