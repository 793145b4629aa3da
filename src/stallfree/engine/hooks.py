"""Which weights call back when their gradients are there: at first all of them.

Each callback costs the launching thread some microseconds between launches of backward. Once a block's gradients have come in
the same order for some calls, only the weight that came last is watched, and the whole block is looked at when it calls. If
that was wrong, nothing is lost: a gradient that comes later adds to the handle in its place, one that is not there is staged
in `step()`, and both are surprises, after which all weights of the block are watched again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from stallfree.engine.window import BlockState, WeightState

ALIKE = 3  # calls in which the same weight has come last


class Hooks:
    """The hooks of one engine."""

    def __init__(self, on_gradient: Callable[[WeightState], None]) -> None:
        self._on_gradient = on_gradient
        self._handles: dict[int, tuple[nn.Parameter, Any]] = {}  # by id of the parameter

    def __len__(self) -> int:
        """How many there are: for tests."""
        return len(self._handles)

    def watch_block(self, block: BlockState) -> None:
        """Let all weights of a block call back after each accumulation into their `.grad`."""
        for state in block.weights:
            param = state.weight.param
            if id(param) not in self._handles:
                trains = param.requires_grad
                handle = param.requires_grad_().register_post_accumulate_grad_hook(partial(self._called, state))
                self._handles[id(param)] = param, handle
                param.requires_grad_(trains)  # torch refuses hooks of frozen parameters, but keeps them

    def _called(self, state: WeightState, _: Tensor) -> None:
        self._on_gradient(state)

    def _unwatch(self, param: nn.Parameter) -> None:
        _, handle = self._handles.pop(id(param), (None, None))
        if handle is not None:
            handle.remove()
            if not param._post_accumulate_grad_hooks:
                setattr(param, "_post_accumulate_grad_hooks", None)  # noqa: B010 (as before the first hook)

    def after_call(self, block: BlockState) -> None:
        """Watch more or fewer weights, after what the call has shown."""
        if not block.regular:
            block.watched, block.alike = None, 0
            self.watch_block(block)
        elif block.watched is None and block.last is not None:
            block.alike = block.alike + 1 if block.last is block.last_before else 0
            block.last_before = block.last
            # In a later pass of several, a gradient that is there may be an earlier pass's.
            if block.alike >= ALIKE and block.on_one_stream and max(block.passes_seen) <= 1:
                self.watch_alone(block, block.last)
        block.last = None

    def watch_alone(self, block: BlockState, watched: WeightState) -> None:
        """Watch one weight of a block, instead of all."""
        block.watched = watched
        for state in block.weights:
            if state is not watched:
                self._unwatch(state.weight.param)

    def close(self) -> None:
        for param, _ in list(self._handles.values()):
            self._unwatch(param)
