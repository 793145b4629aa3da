"""A host that replays nothing: what is left of a step's time is what launching, kernels and copies cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stallfree import ZenFlowAdamW
from stallfree.engine.memory import PAGE
from stallfree.engine.window import BlockState
from stallfree.kernels.block import BlockKernel, BlockLayout, Targets
from stallfree.kernels.queue import HostQueue
from stallfree.kernels.windows import WindowWork


class Aside:
    """Publishes what comes up, gradients as nobody has replayed them, beside the weights: these stay as they are."""

    def __init__(self, kernel: BlockKernel, blocks: Sequence[BlockState]) -> None:
        self._kernel = kernel
        size = max(block.block.numel * block.block.dtype.itemsize for block in blocks)
        room = torch.empty(-(-size // 8), dtype=torch.int64, device=blocks[0].half.device)
        self._instead: dict[int, Tensor] = {}  # by a weight's address: all blocks share the room
        for block in blocks:
            parts = room.view(block.block.dtype)[: block.block.numel].split([shard.numel() for shard in block.block.shards])
            for shard, part in zip(block.block.shards, parts, strict=True):
                self._instead[shard.data_ptr()] = part.view(shard.shape)

    def publish(
        self, layout: BlockLayout, targets: Targets, weights: Sequence[Tensor | None], values: Tensor, low: int = 0
    ) -> None:
        instead = [None if weight is None else self._instead[weight.data_ptr()] for weight in weights]
        self._kernel.publish(layout, targets, instead, values, low)


def take_host_away(optimizer: ZenFlowAdamW) -> None:
    """From now on no gradient is replayed: deferred channels keep the weights they have. All else goes on, hand-overs too."""
    engine = optimizer.engine
    if not engine.blocks:  # nothing is deferred
        return
    engine.publishing.kernel = Aside(engine.kernel, engine.blocks)
    for state in engine.weights.values():
        for flat in state.host.flats:  # hand-overs would be the first to touch these pages, a few in each call
            flat.view(-1).view(torch.uint8)[::PAGE].add_(0)
    queue: HostQueue = engine.worker.queue
    submit = queue.submit

    def submit_idle(windows: Sequence[WindowWork]) -> list[int]:
        return submit([window._replace(places=(), publish=False) for window in windows])

    queue.submit = submit_idle  # type: ignore[method-assign]
