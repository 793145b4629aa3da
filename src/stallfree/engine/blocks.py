"""Parameters -> residents, weights, blocks: who is updated where, which axis counts channels, and which blocks close together.

Everything here is decided once, from names, shapes and settings alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from stallfree.config import ZenFlowConfig
from stallfree.engine.schedule import loads
from stallfree.engine.sharding import Groups, check_sharding, groups_of, part_in, shard_of
from stallfree.kernels.block import Segment

ALIGNMENT = 64  # elements
STATE = ("master", "exp_avg", "exp_avg_sq")  # AdamW's, of an element
EVEN = 1.2  # the busiest call may have so many times what it has with smaller blocks
SHARES = 2  # of topk_ratio, for a rank that holds some of a table's channels: the best are not spread evenly
TABLE_NAMES = re.compile(r"embed|wte|wpe|word_embeddings|lookup|lm_head", re.IGNORECASE)
MATRIX_ROW = 64  # a parameter with three axes whose last one is at least so long is a stack of matrices, as of experts
TABLE_ROWS, TABLE_RATIO = 8192, 8  # a parameter with that many rows, that many times its columns, is a table by any name


@dataclass(eq=False)
class Resident:
    """A parameter that the device updates whole."""

    param: nn.Parameter
    name: str

    def __post_init__(self) -> None:
        shard = self.shard
        self.shape, self.dtype, self.contiguous, self.numel = shard.shape, shard.dtype, shard.is_contiguous(), shard.numel()
        self.whole_numel = self.param.numel()  # on all ranks
        self.spread = groups_of(self.param)

    @property
    def shard(self) -> Tensor:
        """What this rank updates: the parameter, or its part of it."""
        return shard_of(self.param)


@dataclass(eq=False)
class Weight:
    """A contiguous parameter split by channels: the selected ones live on the device, the deferred ones on the host."""

    param: nn.Parameter
    name: str
    channel_dim: int  # of the weight viewed as rows and columns (`row_axes`): 1 input columns, 0 rows
    selected_count: int  # channels the device holds once the first selection is made
    key: int  # place among all weights; keys the stochastic rounding

    def __post_init__(self) -> None:
        self.kind, self.contiguous = kind_of(self.name, self.param), True
        shard = self.shard
        self.shape, self.dtype, self.numel = shard.shape, shard.dtype, shard.numel()
        part = part_in(self.param)
        self.form = (part.shape, part.stride(), part.dtype, part.device)  # of what stands in `.grad`
        self.whole_numel = self.param.numel()  # on all ranks: blocks and phases follow from it, so that they are the same
        self.spread: Groups = groups_of(self.param)  # over which its squared norm adds up
        self.row_axes = row_axes(self.param, self.channel_dim)
        self.channel_axes = self.channel_dim, self.row_axes
        self.split: Groups = groups_of(self.param, self.channel_axes)  # over which a channel's does
        self.channels = _channels(shard, self.channel_dim, self.row_axes)
        self.length = self.numel // self.channels

    @property
    def shard(self) -> Tensor:
        """What this rank updates: the parameter, or its part of it."""
        return shard_of(self.param)

    def segment(self, selected: int) -> Segment:
        """The weight as device kernels see it, when the device holds this many of its channels."""
        return Segment(self.channels, self.length, self.channel_dim, selected)

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Channel-major view `[channels, length]` of a tensor shaped like the parameter (a copy if no view exists)."""
        flat = tensor.detach().reshape(tensor.shape[: self.row_axes].numel(), -1)
        return flat.t() if self.channel_dim == 1 else flat

    def shaped(self, rows: Tensor) -> Tensor:
        """The inverse: `[channels, length]` viewed with the parameter's shape."""
        return rows.t().unflatten(1, self.shape[1:]) if self.channel_dim == 1 else rows.view(self.shape)


@dataclass(eq=False)
class Block:
    """Weights of one dtype whose windows open and close together."""

    weights: list[Weight]
    phase: int = 0
    numel: int = field(init=False)
    deferred_numel: int = field(init=False)  # once the first selection is made

    def __post_init__(self) -> None:
        self.numel = sum(weight.numel for weight in self.weights)
        self.whole_numel = sum(weight.whole_numel for weight in self.weights)
        self.deferred_numel = sum(weight.numel - weight.selected_count * weight.length for weight in self.weights)
        self.dtype = self.weights[0].dtype

    @property
    def params(self) -> list[nn.Parameter]:
        return [weight.param for weight in self.weights]

    @property
    def shards(self) -> list[Tensor]:
        return [weight.shard for weight in self.weights]

    @property
    def row_numel(self) -> int:
        """Of the longest channel."""
        return max(weight.length for weight in self.weights)

    @property
    def state_numel(self) -> int:
        """fp32 words of the selected channels' state: three times their elements, aligned, and a step count for each."""
        numel = sum(weight.selected_count * weight.length for weight in self.weights)
        return 3 * aligned(numel) + sum(weight.selected_count for weight in self.weights)

    @property
    def exchange_bytes(self) -> int:
        """Of a hand-over: the state, and by channel what becomes of it."""
        places, channels = (sum(getattr(w, name) for w in self.weights) for name in ("selected_count", "channels"))
        return 4 * (self.state_numel + places + channels) if places else 0


def aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def describe(name: str, param: Tensor) -> str:
    """A parameter in a message: its name, or what can be said of one without."""
    return name or f"a parameter of shape {tuple(param.shape)}"


def kind_of(name: str, param: Tensor) -> str:
    """What a parameter is, layer numbers aside: "model.layers.3.mlp.up_proj.weight" is an "up_proj"."""
    parts = [part for part in name.split(".") if part and not part.isdigit()]
    if len(parts) > 1 and parts[-1] in ("weight", "bias"):
        parts = parts[:-1]
    return parts[-1] if parts else "x".join(str(size) for size in param.shape)


def channel_dims(model: nn.Module) -> dict[str, int]:
    """The channel axis of every weight, read off the modules that own them, for `ZenFlowConfig(channel_dim=...)`.

    As "auto" has it, and better where a module tells more than name and shape: rows for every embedding table, and for weights
    that store input channels as rows (GPT-2's Conv1D); columns for convolutions.

    >>> channel_dims(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)))
    {'0.weight': 0, '1.weight': 1}
    """
    axes: dict[str, int] = {}
    seen: dict[int, int] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(prefix=path, recurse=False):
            if param.dim() < 2:
                continue
            transposed = type(module).__name__ == "Conv1D" and param.dim() == 2 and hasattr(module, "nf")
            by_rows = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or transposed
            convolves = isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))  # never a stack, however long its kernel
            axis = 0 if by_rows else 1 if convolves else channel_dim_of(name, param, "auto")
            axes[name] = seen.setdefault(id(param), axis)  # tied weights: whoever comes first, the embedding
    return axes


def by_modules(config: ZenFlowConfig, model: nn.Module) -> ZenFlowConfig:
    """`config` with channel axes by `channel_dims` where it leaves them to "auto"."""
    return config.replace(channel_dim=channel_dims(model)) if config.channel_dim == "auto" else config


def channel_dim_of(name: str, param: Tensor, setting: Any) -> int:
    """The axis `ZenFlowConfig.channel_dim` gives a parameter."""
    if isinstance(setting, dict):
        if name in setting:
            setting = setting[name]
        else:
            parts = [part for part in setting if part in name]
            setting = setting[max(parts, key=len)] if name and parts else "auto"
    if setting != "auto":
        return int(setting)
    rows, columns = param.shape[0], param.numel() // max(param.shape[0], 1)
    table = bool(TABLE_NAMES.search(name)) or (rows >= TABLE_ROWS and rows >= TABLE_RATIO * columns)
    return 0 if (table and param.dim() == 2) or _is_stack(param) else 1


def classify(
    named: Sequence[tuple[str, nn.Parameter]], config: ZenFlowConfig, first_key: int = 0
) -> tuple[list[Resident], list[Weight]]:
    """Sort trainable parameters into residents and weights, keeping their order."""
    residents: list[Resident] = []
    weights: list[Weight] = []
    for name, param in named:
        small = param.dim() < 2 or param.numel() < max(config.min_numel, 1)
        if not small and shard_of(param).is_contiguous():
            axis = channel_dim_of(name, param, config.channel_dim)
            axes = row_axes(param, axis)
            channels = _channels(param, axis, axes)
            if round(config.topk_ratio * channels) < channels:
                here = _channels(shard_of(param), axis, axes)
                share = config.topk_ratio * (SHARES if here < channels and axes == 1 else 1)
                selected = min(round(share * here), here - 1)
                weights.append(Weight(param, name, axis, selected, first_key + len(weights)))
                continue
        residents.append(Resident(param, name))
    return residents, weights


def row_axes(param: Tensor, channel_dim: int) -> int:
    """How many leading axes number the rows of a weight: 1, or 2 of a stack of matrices, each row of which is a channel."""
    return 2 if channel_dim == 0 and _is_stack(param) else 1


def _is_stack(param: Tensor) -> bool:
    return param.dim() == 3 and param.shape[-1] >= MATRIX_ROW


def _channels(tensor: Tensor, channel_dim: int, row_axes: int) -> int:
    rows = tensor.shape[:row_axes].numel()
    return rows if channel_dim == 0 else tensor.numel() // rows


def build_blocks(weights: Sequence[Weight], config: ZenFlowConfig) -> list[Block]:
    """Neighbouring weights of one dtype, up to `block_numel` elements; phases share the elements out evenly.

    A layer is a block; of a large one there are several. Small ones share one, because each costs the launching thread time: up
    to what a phase has on average, or a half or a quarter of that if calls are more even then.
    """
    most = config.max_update_interval
    if not config.stagger:
        return _shared(weights, config, 2 * most)
    divisions = [_with_phases(_shared(weights, config, parts * most), most) for parts in (1, 2, 4)]
    busiest = [_busiest(blocks, most) for blocks in divisions]
    least = [min(loads) for loads in zip(*busiest, strict=True)]
    even = (all(load <= EVEN * best for load, best in zip(loads, least, strict=True)) for loads in busiest)
    return next((blocks for blocks, fits in zip(divisions, even, strict=True) if fits), divisions[-1])


def _shared(weights: Sequence[Weight], config: ZenFlowConfig, parts: int) -> list[Block]:
    """Blocks of at most so many parts of all elements, or one layer."""
    blocks: list[list[Weight]] = []
    for (_, dtype), layer in groupby(weights, lambda weight: (layer_of(weight.name), weight.dtype)):
        most = config.block_numel * 2 // dtype.itemsize
        share = min(most, _numel(weights) // parts)
        for members in _up_to(most, layer):
            if blocks and blocks[-1][0].dtype is dtype and _numel(blocks[-1]) + _numel(members) <= share:
                blocks[-1] += members
            else:
                blocks.append(members)
    return [Block(members) for members in blocks]


def _up_to(numel: int, weights: Iterable[Weight]) -> list[list[Weight]]:
    """Runs of weights with so many elements at most, or one weight."""
    runs: list[list[Weight]] = []
    for weight in weights:
        if runs and _numel(runs[-1]) + weight.whole_numel <= numel:
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return runs


def _numel(weights: Sequence[Weight]) -> int:
    return sum(weight.whole_numel for weight in weights)


def _with_phases(blocks: list[Block], count: int) -> list[Block]:
    load = [0] * count
    for block in sorted(blocks, key=lambda block: -block.whole_numel):
        block.phase = load.index(min(load))
        load[block.phase] += block.whole_numel
    return blocks


def _busiest(blocks: Sequence[Block], most: int) -> list[float]:
    """What the busiest call has to do, by S up to `most`, 1 on average."""
    shares = shares_by_phase(blocks)
    return [max(loads(shares, interval, lag=1)) for interval in range(1, most + 1)]


def shares_by_phase(blocks: Sequence[Block]) -> list[float]:
    """Of all elements, by phase: the same on all ranks."""
    shares, total = [0.0] * (1 + max((block.phase for block in blocks), default=0)), sum(block.whole_numel for block in blocks)
    for block in blocks:
        shares[block.phase] += block.whole_numel / total
    return shares


def layer_of(name: str) -> str:
    """The name up to its first number: parameters of one layer share it."""
    found = re.match(r"(.*?\.)?\d+(?=\.)", name)
    return found.group(0) if found else ""


def check_distinct(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse a parameter that is listed twice."""
    seen: set[int] = set()
    for name, param in named:
        if id(param) in seen:
            raise ValueError(f"{describe(name, param)} is given twice; list each once (tied weights are one parameter)")
        seen.add(id(param))


def check_trainable(named: Sequence[tuple[str, nn.Parameter]], device: torch.device | None = None) -> None:
    """Refuse what the optimizer cannot train, before anything is allocated. device: where the others are, if there are any."""
    devices: dict[torch.device, str] = {} if device is None else {device: "the others"}
    for name, param in named:
        label = describe(name, param)
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"{label} has dtype {param.dtype}; train in float32, bfloat16 or float16 (model.to(torch.bfloat16))"
            )
        if param.layout != torch.strided:
            raise TypeError(f"{label} has layout {param.layout}; only dense parameters can be trained")
        check_sharding(param, label)
        if param.device.type == "meta":
            raise ValueError(f"{label} is on the meta device; materialize the model (model.to_empty, load weights) first")
        devices.setdefault(param.device, label)
    if len(devices) > 1:
        places = ", ".join(f"{label} on {device}" for device, label in devices.items())
        raise ValueError(f"all parameters of one optimizer must be on one device, but {places}; use one optimizer per device")
