"""The update rule of docs/update-rule.md as the smallest program that obeys it: what every test compares the engine with.

One thread, plain torch operations, no concern for speed or memory. Parameters are kept channel-major, `[channels, length]`.
Wherever a side (host or device) does not own a channel its state is NaN, so a forgotten hand-over cannot hide.
In float64 (the default) it is a yardstick for rounding; in float32 it takes the engine's rounding, up to the order of sums.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")
STATE = ("master", "exp_avg", "exp_avg_sq", "steps")  # what moves when a channel changes hands; steps counts its AdamW steps
MIN_WARM_UP = 4  # calls; full_warm_up_rounds="auto" is never shorter

Hyper = dict[str, Any]  # lr, betas, eps, weight_decay of one parameter at one call


def hyper_of(group: dict[str, Any]) -> Hyper:
    return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}


def is_stack(tensor: Tensor) -> bool:
    """Of matrices: experts, say."""
    return tensor.dim() == 3 and tensor.shape[2] >= 64


def axis_of(tensor: Tensor, config: Any) -> int:
    """The channel axis of a parameter without a name."""
    return config.channel_dim if isinstance(config.channel_dim, int) else 0 if is_stack(tensor) else 1


def channel_major(tensor: Tensor, dim: int) -> Tensor:
    """`[out, -1]` with axis `dim` first; a resident parameter (1-D, scalar) is one channel.

    Of a stack of matrices, by rows every row is one.
    """
    rows = tensor.shape[:2].numel() if is_stack(tensor) and dim == 0 else tensor.shape[0] if tensor.dim() >= 2 else 1
    matrix = tensor.reshape(rows, -1)
    return matrix.t() if dim == 1 and tensor.dim() >= 2 else matrix


def adamw(state: dict[str, Tensor], grad: Tensor, hyper: Hyper) -> Tensor:
    """One step of torch.optim.AdamW on rows of `[rows, length]` state, in place.

    Bias correction counts each row's own steps. Returns the direction m̂/(√v̂+ε), which look-ahead extrapolates.
    """
    beta1, beta2 = hyper["betas"]
    state["steps"] = state["steps"] + 1
    n = state["steps"][:, None]
    state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * grad
    state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
    direction = state["exp_avg"] / (1 - beta1**n) / ((state["exp_avg_sq"] / (1 - beta2**n)).sqrt() + hyper["eps"])
    state["master"] = state["master"] * (1 - hyper["lr"] * hyper["weight_decay"]) - hyper["lr"] * direction
    return direction


class Parameter:
    """One parameter: what the model's forward reads (not rounded to its dtype), and the optimizer's state on both sides."""

    def __init__(self, weight: Tensor, *, dim: int, selected_count: int | None, dtype: torch.dtype) -> None:
        """`selected_count` None: resident, all of it is updated on the device at every call."""
        self.shape, self.dim = weight.shape, dim
        self.resident, self.selected_count = selected_count is None, selected_count or 0
        self.weight = channel_major(weight.detach().cpu(), dim).to(dtype).clone()
        channels = self.weight.shape[0]
        self.selected = torch.full((channels,), self.resident)  # before the first selection every channel is deferred
        self.score = torch.zeros(channels, dtype=dtype)
        owner, other = ("device", "host") if self.resident else ("host", "device")
        zeros = torch.zeros_like(self.weight)
        state = dict(zip(STATE, (self.weight.clone(), zeros, zeros.clone(), torch.zeros(channels, dtype=dtype)), strict=True))
        self.sides = {owner: state, other: {name: torch.full_like(value, NAN) for name, value in state.items()}}

    def update(self, side: str, rows: Tensor, grad: Tensor, hyper: Hyper) -> Tensor:
        state = {name: value[rows] for name, value in self.sides[side].items()}
        direction = adamw(state, grad, hyper)
        for name, value in state.items():
            self.sides[side][name][rows] = value
        return direction

    def move(self, rows: Tensor, source: str, target: str) -> None:
        for name in STATE:
            self.sides[target][name][rows] = self.sides[source][name][rows]
            self.sides[source][name][rows] = NAN

    def best(self) -> Tensor:
        """The channels of the highest score; ties go to the lowest index."""
        chosen = torch.zeros_like(self.selected)
        chosen[torch.argsort(-self.score, stable=True)[: self.selected_count]] = True
        return chosen

    def write(self, weight: Tensor) -> None:
        """Somebody outside wrote the weight; nothing may be outstanding."""
        self.weight = channel_major(weight.detach().cpu(), self.dim).to(self.weight.dtype).clone()
        for side, rows in (("device", self.selected), ("host", ~self.selected)):
            self.sides[side]["master"][rows] = self.weight[rows]

    def tensor(self, matrix: Tensor) -> Tensor:
        """From `[channels, length]` back to the parameter's shape."""
        return (matrix.t() if self.dim == 1 and len(self.shape) >= 2 else matrix).reshape(self.shape)

    def master(self) -> Tensor:
        """Both sides' masters together; exact only after a flush."""
        device, host = self.sides["device"]["master"], self.sides["host"]["master"]
        return self.tensor(torch.where(self.selected[:, None], device, host))


@dataclass
class Slot:
    """What a block keeps of one call: per parameter the deferred gradient, or None if it had none or the call was skipped."""

    grads: list[Tensor | None]
    hypers: list[Hyper]
    clip: float


@dataclass
class Window:
    """The calls a block collected, from the moment it closes to its publish."""

    slots: list[Slot]
    deferred: list[Tensor]  # per parameter: [channels] bool, as of the close
    due: int  # the call that publishes it
    lookahead: float
    arriving: list[Tensor] = field(default_factory=list)  # per parameter: channels that move to the device after its replay
    published: list[tuple[Tensor, Tensor]] | None = None  # per parameter: (with look-ahead, plain), filled by replay


class Block:
    def __init__(self, phase: int, parameters: list[Parameter]) -> None:
        self.phase, self.parameters = phase, parameters
        self.interval = 1  # S, adopted at the block's own closes only
        self.slots: list[Slot] = []
        self.queue: list[Window] = []
        self.last_selection = 0
        self.selects = any(p.selected_count for p in parameters)


class Oracle:
    """All parameters, in the order of `step`'s gradients.

    blocks: (phase, indices of its parameters); a parameter in none must be resident.
    dims: channel axis of each parameter; selected: channels the device updates, None for a resident parameter.
    config: a ZenFlowConfig, of which the fields of the update rule are read.
    """

    def __init__(
        self,
        weights: list[Tensor],
        blocks: list[tuple[int, list[int]]],
        *,
        dims: list[int],
        selected: list[int | None],
        config: Any,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.config, self.dtype, self.call = config, dtype, 0
        self.interval = config.initial_interval
        self.warm_up = None if config.full_warm_up_rounds == "auto" else config.full_warm_up_rounds
        self.highest_lr = 0.0
        self.parameters = [
            Parameter(w, dim=d, selected_count=s, dtype=dtype) for w, d, s in zip(weights, dims, selected, strict=True)
        ]
        self.blocks = [Block(phase, [self.parameters[i] for i in indices]) for phase, indices in blocks]
        held = [id(p) for block in self.blocks for p in block.parameters]
        assert len(held) == len(set(held)), "a parameter belongs to one block"
        assert all(p.resident or id(p) in held for p in self.parameters), "a channelled parameter belongs to a block"

    # Host

    def replay(self, window: Window, block: Block) -> None:
        """Host work. It may run at any time between the window's close and its publish, in order."""
        window.published = []
        for i, (parameter, rows) in enumerate(zip(block.parameters, window.deferred, strict=True)):
            taken = [(slot.clip * slot.grads[i], slot.hypers[i]) for slot in window.slots if slot.grads[i] is not None]
            if taken and self.config.rule == "mean":
                taken = [(torch.stack([grad for grad, _ in taken]).mean(0), taken[-1][1])]
            drift: Tensor | float = 0.0
            for grad, hyper in taken:
                hyper = hyper | dict(lr=hyper["lr"] * self.config.deferred_lr_scale)
                drift = hyper["lr"] * window.lookahead * parameter.update("host", rows, grad, hyper)
            plain = parameter.sides["host"]["master"][rows]
            window.published.append((plain - drift, plain))

    def publish(self, block: Block, window: Window, *, plain: bool = False) -> None:
        if window.published is None:
            self.replay(window, block)
        for i, parameter in enumerate(block.parameters):
            parameter.weight[window.deferred[i]] = window.published[i][plain]
            if window.arriving:
                rows = window.arriving[i]
                parameter.move(rows, "host", "device")
                parameter.weight[rows] = parameter.sides["device"]["master"][rows]

    def publish_due(self, block: Block) -> None:
        """In order; a due window takes the earlier ones with it."""
        last = max((i for i, window in enumerate(block.queue) if window.due <= self.call), default=-1)
        for _ in range(last + 1):
            self.publish(block, block.queue.pop(0))

    # Windows

    def in_warm_up(self) -> bool:
        return self.warm_up is None or self.call < self.warm_up

    def close(self, block: Block) -> None:
        exact_calls = self.warm_up is None or self.call <= self.warm_up
        block.interval = 1 if self.in_warm_up() else self.interval
        window = Window(
            slots=block.slots,
            deferred=[~p.selected for p in block.parameters],
            due=self.call + (0 if exact_calls else self.config.lag),
            lookahead=self.config.lookahead_at(block.interval),
        )
        block.slots = []
        if self.wants_selection(block):
            self.select(block, window)
        block.queue.append(window)

    def wants_selection(self, block: Block) -> bool:
        if self.in_warm_up() or not block.selects or any(window.arriving for window in block.queue):
            return False
        first = self.call == self.warm_up or (self.warm_up == 0 and block.last_selection == 0)
        return first or self.call - block.last_selection >= self.config.select_interval

    def select(self, block: Block, window: Window) -> None:
        block.last_selection = self.call
        chosen = [p.selected if p.resident else p.best() for p in block.parameters]
        arriving = [new & ~p.selected for p, new in zip(block.parameters, chosen, strict=True)]
        for parameter, new in zip(block.parameters, chosen, strict=True):
            parameter.move(parameter.selected & ~new, "device", "host")  # leaving: before the host's next replay
            parameter.selected = new
        if any(rows.any() for rows in arriving):
            window.arriving = arriving
            window.due = min(window.due, self.call + 1)  # the device needs their state at the next call

    # What a user calls

    def step(self, grads: list[Tensor | None], hypers: list[Hyper]) -> None:
        """`grads`: what `.grad` would hold (all backward passes, scaled as the user scaled it), in the parameters' shapes."""
        self.call += 1
        highest_lr = max(hyper["lr"] for hyper in hypers)
        if self.warm_up is None and self.call >= MIN_WARM_UP and highest_lr <= self.highest_lr:
            self.warm_up = self.call
        self.highest_lr = highest_lr
        matrices = [
            None if g is None else channel_major(g.cpu(), p.dim).to(self.dtype)
            for p, g in zip(self.parameters, grads, strict=True)
        ]
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in matrices if g is not None))
        skip = not math.isfinite(norm)
        clip = 1.0
        if self.config.max_grad_norm is not None and not skip:
            clip = min(1.0, self.config.max_grad_norm / (norm + 1e-6))

        for block in self.blocks:  # before the selected channels move: arrivals come first
            self.publish_due(block)
        for parameter, grad, hyper in zip(self.parameters, matrices, hypers, strict=True):
            if grad is not None and not skip:
                on, decay = parameter.selected, self.config.score_decay
                parameter.score = decay * parameter.score + (1 - decay) * (grad**2).sum(1)
                parameter.update("device", on, clip * grad[on], hyper)
                parameter.weight[on] = parameter.sides["device"]["master"][on]
        index = {id(p): i for i, p in enumerate(self.parameters)}
        for block in self.blocks:
            members = [index[id(p)] for p in block.parameters]
            kept = [None if skip or matrices[i] is None else matrices[i][~self.parameters[i].selected] for i in members]
            block.slots.append(Slot(kept, [dict(hypers[i]) for i in members], clip))
            due = self.call % block.interval == block.phase % block.interval or len(block.slots) >= block.interval
            if due or self.warm_up is None or self.call <= self.warm_up:
                self.close(block)
                self.publish_due(block)  # lag 0

    def flush(self) -> None:
        """Replay and publish everything, plain. Training may go on afterwards; when windows close does not change."""
        for block in self.blocks:
            while block.queue:
                self.publish(block, block.queue.pop(0), plain=True)
            deferred = [~p.selected for p in block.parameters]
            self.publish(block, Window(block.slots, deferred, self.call, lookahead=0.0), plain=True)
            block.slots = []

    def exact(self) -> list[Tensor]:
        """What `exact_weights()` shows: the weights a flush would give, without its effects."""
        shown = copy.deepcopy(self)
        shown.flush()
        return shown.weights()

    def write(self, i: int, weight: Tensor) -> None:
        """A weight written from outside: gradients so far reach the moments, then the written values are the master."""
        self.flush()
        self.parameters[i].write(weight)

    def weights(self) -> list[Tensor]:
        """What the model's parameters hold, in their shapes, before it is rounded to their dtypes."""
        return [p.tensor(p.weight) for p in self.parameters]


def oracle_of(optimizer: Any, config: Any, *, dims: list[int] | None = None, dtype: torch.dtype = torch.float64) -> Oracle:
    """An oracle for a fresh optimizer: its parameters in the order of its groups, its blocks and phases, its weights.

    dims: channel axis of each parameter; by default `axis_of` it.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    dims = dims or [axis_of(p, config) for p in params]
    index = {id(p): i for i, p in enumerate(params)}
    blocks = [(block.phase, [index[id(p)] for p in block.params]) for block in optimizer.engine.blocks]
    selected = [selected_count(p, dim, config) for p, dim in zip(params, dims, strict=True)]
    return Oracle(params, blocks, dims=dims, selected=selected, config=config, dtype=dtype)


def selected_count(weight: Tensor, dim: int, config: Any) -> int | None:
    """How many channels the device updates; None: the parameter is resident."""
    if weight.dim() < 2 or weight.numel() < config.min_numel or weight.numel() == 0:
        return None
    channels = channel_major(weight.detach(), dim).shape[0]
    count = round(config.topk_ratio * channels)
    return None if count == channels else count
