"""What is refused in a job of several processes, with the way out, before anything is changed."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stallfree import ZenFlowAdamW

SMALL = dict(min_numel=0, full_warm_up_rounds=0, update_interval=2)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 6))


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_plain_parameters_in_several_processes_are_refused_with_the_way_out(process_group, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(RuntimeError, match="fully_shard"):
        ZenFlowAdamW([parameter()], **SMALL)


def test_plain_parameters_do_not_join_in_several_processes(process_group, monkeypatch):
    optimizer = ZenFlowAdamW([parameter()], **SMALL)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(RuntimeError, match="fully_shard"):
        optimizer.add_param_group(dict(params=[parameter()]))
    assert len(optimizer.param_groups) == 1


def test_a_ddp_model_of_one_process_is_refused_with_the_way_out(process_group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))

    def train():
        optimizer = ZenFlowAdamW(model.parameters(), **SMALL)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"^DistributedDataParallel cannot be used.*fully_shard"):
        train()


def test_a_parameter_that_is_a_sum_to_be_made_is_refused(process_group):
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh

    weight = DTensor.from_local(torch.ones(4, 6), init_device_mesh("cpu", (1,)), [Partial()])
    with pytest.raises(TypeError, match=r"(?s)weight.*partial"):
        ZenFlowAdamW([("weight", nn.Parameter(weight))], **SMALL)


def test_shards_in_host_memory_under_a_gpu_mesh_are_refused_with_the_way_out():
    """What fully_shard makes under CPUOffloadPolicy; without a GPU the mesh has to be a stand-in."""

    class Parameter(nn.Parameter):
        device_mesh = SimpleNamespace(device_type="cuda")
        placements = ()
        _local_tensor = torch.ones(4, 6)

    with pytest.raises(TypeError, match=r"(?s)weight.*CPUOffloadPolicy.*without an offload_policy"):
        ZenFlowAdamW([("weight", Parameter(torch.ones(4, 6)))], **SMALL)
