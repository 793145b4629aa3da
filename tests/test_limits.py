"""Limits are known before they bite: what is too large is refused with a table, before anything is allocated."""

import ast
import gc
import re
import resource
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stallfree import ZenFlowAdamW, ZenFlowConfig, limits, planner
from stallfree.engine.streams import Streams
from stallfree.limits import GIB


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 64 GiB available, whose files are written by the test."""
    for name, place in (("PROC", "proc"), ("CGROUP", "cgroup")):
        (tmp_path / place).mkdir()
        monkeypatch.setattr(limits, name, tmp_path / place)

    def write(**files: str | int) -> None:
        for name, content in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(content))

    def group(path: str, limit: str, usage: str, size: str | int, used: int, stat: str = "") -> None:
        directory = tmp_path / "cgroup" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in ((limit, size), (usage, used), ("memory.stat", stat)):
            (directory / name).write_text(str(content))

    def group2(path: str, size: str | int, used: int, stat: str = "") -> None:
        group(path, "memory.max", "memory.current", size, used, stat)

    def group1(path: str, size: int, used: int, stat: str = "") -> None:
        group(f"memory/{path}", "memory.limit_in_bytes", "memory.usage_in_bytes", size, used, stat)

    def files(path: str, **contents: str) -> None:
        directory = tmp_path / "cgroup" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (directory / name.replace("__", ".")).write_text(content)

    write(proc__meminfo=f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    return SimpleNamespace(write=write, group1=group1, group2=group2, files=files)


def test_the_machine_without_control_groups(machine):
    assert limits.available_host_bytes() == 64 * GIB
    machine.group2("", "max", 5 * GIB)
    machine.group1("", 2**63 - 4096, 5 * GIB)
    assert limits.available_host_bytes() == 64 * GIB


def test_a_container_sees_its_limit_at_the_root(machine):
    machine.group2("", 8 * GIB, 3 * GIB)
    assert limits.available_host_bytes() == 5 * GIB
    machine.group2("", 8 * GIB, 9 * GIB)
    assert limits.available_host_bytes() == 0


def test_version_1(machine):
    machine.group1("", 8 * GIB, 3 * GIB)
    assert limits.available_host_bytes() == 5 * GIB


def test_cached_files_do_not_count_as_used(machine):
    """After reading a large data set nearly all of a limit is cache, which the system gives up."""
    machine.group2("", 8 * GIB, 8 * GIB, f"anon 1\ninactive_file {6 * GIB}\nactive_file 4096\n")
    assert limits.available_host_bytes() == 6 * GIB
    machine.group1("", 8 * GIB, 8 * GIB, f"inactive_file 1\ntotal_inactive_file {4 * GIB}\n")
    assert limits.available_host_bytes() == 4 * GIB


def test_a_group_below_the_root_and_those_around_it(machine):
    """As under systemd and Slurm, without a namespace of its own."""
    machine.write(proc__self__cgroup="0::/system.slice/job_7/step_0\n")
    machine.group2("system.slice/job_7/step_0", "max", GIB)
    machine.group2("system.slice/job_7", 16 * GIB, 4 * GIB)
    assert limits.available_host_bytes() == 12 * GIB
    machine.group2("system.slice/job_7/step_0", 3 * GIB, GIB)
    assert limits.available_host_bytes() == 2 * GIB
    machine.write(proc__self__cgroup="12:cpu,cpuacct:/other\n7:memory:/slurm/job_7\n0::/\n")
    machine.group1("slurm/job_7", 2 * GIB, GIB)
    assert limits.available_host_bytes() == GIB


def test_a_machine_that_says_nothing_is_not_limited(machine):
    machine.write(proc__meminfo="", proc__self__cgroup="")
    assert limits.available_host_bytes() == limits.UNKNOWN


def test_quotas_of_the_process_s_group_and_of_those_around_it(machine):
    assert limits.quota_cores() == limits.UNKNOWN
    machine.files("", cpu__max="max 100000")
    assert limits.quota_cores() == limits.UNKNOWN
    machine.write(proc__self__cgroup="0::/user/job\n")
    machine.files("user", cpu__max="650000 100000")
    machine.files("user/job", cpu__max="1600000 100000")
    assert limits.quota_cores() == 6


def test_a_quota_of_version_1(machine):
    machine.write(proc__self__cgroup="5:cpu,cpuacct:/job\n")
    machine.files("cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert limits.quota_cores() == limits.UNKNOWN
    machine.files("cpu/job", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
    assert limits.quota_cores() == 4


@pytest.mark.parametrize("preset", ["stallfree", "device"])
def test_a_model_beyond_a_control_group_is_refused_with_the_table(machine, preset):
    """On the CPU both halves are host memory."""
    machine.group2("", 40 << 20, 30 << 20)
    with pytest.raises(MemoryError, match=r"(?s)0\.01 GiB are available.*in flight.*Ways out"):
        ZenFlowAdamW([nn.Parameter(torch.ones(1024, 1024))], preset=preset)
    machine.group2("", 400 << 20, 30 << 20)
    ZenFlowAdamW([nn.Parameter(torch.ones(1024, 1024))], preset=preset).close()


WAY = re.compile(r"(\w+)=(\S+) \((\d+\.\d\d) GiB\)")


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "settings, interval",
    [
        (dict(), []),  # auto, which gives way to 2 before it says so; S=1 needs as much
        (dict(update_interval=2), []),
        (dict(update_interval=4), [("update_interval", "2")]),
        (dict(update_interval=4, max_update_interval=8), [("max_update_interval", "4")]),
        (dict(max_update_interval=8), [("max_update_interval", "2")]),
        (dict(interval_schedule={9: 4}, max_update_interval=4, moments_dtype="bfloat16"), []),
        (dict(preset="zero-offload"), []),
    ],
)
def test_each_way_out_of_a_short_machine_needs_less(monkeypatch, place, settings, interval):
    device = torch.device(place)
    named = [(f"{i}.w", nn.Parameter(torch.empty(1 << 13, 1 << 14, device="meta"))) for i in range(8)]
    monkeypatch.setattr(limits, "available_host_bytes", lambda: GIB)
    monkeypatch.setattr(limits, "available_device_bytes", lambda device: 1000 * GIB)
    needed = planner.plan(named, planner.with_room(named, ZenFlowConfig(**settings)))
    with pytest.raises(MemoryError) as refused:
        planner.check_fits(needed, device)
    *_, ways = str(refused.value).splitlines()
    assert re.search(r"^Ways out: .*a larger machine$", ways)
    found = WAY.findall(ways)
    names = {name for name, _, _ in found}
    assert ("moments_dtype" in names) == ("moments_dtype" not in settings)
    assert ("preset" in names) == ("preset" not in settings)
    assert [way[:2] for way in found if "interval" in way[0]] == interval
    for name, value, size in found:
        kept = {key: value for key, value in settings.items() if name != "preset" or key == "moments_dtype"}
        changed = planner.with_room(named, ZenFlowConfig(**kept | {name: ast.literal_eval(value)}))
        host = planner.plan(named, changed).host_beside(device)
        assert f"{host / GIB:.2f}" == size
        assert host < needed.host_beside(device)


# The device


@pytest.fixture
def gpu(monkeypatch):
    """16 GiB, of which 1 GiB is free, and 1.5 GiB are torch's and not in use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB + (GIB >> 1))
    monkeypatch.setattr(limits, "available_host_bytes", lambda: 1000 * GIB)
    return torch.device("cuda", 0)


def test_state_beyond_the_device_is_refused_with_the_table(gpu):
    weights = [("w", nn.Parameter(torch.empty(1 << 14, 1 << 14, device="meta")))]
    planner.check_fits(planner.plan(weights, ZenFlowConfig(topk_ratio=0.1)), gpu)
    with pytest.raises(MemoryError, match=r"(?s)4\.00 GiB of memory on cuda:0; 2\.50 GiB are.*device memory.*topk"):
        planner.check_fits(planner.plan(weights, ZenFlowConfig(preset="device")), gpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_construction_refuses_what_the_device_cannot_hold(monkeypatch):
    param = nn.Parameter(torch.ones(1024, 1024, device="cuda"))
    gc.collect()  # what other tests have left
    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(limits, "available_device_bytes", lambda device: 1 << 20)
    with pytest.raises(MemoryError, match="are free"):
        ZenFlowAdamW([param], preset="device")
    gc.collect()
    assert torch.cuda.memory_allocated() == before


# Registered memory


@pytest.mark.parametrize(
    "limit, said", [(64 << 20, "may lock 0.062 GiB"), (resource.RLIM_INFINITY, "may lock as much as it likes")]
)
def test_a_registration_that_fails_names_size_limit_and_way_out(monkeypatch, limit, said):
    def refuse(status):
        raise RuntimeError("out of memory (2)")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *arguments: 2))
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    streams = Streams.__new__(Streams)
    streams.device = torch.device("cuda", 0)
    with pytest.raises(MemoryError) as caught:
        streams.register(torch.empty(256 << 20, dtype=torch.uint8))
    for text in ("0.250 GiB of host memory", said, "out of memory (2)", "ulimit -l unlimited", "--ulimit memlock=-1"):
        assert text in str(caught.value)
