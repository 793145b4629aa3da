"""What `--modes` names -> ways to train a model, each with a `step()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from stallfree import PRESETS, ZenFlowAdamW, ZenFlowConfig
from stallfree.cli.bench.idle import take_host_away
from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.errors import UsageError, did_you_mean
from stallfree.cli.flags import parse_value
from stallfree.engine.blocks import by_modules

FLOOR, ADAMW, IDLE_HOST = "floor", "adamw", "idle-host"
LR = 1e-5
ANY_RHO = 1e3  # a staleness budget that allows every S


@dataclass(frozen=True)
class Peer:
    """Another library's optimizer."""

    module: str
    install: str
    options: Mapping[str, Any]  # and their defaults
    host_bytes_per_parameter: float  # about, for the check whether it fits; in bf16


DEEPSPEED = (
    "pip install deepspeed==0.19.6 (0.19.7 and 0.19.8 scramble weights under ZenFlow); it compiles its CPU Adam, for which it "
    "needs nvcc and ninja"
)
ZENFLOW = dict(
    topk_ratio=0.1, select_interval=64, update_interval=4, full_warm_up_rounds=4, overlap_step=True, pt_reserved_cores_perc=0.25
)
PEERS = {
    "deepspeed-zenflow": Peer("deepspeed", DEEPSPEED, ZENFLOW, 50),
    "deepspeed-zero-offload": Peer("deepspeed", DEEPSPEED, {}, 23),
    "torchao": Peer("torchao", "pip install torchao", dict(offload_gradients=False), 8),
}
DEFAULT = (FLOOR, ADAMW, "stallfree", "zero-offload", *PEERS)


@dataclass(frozen=True)
class Mode:
    """One entry of `--modes`."""

    text: str
    name: str  # of the preset or peer, "floor", "adamw" or "idle-host"
    config: ZenFlowConfig | None = None  # of a preset
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of a peer

    @property
    def peer(self) -> Peer | None:
        return PEERS.get(self.name)

    def why_absent(self, device: str) -> str:
        """Why this machine cannot run it, and the way out; empty if it can."""
        if self.peer is None:
            return ""
        if find_spec(self.peer.module) is None:
            return f"{self.peer.module} is not installed: {self.peer.install}"
        return "" if device == "cuda" else f"{self.peer.module} needs a GPU"


def parse_mode(text: str) -> Mode:
    """`NAME[:SETTING=VALUE,...]`.

    Raises:
        UsageError: for an unknown name, setting or an impossible value.
    """
    name, colon, rest = text.partition(":")
    known = (FLOOR, ADAMW, *PRESETS, IDLE_HOST, *PEERS)
    if name not in known:
        raise UsageError(f"mode {text!r}: there is no {name!r}{did_you_mean(name, known)}; there are: {', '.join(known)}")
    given: dict[str, Any] = {}
    for item in rest.split(",") if colon else ():
        setting, equals, value = (part.strip() for part in item.partition("="))
        if not setting or not equals:
            raise UsageError(f"mode {text!r}: write NAME:SETTING=VALUE,..., as in stallfree:update_interval=4,topk_ratio=0.2")
        if setting == "preset":
            raise UsageError(f"mode {text!r}: the preset is what stands before the colon, as in {value}:...")
        given[setting] = parse_value(value)
    if name == IDLE_HOST and not isinstance(given.get("update_interval"), int):
        raise UsageError(
            f"mode {text!r}: an idle host has no time to decide by; say which S, as in {IDLE_HOST}:update_interval=4"
        )
    if name in PRESETS or name == IDLE_HOST:
        return Mode(text, name, config=_config(text, "stallfree" if name == IDLE_HOST else name, given))
    options = PEERS[name].options if name in PEERS else {}
    for setting in given:
        if setting not in options:
            there_are = f"there are: {', '.join(options)}" if options else "it takes none"
            raise UsageError(f"mode {text!r}: {name} has no setting {setting!r}; {there_are}")
    return Mode(text, name, options=dict(options) | given)


def _config(text: str, preset: str, given: dict[str, Any]) -> ZenFlowConfig:
    try:
        config = ZenFlowConfig.from_dict({"preset": preset} | given)
        if config.update_interval == "auto" and "staleness_budget" not in given:
            config = config.replace(staleness_budget=ANY_RHO)  # that of random weights and tokens says nothing
        return config
    except (TypeError, ValueError) as error:
        raise UsageError(f"mode {text!r}: {error}") from None


class Training:
    """A model and a batch: forward and backward, which is the floor."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.model, self.ids = model, ids

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.update()
        self.model.zero_grad(set_to_none=True)

    def update(self) -> None:
        """What the floor leaves out."""

    def totals(self) -> dict[str, float]:
        """What the optimizer has counted so far, as far as it counts."""
        return {}

    def chosen(self) -> dict[str, int]:
        """What the optimizer works with now, as far as it chooses."""
        return {}

    @property
    def warming_up(self) -> bool:
        """Whether the optimizer does not work yet as it will."""
        return False

    def close(self) -> None:
        """Give up threads and memory."""


class WithOptimizer(Training):
    """With any torch optimizer."""

    def __init__(self, model: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, ids)
        self.optimizer = optimizer

    def update(self) -> None:
        self.optimizer.step()


class WithStallfree(WithOptimizer):
    """With one of our presets."""

    optimizer: ZenFlowAdamW

    def totals(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.optimizer.metrics().items() if name.endswith("_total")}

    def chosen(self) -> dict[str, int]:
        metrics = self.optimizer.metrics()
        return {name: metrics[name] for name in ("interval", "host_threads")}

    @property
    def warming_up(self) -> bool:
        return bool(self.optimizer.metrics()["warming_up"])

    def close(self) -> None:
        self.optimizer.close()


def build_training(mode: Mode, model: nn.Module, ids: Tensor, settings: BenchSettings) -> Training:
    """Whatever memory the mode needs is taken here or in its first steps."""
    if mode.config is not None:
        config = by_modules(mode.config, model)
        optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, config=config)
        if mode.name == IDLE_HOST:
            take_host_away(optimizer)
        return WithStallfree(model, ids, optimizer)
    if mode.name == ADAMW:
        return WithOptimizer(model, ids, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))
    if mode.peer is not None:
        from stallfree.cli.bench.peers import build_peer

        return build_peer(mode, model, ids, settings)
    return Training(model, ids)
