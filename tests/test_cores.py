"""Which cores the host's threads may have: those of the process, shared with the ranks beside it."""

import os

import pytest

from stallfree import ZenFlowConfig
from stallfree.engine import host


@pytest.fixture
def cores(monkeypatch):
    """available_cores() of a rank: bound to `mine`, started by a process bound to `launcher`, under a quota."""

    def available(mine, launcher=None, ranks=1, rank=0, quota=1 << 20):
        bound = {0: set(mine), os.getppid(): set(launcher if launcher is not None else mine)}
        monkeypatch.setattr(os, "sched_getaffinity", bound.__getitem__)
        monkeypatch.setattr(host, "quota_cores", lambda: quota)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        return host.available_cores()

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


def test_a_launcher_that_is_gone(cores, monkeypatch):
    def affinity(process):
        if process:
            raise ProcessLookupError(process)
        return set(range(8))

    cores(range(8), ranks=2, rank=1)
    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert host.available_cores() == [4, 5, 6, 7]


def test_beside_a_gpu_two_cores_are_left_for_training(cores):
    cores(range(8))
    assert host.host_cores(ZenFlowConfig(), on_gpu=True) == (6, None)
    assert host.host_cores(ZenFlowConfig(pin_host_threads=True), on_gpu=True) == (6, list(range(2, 8)))
    assert host.host_cores(ZenFlowConfig(), on_gpu=False) == (4, None)


def test_ranks_beside_others_stay_on_their_share(cores):
    cores(range(16), ranks=2, rank=1)
    assert host.host_cores(ZenFlowConfig(), on_gpu=True) == (6, list(range(8, 16)))
    assert host.host_cores(ZenFlowConfig(pin_host_threads=True), on_gpu=True) == (6, list(range(10, 16)))
    assert host.host_cores(ZenFlowConfig(), on_gpu=False) == (4, None)
