"""Which cores the host's threads may have: those of the process, shared with the ranks beside it."""

import json
import os
import subprocess
import sys

import pytest

from stallfree import ZenFlowConfig
from stallfree.engine import cores as module
from stallfree.engine.cores import available_cores, host_cores, near


@pytest.fixture
def cores(monkeypatch, tmp_path):
    """available_cores() of a rank: bound to `mine`, started by a process bound to `launcher`, under a quota."""

    def available(mine, launcher=None, ranks=1, rank=0, quota=1 << 20):
        bound = {0: set(mine), os.getppid(): set(launcher if launcher is not None else mine)}
        monkeypatch.setattr(os, "sched_getaffinity", bound.__getitem__)
        monkeypatch.setattr(module, "quota_cores", lambda: quota)
        monkeypatch.setattr(module, "SYSTEM", tmp_path)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        return available_cores()

    return available


def dealt(cores, count, of, **others):
    """What the ranks get, when they are bound as `of` says."""
    return [cores(of(rank), ranks=count, rank=rank, **others) for rank in range(count)]


def test_a_process_alone_has_what_it_is_bound_to(cores):
    assert cores(range(4, 20), launcher=range(64)) == list(range(4, 20))
    assert cores(range(16), quota=6) == list(range(6))
    assert cores(range(16), quota=0) == [0]  # half a core


def test_unbound_ranks_share(cores):
    assert dealt(cores, 4, lambda rank: range(16)) == [list(range(first, first + 4)) for first in (0, 4, 8, 12)]
    assert dealt(cores, 2, lambda rank: range(64), quota=8) == [[0, 1, 2, 3], [32, 33, 34, 35]]
    assert dealt(cores, 4, lambda rank: range(2)) == [[0], [1], [0], [1]]


def test_ranks_with_cores_of_their_own_keep_them(cores):
    bound = [range(first, first + 16) for first in range(0, 128, 16)]
    assert dealt(cores, 8, bound.__getitem__, launcher=range(128)) == [list(mine) for mine in bound]


def test_ranks_bound_to_a_numa_node_share_it(cores):
    nodes = [range(32), range(32), range(32, 64), range(32, 64)]
    given = dealt(cores, 4, nodes.__getitem__, launcher=range(64))
    assert given == [list(range(first, first + 16)) for first in (0, 16, 32, 48)]


@pytest.fixture
def two_sockets(tmp_path):
    """Of eight cores with two threads each, numbered as most systems do."""
    for node, text in enumerate(("0-7,16-23", "8-15,24-31\n")):
        write(tmp_path / f"node/node{node}/cpulist", text)
    for core in range(32):
        write(tmp_path / f"cpu/cpu{core}/topology/thread_siblings_list", f"{core % 16},{core % 16 + 16}\n")


def write(path, text):
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_shares_are_of_one_node_and_of_whole_cores(cores, two_sockets):
    shares = [[*range(first, first + 4), *range(first + 16, first + 20)] for first in (0, 4, 8, 12)]
    assert dealt(cores, 4, lambda rank: range(32)) == shares
    assert dealt(cores, 2, lambda rank: range(32)) == [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]
    assert dealt(cores, 2, lambda rank: range(4, 12)) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_under_a_quota_shares_are_of_both_nodes(cores, two_sockets):
    assert dealt(cores, 4, lambda rank: range(32), quota=8) == [[0, 16], [4, 20], [8, 24], [12, 28]]
    assert dealt(cores, 4, lambda rank: range(32), quota=17) == [
        [0, 1, 16, 17],
        [4, 5, 20, 21],
        [8, 9, 24, 25],
        [12, 13, 28, 29],
    ]
    assert cores(range(32), quota=4) == [0, 1, 16, 17]


@pytest.mark.parametrize("text", ["", "0-", "x", "3-1"])
def test_a_list_that_nobody_can_read_changes_nothing(cores, tmp_path, text):
    write(tmp_path / "node/node0/cpulist", text)
    write(tmp_path / "cpu/cpu0/topology/thread_siblings_list", text)
    assert dealt(cores, 2, lambda rank: range(4)) == [[0, 1], [2, 3]]


NEAR = """
import json, os, torch
from stallfree import ZenFlowAdamW
from stallfree.engine.host import HostState

def allowed():
    return [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]

seen, build = [], HostState.__init__

def noted(self, *arguments):
    build(self, *arguments)
    seen.append(sorted(os.sched_getaffinity(0)))

HostState.__init__ = noted
torch.set_num_threads(2)
weight = torch.nn.Parameter(torch.ones(2048, 2048, dtype=torch.bfloat16))
optimizer = ZenFlowAdamW([weight], host_threads=1, pin_host_threads=True, preset="zero-offload")
cores = optimizer.engine.worker.cores
optimizer.close()
torch.ones(2048, 2048).mul_(2.0)
print(json.dumps([cores, seen, allowed(), torch.get_num_threads()]))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_host_memory_is_touched_near_the_host_s_threads():
    """Where these are bound: the training thread runs there for a while, and no thread that stays."""
    finished = subprocess.run([sys.executable, "-c", NEAR], capture_output=True, text=True, check=True, timeout=100)
    cores, seen, allowed, threads = json.loads(finished.stdout)
    assert seen == [cores]
    assert len(cores) == 1
    assert all(task == sorted(os.sched_getaffinity(0)) for task in allowed), "nobody is left where the host's threads were"
    assert threads == 2


def test_a_thread_that_may_not_move_stays(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with near([0]):
        pass


@pytest.mark.parametrize("name", ["sched_setaffinity", "set_num_threads"])
@pytest.mark.parametrize("moment", [0, 1])
def test_ctrl_c_as_the_thread_moves_leaves_it_where_it_was(monkeypatch, name, moment):
    """There, or back."""
    now = {"sched_setaffinity": {0, 1}, "set_num_threads": 2}
    calls = []

    def change(what):
        def to(*value):
            now[what] = value[-1]
            calls.append(what)
            if what == name and calls.count(what) == moment + 1:
                raise KeyboardInterrupt

        return to

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: now["sched_setaffinity"])
    monkeypatch.setattr(os, "sched_setaffinity", change("sched_setaffinity"))
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: now["set_num_threads"])
    monkeypatch.setattr(module.torch, "set_num_threads", change("set_num_threads"))
    with pytest.raises(KeyboardInterrupt), near([0]):
        pass
    assert now == {"sched_setaffinity": {0, 1}, "set_num_threads": 2}


def test_a_launcher_that_is_gone(cores, monkeypatch):
    def affinity(process):
        if process:
            raise ProcessLookupError(process)
        return set(range(8))

    cores(range(8), ranks=2, rank=1)
    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert available_cores() == [4, 5, 6, 7]


def test_beside_a_gpu_two_cores_are_left_for_training(cores):
    cores(range(8))
    assert host_cores(ZenFlowConfig(), on_gpu=True) == (6, None)
    assert host_cores(ZenFlowConfig(pin_host_threads=True), on_gpu=True) == (6, list(range(2, 8)))
    assert host_cores(ZenFlowConfig(), on_gpu=False) == (4, None)


def test_ranks_beside_others_stay_on_their_share(cores):
    cores(range(16), ranks=2, rank=1)
    assert host_cores(ZenFlowConfig(), on_gpu=True) == (6, list(range(8, 16)))
    assert host_cores(ZenFlowConfig(pin_host_threads=True), on_gpu=True) == (6, list(range(10, 16)))
    assert host_cores(ZenFlowConfig(), on_gpu=False) == (4, None)
