"""What becomes of processes and of what the optimizer holds: forks, data loaders, exits, deletion."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from histories import backward
from torch import nn
from torch.utils.data import DataLoader, Dataset

from stallfree import ZenFlowAdamW

SMALL = dict(topk_ratio=0.25, update_interval=2, full_warm_up_rounds=0, select_interval=2, min_numel=0)
TRAINING = """
import os, sys, torch
from torch import nn
from stallfree import ZenFlowAdamW
torch.set_num_threads(1)
def train(model, optimizer, calls):
    for _ in range(calls):
        model(torch.randn(4, 256)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
def build(**settings):
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    settings = dict(topk_ratio=0.25, update_interval=2, full_warm_up_rounds=0, select_interval=2, min_numel=0) | settings
    return model, ZenFlowAdamW(model.named_parameters(), lr=1e-3, **settings)
"""
KERNELS = ["torch", "auto"]


def python(program: str, **options) -> subprocess.CompletedProcess:
    """Of a process of its own, which must end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", TRAINING + program]
    return subprocess.run(command, env=environment, timeout=100, capture_output=True, text=True, **options)


def assert_clean(done: subprocess.CompletedProcess, code: int = 0) -> None:
    assert (done.returncode, done.stderr) == (code, "")


# The end of a process


@pytest.mark.parametrize(
    "kernel, ending", [("torch", ""), ("auto", ""), ("auto", "sys.exit(0)"), ("torch", "del model, optimizer")]
)
def test_a_process_ends_with_work_in_flight(kernel, ending):
    """No hang, no message."""
    assert_clean(
        python(f"""
model, optimizer = build(host_kernel={kernel!r})
optimizer.engine.delay = lambda place: 0.1 if place == "worker" else 0.0
train(model, optimizer, 5)
{ending}
""")
    )


@pytest.mark.parametrize(
    "kernel, where",
    [("torch", "raise ValueError('unhandled')"), ("auto", "model(torch.randn(4, 256)).sum().backward(); 1 / 0")],
)
def test_a_process_ends_after_an_unhandled_exception(kernel, where):
    """With its traceback and nothing else."""
    done = python(f"""
model, optimizer = build(host_kernel={kernel!r})
optimizer.engine.delay = lambda place: 0.1 if place == "worker" else 0.0
train(model, optimizer, 5)
{where}
""")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] in ("ValueError: unhandled", "ZeroDivisionError: division by zero")


def test_a_process_ends_when_a_thread_trains():
    assert_clean(
        python("""
import threading
model, optimizer = build()
thread = threading.Thread(target=train, args=(model, optimizer, 20))
thread.start()
thread.join()
""")
    )


# Forks


def test_a_forked_child_is_told_and_ends_by_itself():
    """Every call that needs the threads raises; the parent goes on as if nothing had happened."""
    assert_clean(
        python("""
model, optimizer = build()
train(model, optimizer, 5)
child = os.fork()
if not child:
    refused = 0
    for call in (lambda: train(model, optimizer, 1), optimizer.flush, optimizer.state_dict):
        try:
            call()
        except RuntimeError as error:
            refused += "before a fork" in str(error)
    optimizer.close()
    del model, optimizer
    sys.exit(7 if refused == 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
train(model, optimizer, 5)
optimizer.flush()
assert optimizer.metrics()["call"] == 10
""")
    )


def test_multiprocessing_by_fork_beside_an_optimizer():
    assert_clean(
        python("""
import multiprocessing
model, optimizer = build()
train(model, optimizer, 5)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, range(-4, 4)) == [4, 3, 2, 1, 0, 1, 2, 3]
    train(model, optimizer, 5)
process = multiprocessing.get_context("fork").Process(target=print, args=("child",))
process.start()
process.join()
assert process.exitcode == 0
optimizer.flush()
assert optimizer.metrics()["call"] == 10
""")
    )


class Numbers(Dataset):
    """Its workers may die at an item."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.dies_at, self.parent = dies_at, os.getpid()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.dies_at and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((8,), float(index))


def loader_run(workers: int, dies_at: int | None = None) -> list[torch.Tensor]:
    """The flushed weights of two epochs; a death of a worker is met by another pass over the data from the same place.

    Its signal raises wherever the main thread is, though never within a call: the number of calls says which batch is next.
    """
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=1e-2, **SMALL)
    for epoch in range(2):
        data = Numbers(dies_at if epoch == 0 else None)
        while (done := optimizer.metrics()["call"] - 6 * epoch) < 6:
            context = "fork" if workers else None
            try:
                for place, batch in enumerate(DataLoader(data, 4, num_workers=workers, multiprocessing_context=context)):
                    if place < done:
                        continue
                    model(batch).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                optimizer.zero_grad()
                data.dies_at = None
    assert optimizer.metrics()["call"] == 12
    optimizer.flush()
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    return weights


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("dies_at", [None, 13])
def test_a_data_loader_with_forked_workers_beside_an_optimizer(dies_at):
    """Also one of whose workers is killed: the optimizer is where it was, and training goes on from the same batch."""
    for ours, expected in zip(loader_run(2, dies_at), loader_run(0), strict=True):
        assert torch.equal(ours, expected)


# What is left behind


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def build_and_train(mib: int, **settings) -> tuple[nn.Module, ZenFlowAdamW]:
    """With about so much host memory for state and slots."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(max(1, mib // 5))))
    optimizer = ZenFlowAdamW(model.named_parameters(), **SMALL, max_update_interval=2, **settings)
    params = list(model.parameters())
    for _ in range(3):
        backward(params, [torch.ones_like(p) for p in params])
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def cycle(number: int) -> list[weakref.ref]:
    """Builds, trains and lets go of an optimizer, in turns by closing it and by forgetting it, with both kernels."""
    model, optimizer = build_and_train(50, host_kernel=KERNELS[number // 2 % 2])
    assert optimizer.metrics()["host_bytes"] > 40 << 20
    gone = [weakref.ref(optimizer), weakref.ref(optimizer.engine)]
    if number % 2:
        optimizer.close()
    del optimizer
    gc.collect()
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    return gone


def test_deleted_optimizers_leave_no_memory_thread_or_hook():
    for number in range(4):
        cycle(number)
    memory, threads, tasks = resident_bytes(), threading.active_count(), len(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        assert not any(alive() for alive in cycle(number))
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
    assert len(os.listdir("/proc/self/task")) <= tasks
    assert resident_bytes() - memory < 50 << 20, "twenty of 50 MB have left as much as one"


def test_shared_memory_is_not_used():
    """/dev/shm of a container is 64 MB by default."""

    def mapped() -> set[str]:
        return {
            line[line.index("/dev/shm") :] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line
        }

    before = set(os.listdir("/dev/shm")), mapped()  # a data loader of an earlier test may have left some
    model, optimizer = build_and_train(10)
    optimizer.state_dict()
    assert set(os.listdir("/dev/shm")) <= before[0]
    assert mapped() <= before[1]
    optimizer.close()
    del model
