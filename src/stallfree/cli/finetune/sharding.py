"""A model of several ranks: every layer and the rest are sharded by `fully_shard`, as docs/fsdp.md says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from stallfree.cli.finetune.ranks import Ranks


def load_sharded(load: Callable[[], tuple[Any, Any]], ranks: Ranks, device: str) -> tuple[Any, Any]:
    """What `load` gives, (model, tokenizer), with the model sharded over the ranks' devices.

    Rank by rank: host memory holds one whole model at a time, a GPU one whole layer.
    """
    mesh = init_device_mesh(device, (ranks.world,))
    for turn in range(ranks.world):
        if turn == ranks.rank:
            model, tokenizer = load()
            for layer in layers(model):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        ranks.wait()
    return model, tokenizer


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists: of a causal language model, its transformer layers."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers(child)


def drop_gathered(model: nn.Module) -> None:
    """Forget weights that a forward pass has left gathered for a backward pass that did not come.

    `fully_shard` would use them again, whatever has happened to the shards since.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
