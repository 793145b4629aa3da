"""Which cores the host's threads may have: those of the process, shared with the ranks beside it."""

import os

import pytest
import torch

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine import cores as module
from stallfree.engine.cores import available_cores, host_cores, near
from stallfree.engine.host import HostState


@pytest.fixture
def cores(monkeypatch, tmp_path):
    """available_cores() of a rank: bound to `mine`, started by a process bound to `launcher`, under a quota."""

    def available(mine, launcher=None, ranks=1, rank=0, quota=1 << 20):
        bound = {0: set(mine), os.getppid(): set(launcher if launcher is not None else mine)}
        monkeypatch.setattr(os, "sched_getaffinity", bound.__getitem__)
        monkeypatch.setattr(module, "quota_cores", lambda: quota)
        monkeypatch.setattr(module, "NODES", tmp_path)
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
    assert dealt(cores, 2, lambda rank: range(64), quota=8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dealt(cores, 4, lambda rank: range(2)) == [[0], [1], [0], [1]]


def test_ranks_with_cores_of_their_own_keep_them(cores):
    bound = [range(first, first + 16) for first in range(0, 128, 16)]
    assert dealt(cores, 8, bound.__getitem__, launcher=range(128)) == [list(mine) for mine in bound]


def test_ranks_bound_to_a_numa_node_share_it(cores):
    nodes = [range(32), range(32), range(32, 64), range(32, 64)]
    given = dealt(cores, 4, nodes.__getitem__, launcher=range(64))
    assert given == [list(range(first, first + 16)) for first in (0, 16, 32, 48)]


def test_shares_are_of_one_node(cores, tmp_path):
    """Two sockets of eight cores with two threads each, which most systems number so."""
    for node, text in enumerate(("0-7,16-23", "8-15,24-31\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    halves = [[*range(8)], [*range(16, 24)], [*range(8, 16)], [*range(24, 32)]]
    assert dealt(cores, 4, lambda rank: range(32)) == halves
    assert dealt(cores, 2, lambda rank: range(32)) == [halves[0] + halves[1], halves[2] + halves[3]]
    assert dealt(cores, 2, lambda rank: range(4, 12)) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert cores(range(32), quota=4) == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["", "0-", "x", "3-1"])
def test_a_node_that_nobody_can_read_changes_nothing(cores, tmp_path, text):
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text(text)
    assert dealt(cores, 2, lambda rank: range(4)) == [[0, 1], [2, 3]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_host_memory_is_touched_near_the_host_s_threads(monkeypatch):
    """Where they are bound to cores: the training thread runs there for a while, and then where it did before."""
    before, seen, build = os.sched_getaffinity(0), [], HostState.__init__

    def noted(self, *arguments):
        seen.append(os.sched_getaffinity(0))
        build(self, *arguments)

    monkeypatch.setattr(HostState, "__init__", noted)
    for pinned in (True, False):
        optimizer = ZenFlowAdamW([torch.nn.Parameter(torch.ones(64, 64))], min_numel=0, host_threads=1, pin_host_threads=pinned)
        assert os.sched_getaffinity(0) == before
        assert seen.pop() == (set(optimizer.engine.worker.cores) if pinned else before)
        optimizer.close()
    assert len(before) > 1


def test_a_thread_that_may_not_move_stays(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with near([0]):
        pass


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
