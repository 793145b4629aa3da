"""Every setting of the optimizer: its meaning, unit and default. A preset is a row of settings of the one update rule.

The rule itself is in docs/update-rule.md; the words (window, lag, look-ahead, ...) are defined there too.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# What a preset sets. "lag": "interval" means one whole window (the paper's rounds).
PRESETS: dict[str, dict[str, Any]] = {
    # The default: every deferred gradient gets its own AdamW step, a bounded few calls late.
    "stallfree": dict(topk_ratio=0.1, update_interval="auto", stagger=True, lag=1, rule="replay", lookahead="auto"),
    # The paper's rounds: one AdamW step on the mean of a window, beside the next window.
    "zenflow": dict(topk_ratio=0.1, update_interval=4, stagger=False, lag="interval", rule="mean", lookahead=0.0),
    # The paper's ablation without overlap.
    "zenflow-star": dict(
        topk_ratio=0.1, update_interval=4, stagger=False, lag=0, rule="mean", lookahead=0.0, overlap_step=False
    ),
    # Synchronous offloading: exactly AdamW, at the price of waiting for the host at every call.
    "zero-offload": dict(
        topk_ratio=0.0, update_interval=1, stagger=False, lag=0, rule="replay", lookahead=0.0, overlap_step=False
    ),
    # Delayed parameter update: the host works beside the next step.
    "zero-offload-dpu": dict(topk_ratio=0.0, update_interval=1, stagger=False, lag=1, rule="replay", lookahead=0.0),
    # Layer-wise: a block's host work starts during backward, before the gradient norm is known.
    "stronghold": dict(
        topk_ratio=0.0, update_interval=1, stagger=False, lag=0, rule="replay", lookahead=0.0, update_in_backward=True
    ),
    # No offloading: AdamW with fp32 masters on the device.
    "device": dict(topk_ratio=1.0, update_interval=1, stagger=False, lag=0, rule="replay", lookahead=0.0),
}
# What a preset does not mention.
BASE: dict[str, Any] = dict(overlap_step=True, update_in_backward=False)
# update_interval="auto" begins with the best of 2, 4 and 8 in benchmarks/results/convergence-2026-11-29.md.
AUTO_INTERVAL = 2
AUTO_ROOMS = (8, 4, 2)  # its max_update_interval: the first that fits into host memory

Preset = Literal["stallfree", "zenflow", "zenflow-star", "zero-offload", "zero-offload-dpu", "stronghold", "device"]


@dataclass(frozen=True, kw_only=True)
class ZenFlowConfig:
    """Settings of `ZenFlowAdamW`. A field left out takes its preset's value; after construction every field is concrete."""

    preset: Preset = "stallfree"
    """Which row of settings fills the fields that are left out: see `PRESETS`."""

    # The update rule
    topk_ratio: float = None  # type: ignore[assignment]
    """Share of each parameter's channels that the device updates at every call. 0: all on the host. 1: all on the device."""
    update_interval: int | Literal["auto"] = None  # type: ignore[assignment]
    """S: how many consecutive calls a block collects before its host update. A larger S moves fewer bytes.
    "auto": 2 at first, then the smallest S that hides the host's work, by measured times (below)."""
    staleness_budget: float = 1.0
    """What "auto" may cost: the largest rho * (S + 1) / 2, a gradient's mean delay in calls, weighted by its share (rho is the
    share of the squared gradient norm that is deferred)."""
    interval_schedule: Mapping[int, int] | None = None
    """S by call, as a run with "auto" has recorded it: after call t, S is the value at t, or at the last call before that has
    one. Replaces what "auto" would decide. `set_update_interval` ends it."""
    rule: Literal["replay", "mean"] = None  # type: ignore[assignment]
    """What the host does with a window: "replay" one AdamW step per gradient; "mean" one AdamW step on their mean."""
    lag: int = None  # type: ignore[assignment]
    """Calls between the close of a window and the call that publishes it. 0: in the same call (the device waits)."""
    stagger: bool = None  # type: ignore[assignment]
    """Spread the closes of windows evenly over the calls. False: all blocks close in the same call (rounds)."""
    lookahead: float | Literal["auto"] = None  # type: ignore[assignment]
    """Steps of drift that a published weight anticipates. "auto": (S - 1 + lag) / 2. 0: publish the plain master."""
    deferred_lr_scale: float = 1.0
    """Multiplies the learning rate of deferred channels."""
    full_warm_up_rounds: int | Literal["auto"] = "auto"
    """Calls at the start with S=1 and lag 0. "auto": while the learning rate rises, at least 4."""
    max_grad_norm: float | None = None
    """Clip the norm over all gradients to this. None: no clipping here (`clip_grad_norm_` works as well)."""

    # Selection
    select_interval: int = 64
    """Calls between two selections of a block. A new selection takes effect at a close of the block's window."""
    channel_dim: Literal["auto"] | int | Mapping[str, int] = "auto"
    """Which axis of a `[out, -1]` weight counts channels: 1 input columns, 0 rows. "auto": rows for embedding tables and
    output layers (by their names, or at least 8192 rows and 8 times as many as columns), and of each matrix of a stack
    (experts, `[experts, out, in]` with rows of at least 64 elements); columns otherwise. A mapping gives the axis by a part of
    the parameter's name ("embed": 0); what it does not name is "auto". `channel_dims(model)` makes one from the model's
    modules."""
    score_decay: float = 0.9
    """Decay of the exponential mean of squared channel norms that ranks the channels."""
    min_numel: int = 16384
    """Parameters with fewer elements are updated whole on the device, like all 1-D ones."""

    # Host
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of exp_avg and exp_avg_sq on the host. bfloat16 saves 4 bytes per parameter; it is rounded stochastically."""
    overlap_step: bool = None  # type: ignore[assignment]
    """Run host work beside the training thread. False: inside `step()`. The result is the same, bit for bit."""
    update_in_backward: bool = None  # type: ignore[assignment]
    """Start a block's host work as soon as its gradients are there. Needs S=1, lag 0 and no clipping; cannot skip a call."""
    host_kernel: Literal["auto", "native", "torch"] = "auto"
    """Which kernel replays. "auto": the native one; "torch" is slow and there for comparison."""
    host_threads: int | Literal["auto"] = "auto"
    """Threads of the native kernel. "auto": the cores this process may use, less those for training and data loading."""
    pin_host_threads: bool = False
    """Pin each host thread to a core. Left to the scheduler, they get out of the launching thread's way (docs/pipeline.md)."""
    block_numel: int = 3 << 26
    """16-bit elements after which a new block begins, or half as many of 32 bits: the device has staging memory for so many."""
    max_update_interval: int = None  # type: ignore[assignment]
    """The largest S that `set_update_interval`, a schedule or "auto" may ask for: host memory for slots is reserved for it.
    Default: the first S; with "auto" 8, which the optimizer lowers to 4 or 2, in its own `config`, where memory asks for it."""
    seed: int = 0
    """Of the stochastic rounding of bfloat16 moments."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is unknown; there are: {', '.join(PRESETS)}")
        name = str(self.moments_dtype).removeprefix("torch.")  # a torch.dtype is welcome
        object.__setattr__(self, "moments_dtype", name)
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        object.__setattr__(self, "_given", {name: value for name, value in given.items() if value is not None})
        if isinstance(self.interval_schedule, Mapping):
            schedule = {_as_call(call): interval for call, interval in self.interval_schedule.items()}
            object.__setattr__(self, "interval_schedule", schedule)
        for name, value in (BASE | PRESETS[self.preset]).items():
            self._fill(name, None, value)
        self._validate_intervals()
        self._fill("lag", "interval", self.initial_interval)
        self._fill("max_update_interval", None, self.rooms[0])
        if isinstance(self.channel_dim, Mapping):
            object.__setattr__(self, "channel_dim", dict(self.channel_dim))
        self._validate()

    def _fill(self, name: str, unset: Any, value: Any) -> None:
        if getattr(self, name) == unset:
            object.__setattr__(self, name, value)

    @property
    def initial_interval(self) -> int:
        """S at the start."""
        return AUTO_INTERVAL if self.update_interval == "auto" else self.update_interval

    @property
    def room_is_open(self) -> bool:
        """Whether `max_update_interval` is left to the optimizer."""
        return self.update_interval == "auto" and "max_update_interval" not in self._given  # type: ignore[attr-defined]

    @property
    def rooms(self) -> tuple[int, ...]:
        """What `max_update_interval` may be if it is not given, the best first."""
        least = max([self.initial_interval, *(self.interval_schedule or {}).values()])
        larger = [room for room in AUTO_ROOMS if room > least] if self.update_interval == "auto" else []
        return (*larger, least)

    def lookahead_at(self, interval: int) -> float:
        """Look-ahead of a window that closes under this S."""
        return (interval - 1 + self.lag) / 2 if self.lookahead == "auto" else float(self.lookahead)

    # Validation

    def _validate_intervals(self) -> None:
        """What other settings follow from."""
        _require(
            self.update_interval == "auto" or _at_least(self.update_interval, 1),
            "update_interval",
            self.update_interval,
            'a whole number of calls, at least 1, or "auto"',
        )
        schedule = self.interval_schedule
        _require(
            schedule is None
            or (isinstance(schedule, dict) and all(_at_least(t, 0) and _at_least(s, 1) for t, s in schedule.items())),
            "interval_schedule",
            schedule,
            "a mapping from calls to values of S, or None",
        )

    def _validate(self) -> None:
        _require(
            _is_number(self.topk_ratio) and 0 <= self.topk_ratio <= 1, "topk_ratio", self.topk_ratio, "a share from 0 to 1"
        )
        _require(
            _is_number(self.staleness_budget) and self.staleness_budget > 0,
            "staleness_budget",
            self.staleness_budget,
            "a number of calls above 0",
        )
        _require(self.rule in ("replay", "mean"), "rule", self.rule, '"replay" or "mean"')
        _require(_at_least(self.lag, 0), "lag", self.lag, "a whole number of calls, at least 0")
        _require(
            self.lookahead == "auto" or (_is_number(self.lookahead) and self.lookahead >= 0),
            "lookahead",
            self.lookahead,
            'a number of steps, at least 0, or "auto"',
        )
        _require(
            _is_number(self.deferred_lr_scale) and self.deferred_lr_scale > 0,
            "deferred_lr_scale",
            self.deferred_lr_scale,
            "a number above 0",
        )
        _require(
            self.full_warm_up_rounds == "auto" or _at_least(self.full_warm_up_rounds, 0),
            "full_warm_up_rounds",
            self.full_warm_up_rounds,
            'a whole number of calls, at least 0, or "auto"',
        )
        _require(
            self.max_grad_norm is None or (_is_number(self.max_grad_norm) and self.max_grad_norm > 0),
            "max_grad_norm",
            self.max_grad_norm,
            "a number above 0, or None for no clipping",
        )
        _require(
            _at_least(self.select_interval, 1), "select_interval", self.select_interval, "a whole number of calls, at least 1"
        )
        axes = self.channel_dim.values() if isinstance(self.channel_dim, dict) else [self.channel_dim]
        _require(
            all(axis in ("auto", 0, 1) for axis in axes),
            "channel_dim",
            self.channel_dim,
            '0 (rows), 1 (columns), "auto", or a mapping from a part of a parameter\'s name to one of them',
        )
        _require(
            _is_number(self.score_decay) and 0 <= self.score_decay < 1, "score_decay", self.score_decay, "from 0 to below 1"
        )
        _require(_at_least(self.min_numel, 0), "min_numel", self.min_numel, "a whole number of elements, at least 0")
        _require(self.moments_dtype in ("float32", "bfloat16"), "moments_dtype", self.moments_dtype, '"float32" or "bfloat16"')
        for name in ("stagger", "overlap_step", "update_in_backward", "pin_host_threads"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        _require(
            self.host_kernel in ("auto", "native", "torch"), "host_kernel", self.host_kernel, '"auto", "native" or "torch"'
        )
        _require(
            self.host_threads == "auto" or _at_least(self.host_threads, 1),
            "host_threads",
            self.host_threads,
            'a whole number of threads, at least 1, or "auto"',
        )
        _require(_at_least(self.block_numel, 1), "block_numel", self.block_numel, "a whole number of elements, at least 1")
        _require(
            _at_least(self.max_update_interval, self.rooms[-1]),
            "max_update_interval",
            self.max_update_interval,
            f"a whole number of calls, at least update_interval and all of interval_schedule ({self.rooms[-1]})",
        )
        _require(_is_int(self.seed), "seed", self.seed, "a whole number")
        if self.update_in_backward:
            if self.max_grad_norm is not None:
                raise ValueError(
                    "max_grad_norm cannot be used with update_in_backward (preset stronghold): blocks are updated before the "
                    "norm is known; leave max_grad_norm out, or use preset zero-offload"
                )
            if (self.initial_interval, self.lag, self.topk_ratio) != (1, 0, 0) or self.max_update_interval != 1:
                raise ValueError(
                    "update_in_backward (preset stronghold) needs update_interval=1, lag=0 and topk_ratio=0: an update that "
                    "starts during backward belongs to that one gradient"
                )

    # Forms

    def replace(self, **overrides: Any) -> ZenFlowConfig:
        """A copy with other values. What was left out before follows them: the lag of rounds is one window, whatever S is."""
        if "preset" in overrides:
            raise ValueError(
                "preset cannot be replaced: build ZenFlowConfig(preset=...) anew with the settings you want to keep"
            )
        given: dict[str, Any] = self._given  # type: ignore[attr-defined]
        return ZenFlowConfig.from_dict(given | overrides)

    def to_dict(self) -> dict[str, Any]:
        """The preset and what was given beside it; the rest follows from them."""
        given: dict[str, Any] = self._given  # type: ignore[attr-defined]
        return {"preset": self.preset} | given

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ZenFlowConfig:
        _refuse_unknown(settings)
        return cls(**settings)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ZenFlowConfig:
        return cls.from_dict(_mapping(_parsed(json.loads, text)))

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> ZenFlowConfig:
        import yaml

        return cls.from_dict(_mapping(_parsed(yaml.safe_load, text, yaml.YAMLError)))

    @classmethod
    def load(cls, path: str | Path) -> ZenFlowConfig:
        """Read a .json, .yaml or .yml file."""
        path = Path(path)
        text = path.read_text(encoding="utf-8")
        return cls.from_json(text) if path.suffix == ".json" else cls.from_yaml(text)


FIELDS = tuple(field.name for field in dataclasses.fields(ZenFlowConfig))


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name not in FIELDS:
            if name in ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable"):
                raise ValueError(f"{name} is not supported: ZenFlowAdamW has its own kernels and AdamW's plain rule")
            close = difflib.get_close_matches(str(name), FIELDS, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(FIELDS)}"
            raise ValueError(f"ZenFlowConfig has no setting {name!r}{hint}")


def _parsed(parse: Callable[[str], Any], text: str, unreadable: type[Exception] = ValueError) -> Any:
    try:
        return parse(text)
    except (unreadable, ValueError, RecursionError) as error:
        raise ValueError(f"the configuration cannot be read: {' '.join(str(error).split())}") from error


def _mapping(loaded: Any) -> Mapping[str, Any]:
    if not isinstance(loaded, Mapping):
        raise ValueError(f"a configuration is a mapping from setting to value, not {type(loaded).__name__}")
    return loaded


def _require(holds: bool, name: str, value: Any, what: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {what}; got {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _as_call(key: Any) -> Any:
    """JSON knows no numbers as keys."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _at_least(value: Any, least: int) -> bool:
    return _is_int(value) and value >= least
