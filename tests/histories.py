"""Random training histories whose gradients do not depend on the weights, and what they must equal.

A history is a pure value: the same one can be played on the engine, on the oracle and on torch.optim.AdamW, and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from oracle import hyper_of
from torch import Tensor

from stallfree import ZenFlowAdamW, ZenFlowConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Call:
    """One call of step(), and what happens around it."""

    scale: float = 1.0  # of the gradients
    lr_factor: float = 1.0  # the learning rate against the group's first
    missing: frozenset[int] = frozenset()  # parameters without a gradient
    bad: tuple[int, float] | None = None  # (parameter, inf or NaN) somewhere in its gradient
    clip: str | None = None  # "torch": clip_grad_norm_ of torch.nn.utils; "method": of the optimizer; "mul": user's own scaling
    before: str | int | None = None  # "flush", "exact", or a new S, before the call


@dataclass(frozen=True)
class History:
    shapes: tuple[tuple[int, ...], ...]
    calls: tuple[Call, ...]
    config: ZenFlowConfig
    dtypes: tuple[str, ...] = ()  # of each parameter; () means all fp32
    groups: tuple[int, ...] = ()  # of each parameter; () means one group
    seed: int = 0

    def group_of(self, i: int) -> int:
        return self.groups[i] if self.groups else 0

    def weights(self, device: torch.device | str = "cpu") -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        names = self.dtypes or ("fp32",) * len(self.shapes)
        drawn = [
            torch.randn(shape, generator=generator).to(DTYPES[name]) for shape, name in zip(self.shapes, names, strict=True)
        ]
        return [weight.to(device) for weight in drawn]

    def param_groups(self, params: list[Any]) -> list[dict[str, Any]]:
        settings = [dict(lr=1e-2, weight_decay=0.1), dict(lr=3e-3, weight_decay=0.0, betas=(0.8, 0.99), eps=1e-6)]
        members = [[p for i, p in enumerate(params) if self.group_of(i) == g] for g in range(len(settings))]
        return [dict(params=held, **setting) for held, setting in zip(members, settings, strict=True) if held]

    def order(self) -> list[int]:
        """Parameters in the order of the groups."""
        return sorted(range(len(self.shapes)), key=self.group_of)

    def grads(self, t: int, weights: list[Tensor]) -> list[Tensor | None]:
        """What backward produces for call t (from 0), in the weights' dtypes; None where a parameter takes no part."""
        call = self.calls[t]
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + t)
        drawn = [call.scale * torch.randn(w.shape, generator=generator) for w in weights]
        if call.bad is not None and drawn[call.bad[0]].numel():
            bad = drawn[call.bad[0]].view(-1)
            bad[t % bad.numel()] = call.bad[1]
        return [None if i in call.missing else g.to(w) for i, (g, w) in enumerate(zip(drawn, weights, strict=True))]

    def lr_total(self) -> float:
        return 1e-2 * sum(call.lr_factor for call in self.calls)


def backward(params: list[Tensor], grads: list[Tensor | None]) -> None:
    """One backward pass of a loss linear in the weights: its gradients are exactly `grads`."""
    terms = [(p * g).sum() for p, g in zip(params, grads, strict=True) if g is not None]
    if terms:
        sum(terms).backward()


def accumulate(params: list[torch.nn.Parameter], t: int) -> None:
    """A backward pass that reaches the last parameter first."""
    for param in reversed(params):
        generator = torch.Generator().manual_seed(t)
        (param * torch.randn(param.shape, generator=generator).to(param.dtype)).sum().backward()


def clip_norm(call: Call) -> float:
    return 0.5 * call.scale


def clipped(grads: list[Tensor | None], call: Call) -> list[Tensor | None]:
    """What `.grad` holds after the user's code of this call, in fp32 and not rounded to the gradient's dtype."""
    wide = [None if g is None else g.float() for g in grads]
    if call.clip == "mul":
        return [None if g is None else g * 0.125 for g in wide]
    held = [g for g in wide if g is not None]
    if call.clip is None or not held:
        return wide
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in held)).item()
    coefficient = min(clip_norm(call) / (norm + 1e-6), 1.0)  # NaN stays NaN: min() keeps its first argument
    return [None if g is None else g * coefficient for g in wide]


class Player:
    """Plays a history on the engine. `weights` is what the model holds after the calls so far."""

    def __init__(self, history: History, device: torch.device | str = "cpu", **overrides: Any) -> None:
        self.history, self.config = history, history.config.replace(**overrides) if overrides else history.config
        self.params = [torch.nn.Parameter(w) for w in history.weights(device)]
        self.optimizer = ZenFlowAdamW(history.param_groups(self.params), config=self.config)
        self.first_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.t = 0

    def set_lr(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.first_lr, strict=True):
            group["lr"] = lr * self.history.calls[self.t].lr_factor

    def before(self) -> None:
        call = self.history.calls[self.t]
        if call.before == "flush":
            self.optimizer.flush()
        elif call.before == "exact":
            with self.optimizer.exact_weights():
                pass
        elif call.before is not None:
            self.optimizer.set_update_interval(call.before)

    def backward(self) -> None:
        backward(self.params, self.history.grads(self.t, self.params))

    def clip(self) -> None:
        call = self.history.calls[self.t]
        if call.clip == "torch":
            torch.nn.utils.clip_grad_norm_(self.params, clip_norm(call))
        elif call.clip == "method":
            self.optimizer.clip_grad_norm_(clip_norm(call))
        elif call.clip == "mul":
            for p in self.params:
                if p.grad is not None:
                    p.grad.mul_(0.125)

    def step(self) -> None:
        self.set_lr()
        self.before()
        self.backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.t += 1

    def play(self, until: int | None = None) -> list[list[Tensor]]:
        """To call `until` (exclusive) or the end; the weights after each call."""
        seen = []
        while self.t < (len(self.history.calls) if until is None else until):
            self.step()
            seen.append(self.weights())
        return seen

    def weights(self) -> list[Tensor]:
        return [p.detach().cpu().clone() for p in self.params]

    def flushed(self) -> list[Tensor]:
        self.optimizer.flush()
        return self.weights()

    def close(self) -> None:
        self.optimizer.close()


def run(
    history: History, device: torch.device | str = "cpu", prepare: Callable[[Player], None] | None = None, **overrides: Any
) -> list[list[Tensor]]:
    """The weights after each call, and last after a flush."""
    player = Player(history, device, **overrides)
    try:
        if prepare is not None:
            prepare(player)
        return [*player.play(), player.flushed()]
    finally:
        player.close()


def synchronous(history: History) -> list[list[Tensor]]:
    """torch.optim.AdamW on fp32 masters over the same history: the masters after each call."""
    masters = [torch.nn.Parameter(w.float()) for w in history.weights()]
    stored = history.weights()
    optimizer = torch.optim.AdamW(history.param_groups(masters))
    first_lr = [group["lr"] for group in optimizer.param_groups]
    seen = []
    for t, call in enumerate(history.calls):
        for group, lr in zip(optimizer.param_groups, first_lr, strict=True):
            group["lr"] = lr * call.lr_factor
        grads = clipped(history.grads(t, stored), call)
        if all(torch.isfinite(g).all() for g in grads if g is not None):
            for p, g in zip(masters, grads, strict=True):
                p.grad = g
            if history.config.max_grad_norm is not None and any(g is not None for g in grads):
                torch.nn.utils.clip_grad_norm_(masters, history.config.max_grad_norm)
            optimizer.step()
        seen.append([p.detach().clone() for p in masters])
    return seen


def hypers(history: History, t: int, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each parameter at call t, in the parameters' order."""
    factor = history.calls[t].lr_factor
    used = sorted({history.group_of(i) for i in range(len(history.shapes))})
    of = [groups[used.index(history.group_of(i))] for i in range(len(history.shapes))]
    return [hyper_of(group) | dict(lr=group["lr"] * factor) for group in of]


def tolerance(history: History, expected: Tensor, calls: int, lookahead: float = 0.0) -> Tensor:
    """How far fp32 arithmetic may end up from exact arithmetic after `calls` AdamW steps, element by element.

    Each step rounds the master (half an ulp, relative 2^-24; 2^-23 leaves room for the decay) and moves it by lr times a
    direction, known to about ten fp32 roundings of its inputs: 1e-6 of the largest gradient of the run, however small the
    moments have become by cancellation. Look-ahead adds that many more directions.
    """
    lr = 1e-2 * max(call.lr_factor for call in history.calls)
    return calls * 2.0**-23 * expected.abs() + (calls + lookahead) * lr * 5e-6


def assert_rounds_to(actual: list[Tensor], expected: list[Tensor], allowed: list[Tensor], what: str = "") -> None:
    """`actual` is a value within `allowed` of `expected`, rounded to its dtype (rounding is monotone, so bounds suffice)."""
    for i, (a, e, tol) in enumerate(zip(actual, expected, allowed, strict=True)):
        assert a.shape == e.shape
        low, high = (e - tol).to(a.dtype), (e + tol).to(a.dtype)
        wrong = ~((low <= a) & (a <= high))
        if wrong.any():
            worst = (a.double() - e.double()).abs()[wrong].max().item()
            raise AssertionError(f"{what}: parameter {i}: {int(wrong.sum())} of {a.numel()} elements off, by up to {worst:.3g}")


def assert_identical(actual: list[list[Tensor]], expected: list[list[Tensor]], what: str = "") -> None:
    """Bit for bit, at every call."""
    for t, (now, then) in enumerate(zip(actual, expected, strict=True)):
        for i, (a, e) in enumerate(zip(now, then, strict=True)):
            assert torch.equal(a, e), (
                f"{what}: after call {t + 1}, parameter {i} differs by {(a.double() - e.double()).abs().max():.3g}"
            )


# Strategies

SIDES = st.integers(1, 9)
SHAPES = st.one_of(
    st.tuples(SIDES, SIDES),
    st.tuples(SIDES, SIDES),
    st.tuples(SIDES),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([64, 65])),  # a stack of matrices
    st.just(()),
)


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> ZenFlowConfig:
    drawn = dict(
        topk_ratio=draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0])),
        update_interval=draw(st.sampled_from([1, 2, 3, 4, 7])),
        rule="replay",
        lag=draw(st.sampled_from([0, 1, 2, 4])),
        stagger=draw(st.booleans()),
        lookahead=draw(st.sampled_from(["auto", 0.0, 1.5])),
        full_warm_up_rounds=draw(st.sampled_from([0, 1, 2, 5])),
        max_grad_norm=draw(st.sampled_from([None, 1.0])),
        select_interval=draw(st.sampled_from([1, 2, 3, 5, 9])),
        channel_dim=draw(st.sampled_from([0, 1])),
        min_numel=draw(st.sampled_from([0, 0, 12])),
        block_numel=draw(st.sampled_from([1, 30, 100, 10_000])),
        overlap_step=draw(st.booleans()),
        host_kernel=draw(st.sampled_from(["torch", "auto"])),
        max_update_interval=8,
    )
    return ZenFlowConfig(**drawn | fixed)


@st.composite
def histories(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...] = ("fp32",),
    skips: bool = True,
    befores: tuple = ("flush", "exact", 1, 3, 6),
    clips: bool = True,
    most_calls: int = 24,
    **fixed: Any,
) -> History:
    """Shapes, settings and events; the numbers themselves come from `seed`."""
    config = draw(configs(**fixed))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    count = len(shapes)
    names = draw(st.lists(st.sampled_from(dtypes), min_size=count, max_size=count))
    # In half precision torch rounds the norms of resident parameters, and their clipped gradients: see test_gradient_scaling.
    ways = ["torch", "method", "mul"] if set(names) == {"fp32"} else ["mul"]
    habit = draw(st.sampled_from([None, None, *ways])) if clips else None  # what the training loop does at every call

    @st.composite
    def calls(draw: st.DrawFn) -> Call:
        event = draw(st.integers(0, 9))
        index = draw(st.integers(0, count - 1))
        missing = frozenset([index]) if event == 1 else frozenset(range(count)) if event == 2 else frozenset()
        bad = (index, draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))) if event == 3 and skips else None
        return Call(
            scale=draw(st.sampled_from([0.01, 1.0, 30.0])),
            lr_factor=draw(st.sampled_from([0.1, 0.5, 1.0])),
            missing=missing,
            bad=bad,
            clip=draw(st.sampled_from([None, *ways])) if clips and event == 4 else habit,
            before=draw(st.sampled_from(befores)) if befores and event == 5 else None,
        )

    return History(
        shapes=tuple(shapes),
        calls=tuple(draw(st.lists(calls(), min_size=1, max_size=most_calls))),
        config=config,
        dtypes=tuple(names),
        groups=tuple(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))),
        seed=draw(st.integers(0, 2**16)),
    )
