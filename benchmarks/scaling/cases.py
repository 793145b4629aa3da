"""Models, machines and what is known of both: measured, or marked as an assumption."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import nn

from stallfree import ZenFlowConfig
from stallfree.engine.blocks import Block, build_blocks, classify
from stallfree.limits import GIB, SPARE
from stallfree.planner import plan

TOKENS = 8 * 1024  # of a GPU and step
WORLDS = (1, 2, 8, 64, 1024)
INTERVALS = (1, 2, 4, 8)
HIDDEN = 1.01  # times the step with a host and copies up that take no time: no more is called hidden
ROOM = 0.85  # of a step that host work or a copy may take before fewer tokens are said not to do

# Measured on one H200 with its host: benchmarks/results/step-h200-2026-11-29.md
FORWARD = 0.36  # of forward and backward: 37 to 42 of 107 to 113 ms
KERNELS_S = 5.0e-3 / 1.544e9  # per parameter of a rank: 102.3 ms of kernels against 97.3
ADAMW_S = 2.4e-3 / 1.544e9  # of that in `step()`
PCIE = 55e9  # bytes per second, one way
BOTH_WAYS = 101 / 110  # of it if the other way is in use
THREAD_S = 2.02e-9  # of one thread, for an element's window at S=4; with DRAM and EXPONENT it gives what was measured
DRAM = 151e9  # with 4, 8, 12, 14 threads: 0.510, 0.287, 0.241, 0.234 ns (0.509, 0.287, 0.243, 0.235)
EXPONENT = 4
THREADS = 14

# Measured on a Zen 5 core: benchmarks/results/replay-zen5-2core.md. Only how arithmetic grows with S is used.
ARITHMETIC = (0.094, 0.128)  # ns for a window, and for each of its steps

# Assumptions
FLOPS = 494e12  # of models from 7B on; from 352 ms for 4,096 tokens of the 7B model
NVLINK = 360e9  # bytes per second and GPU in a collective inside a node, and over nodes with a 400 Gb/s adapter for each GPU
NIC = 45e9  # of one adapter, where only ranks of the same place in their nodes talk
BASE_S, RING_S, RING_NET_S = 8.4e-6, 3.4e-6, 14e-6  # of a ring: start, a step inside a node, a step between nodes: NCCL's own
TREE_S, TREE_NET_S = 30e-6, 15e-6  # all-reduce: inside a node (20 to 40 us); per doubling of nodes, each way (10 to 20 us)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine and what its GPUs share."""

    gpus: int
    threads: int  # for the host's work, of each rank
    dram: float  # bytes per second, of all ranks
    paired: bool  # two GPUs share a PCIe x16 link
    memory: int


MEASURED = Host(gpus=1, threads=THREADS, dram=DRAM, paired=False, memory=128 * GIB)
# Assumed: two sockets of 56 cores, 8 channels of DDR5-4800 each, 78% of 614 GB/s; 12 threads for each of 8 ranks.
NODE = Host(gpus=8, threads=12, dram=480e9, paired=True, memory=2048 * GIB)


@dataclass(frozen=True)
class Model:
    """A shape of Qwen2.5."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    vocabulary: int
    tied: bool = False
    measured_s: float | None = None  # of forward and backward of TOKENS on one GPU

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters without memory. Biases are left out."""
        hidden, inner, narrow = self.hidden, self.inner, 128 * self.groups
        shapes = {"embed_tokens": (self.vocabulary, hidden)}
        for layer in range(self.layers):
            matrices = {"q": (hidden, hidden), "k": (narrow, hidden), "v": (narrow, hidden), "o": (hidden, hidden)}
            matrices |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            shapes |= {f"layers.{layer}.{name}_proj": shape for name, shape in matrices.items()}
        if not self.tied:
            shapes["lm_head"] = (self.vocabulary, hidden)
        empty = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
        return [(f"{name}.weight", nn.Parameter(tensor)) for name, tensor in empty.items()]

    @cached_property
    def parameters(self) -> int:
        return sum(param.numel() for _, param in self.named())

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        return (self.parameters - self.head * (1 if self.tied else 2)) // self.layers

    @property
    def compute_s(self) -> float:
        """Forward and backward of TOKENS: measured, or 6 operations per token and parameter of a matrix product."""
        return self.measured_s or 6 * (self.layers * self.layer + self.head) * TOKENS / FLOPS


MODELS = (
    Model("1.5B", 1536, 8960, 28, 12, 2, 151936, tied=True, measured_s=0.1995),
    Model("7B", 3584, 18944, 28, 28, 4, 152064, measured_s=2 * 0.352),  # measured with half the tokens
    Model("32B", 5120, 27648, 64, 40, 8, 152064),
    Model("72B", 8192, 29568, 80, 64, 8, 152064),
)


@cache
def blocks_of(model: Model, interval: int) -> tuple[Block, ...]:
    config = ZenFlowConfig(update_interval=interval)
    return tuple(build_blocks(classify(model.named(), config)[1], config))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on some GPUs."""

    model: Model
    world: int
    interval: int = 4  # S; 0: forward and backward alone
    host: Host | None = None  # None: the measured one up to two GPUs, then NODE
    shard: int | None = None  # ranks that a model is spread over (HSDP if fewer than all)
    tokens: int = TOKENS  # of a GPU and step
    free: bool = False  # what S is there to hide, host work and copies up, takes no time
    tree_net_s: float = TREE_NET_S

    @property
    def at(self) -> Host:
        return self.host or (MEASURED if self.world < NODE.gpus else NODE)

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return self.model.compute_s * self.tokens / TOKENS

    @property
    def ranks(self) -> int:
        return self.shard or self.world

    @property
    def latency_s(self) -> float:
        """Of an all-gather or reduce-scatter."""
        if self.ranks == 1:
            return 0.0
        between = max(1, self.ranks // NODE.gpus) - 1
        return BASE_S + between * RING_NET_S + (self.ranks - 1 - between) * RING_S

    def transfer_s(self, nbytes: float) -> float:
        """Likewise, for so many bytes in all."""
        return nbytes * (self.ranks - 1) / self.ranks / NVLINK

    def across_s(self, nbytes: float) -> float:
        """With HSDP: the sum of the shards over the nodes, after the reduce-scatter inside each."""
        copies = self.world // self.ranks
        if copies == 1:
            return 0.0
        return 2 * nbytes / self.ranks * (copies - 1) / copies / NIC + TREE_S + 2 * math.log2(copies) * self.tree_net_s

    @property
    def flat_bytes(self) -> int:
        """Of the all-reduce in `step()`: channels that are split over ranks, and two sums for each weight."""
        weights = [weight for block in blocks_of(self.model, 4) for weight in block.weights]
        return 4 * (sum(weight.channels for weight in weights if weight.channel_dim == 1) + 2 * len(weights) + 1)

    @property
    def flat_s(self) -> float:
        if self.ranks == 1:
            return 0.0
        nodes = max(1, self.ranks // NODE.gpus)
        return TREE_S + 2 * math.log2(nodes) * self.tree_net_s + 2 * self.flat_bytes / NVLINK

    @property
    def host_bytes(self) -> float:
        """Memory of a machine."""
        config = ZenFlowConfig(update_interval=self.interval or 4)
        return plan(self.model.named(), config).host / self.ranks * self.at.gpus

    @property
    def device_bytes(self) -> float:
        """Weights and state of selected channels, without gradients, gathered layers, activations and staging."""
        config = ZenFlowConfig(update_interval=self.interval or 4)
        return (2 * self.model.parameters + plan(self.model.named(), config).device_state) / self.ranks

    @property
    def fits(self) -> bool:
        return self.host_bytes <= SPARE * self.at.memory and self.device_bytes <= SPARE * 141e9
