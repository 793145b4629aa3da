"""Gradients -> slots: from the hook that sees a gradient to the handle that stands in its place.

A hook only notes that its weight's gradient is ready. When that holds for every weight of the block that had one in the last
call, the block is staged at once; until then `.grad` is a plain tensor. `step()` stages what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakMethod, finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from stallfree.engine import joining
from stallfree.engine.blocks import Weight, describe
from stallfree.engine.gradient import Staged, StagedGradient
from stallfree.engine.handles import Handles
from stallfree.engine.sharding import (
    FORM,
    GRAD,
    LAYOUT_SHAPE,
    LOCAL,
    OwnGradients,
    are_alone,
    directly,
    gradient_of,
    gradients_of,
    memory_of,
    shard_of,
    whole,
)
from stallfree.engine.uninterrupted import NOWHERE
from stallfree.engine.window import BlockState, WeightState

if TYPE_CHECKING:
    from stallfree.engine.pipeline import Engine

ATTRIBUTES, STAGED = attrgetter("__dict__"), attrgetter("staged")
PLAIN_ONLY = {Tensor}
NO_BACKWARD = -1  # what torch calls it


class AtEnd:
    """A callback at the end of a backward pass: of one that fails, torch only lets go of it.

    Once called it is let go of without any more Python. The main thread waits while a GPU's backward pass runs in another, and
    letting go would be the first that it does: a `__del__` would get the KeyboardInterrupt of a Ctrl-C pressed meanwhile, and
    Python ignores what is raised there. After a pass that fails that can still happen. Then the method is not called, and what
    is left of this does not keep its object alive.
    """

    def __init__(self, method: Callable[[], None]) -> None:
        self._once = finalize(self, _call, WeakMethod(method))
        self._once.atexit = False

    def __call__(self) -> None:
        self._once()


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:
        alive()


class Staging:
    """Stages gradients of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loose: list[OwnGradients] = []  # of sharded residents whose gradients lie among those of blocks staged already
        self._joins_after = NO_BACKWARD  # the backward pass at whose end what was published in it will be waited for
        self.handles = Handles(engine)

    # From backward

    def on_gradient(self, state: WeightState) -> None:
        """After each accumulation into a weight's `.grad`."""
        if self.engine.delay:
            self.engine.lose_time("hook")
        in_backward = torch._C._current_graph_task_id() != NO_BACKWARD  # then autograd sees to the device
        with self.engine.lock, NOWHERE if in_backward else self.engine.link.device_guard():
            self._on_gradient(state)

    def _on_gradient(self, state: WeightState) -> None:
        block, stream, before = state.block, self.engine.link.follow(), state.stream
        state.stream = stream
        elsewhere = before is not None and stream != before
        if block.watched is state and elsewhere:  # the others may be anywhere: step() is behind all of them
            block.surprised = True
            return
        place, seen = state.place, block.passes_seen
        seen[place] += 1
        if type(gradient_of(state.weight.param)) is StagedGradient:  # it was added to what is staged already
            return
        if block.staged[place] is not None:  # zero_grad() discarded it
            self.discard(state)
            seen[place] = 1
        if not block.ready[place] and seen[place] >= (block.passes_expected[place] or 1):
            if block.watched is state:
                self._look_at_others(block, state)
            else:
                block.ready[place] = True
                block.missing -= block.expected[place]
            if not block.missing:
                block.last = state
                without_graph = torch.no_grad() if torch.is_grad_enabled() else NOWHERE  # backward(create_graph=True)
                with without_graph, directly() if block.sharded else NOWHERE:
                    self._stage_ready(block)

    def _look_at_others(self, block: BlockState, watched: WeightState) -> None:
        """The only weight of a block that is watched is ready: then the others should be, too."""
        if any(block.staged):
            for state in block.weights:
                if state.staged is not None and type(gradient_of(state.weight.param)) is not StagedGradient:
                    self.discard(state)
        count = len(block.weights)
        block.ready, block.passes_seen = [True] * count, [block.passes_seen[watched.place]] * count
        block.missing = 0

    def discard(self, state: WeightState) -> None:
        """Forget a staged gradient that is no longer in `.grad`."""
        if state.early:
            raise RuntimeError(
                f"the gradient of {state.weight.name} was discarded after its update had begun: update_in_backward (preset "
                "stronghold) cannot take an update back; call step() after every backward, or use preset zero-offload"
            )
        block, place = state.block, state.place
        if (staged := block.staged[place]) is not None:
            staged.leave()
        block.staged[place], block.passes_seen[place] = None, 0
        block.surprised = True
        self._not_ready(block, place)

    def forget_zeroed(self) -> None:
        """After `zero_grad()`: discard now what the next gradient, or `step()`, would find discarded, if that is everything."""
        engine = self.engine
        with engine.lock, engine.link.device_guard():
            early = any(block.early is not None for block in engine.blocks)
            if early or any(type(gradient_of(param)) is StagedGradient for param in engine.weights):
                return
            engine.sending.forget()
            for state in engine.weights.values():
                if state.staged is not None:
                    self.discard(state)
            engine.selected.let_go()

    def _not_ready(self, block: BlockState, place: int) -> None:
        if block.ready[place]:
            block.ready[place] = False
            block.missing += block.expected[place]

    def _stage_ready(self, block: BlockState) -> None:
        """Stage the block's gradients, unless zero_grad() has discarded some that were ready."""
        grads = gradients_of(block.params) if all(block.ready) and not any(block.staged) else None
        if grads is None or set(map(type, grads)) != PLAIN_ONLY:
            grads = [self._ready_gradient(state) for state in block.weights]
        if not block.missing:
            self._own_loose()
            self.stage(block, grads)
            engine = self.engine
            shows = block.finished and engine.paused is None  # exact weights stay until they are taken away
            for arrived in engine.publishing.arrived(block) if shows else ():
                # Weights that were written from outside keep what is in them, until step() notices.
                if arrived.finished and engine.ledger.untouched(arrived.params):
                    try:
                        engine.publishing.show_arrived(arrived)
                    finally:
                        self._join_after_backward()
                    increment_version(arrived.block.shards)  # a graph that still needs what was there is refused by torch
                    engine.ledger.mark(arrived.params)

    def _join_after_backward(self) -> None:
        """Let computation wait for what is published beside it, once backward is over: then anybody may read the weights."""
        backward = torch._C._current_graph_task_id()
        if backward == NO_BACKWARD:  # somebody calls hooks by hand
            self._join()
        elif backward != self._joins_after:
            self._joins_after = backward
            torch.autograd.Variable._execution_engine.queue_callback(AtEnd(self._join))

    def _join(self) -> None:
        with self.engine.lock:
            self._joins_after = NO_BACKWARD  # a later callback may publish more
            self.engine.link.join_showing()

    def _ready_gradient(self, state: WeightState) -> Tensor | None:
        block, place, grad = state.block, state.place, None
        if block.ready[place] and block.staged[place] is None:
            grad = gradient_of(state.weight.param)
            if grad is None or type(grad) is StagedGradient:
                grad, block.passes_seen[place] = None, 0
                self._not_ready(block, place)
        return grad

    def _own_loose(self) -> None:
        if self._loose:
            for gradients in self._loose:
                gradients.take()
            self._loose = []

    def stage(self, block: BlockState, grads: Sequence[Tensor | None]) -> None:
        """Replace gradients by handles: selected rows stay on the device, deferred rows go down to the next call's slot."""
        engine = self.engine
        places = [place for place, grad in enumerate(grads) if grad is not None]
        if not places:
            return
        dense = self._readable(block, grads)
        engine.link.hold(memory_of(dense) if block.sharded else dense, block.sharded)
        engine.turns += 1
        block.turn = engine.turns
        engine.sending.send(block, places, dense)
        self._stand(block, places)
        self._loose += block.residents
        engine.sending.go_on()
        if engine.config.update_in_backward and block.early is None:
            engine.replay_early(block, places)

    def _stand(self, block: BlockState, places: Sequence[int]) -> None:
        """Let handles stand in `.grad` for what has been staged: those of the last call, if nobody has kept any of them."""
        call = block.staged_call(self.engine.clock.call + 1)
        handles = [block.handles[place] for place in places]
        staged = _released(handles)
        if staged is None:
            weights = [block.block.weights[place] for place in places]
            staged = [Staged(weight, call, self.handles) for weight in weights]
            handles = [whole(weight.param, StagedGradient(one)) for weight, one in zip(weights, staged, strict=True)]
        params, all_staged, all_handles = block.params, block.staged, block.handles
        for place, handle, one in zip(places, handles, staged, strict=True):
            one.call, one.factor, one.zero = call, None, False
            all_staged[place] = one
            all_handles[place] = params[place].grad = handle

    def _readable(self, block: BlockState, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients as kernels read them, as they mostly are; refuses what cannot be staged."""
        there = [grad for grad in grads if grad is not None]
        if len(there) == len(grads) and list(map(FORM, there)) == block.forms and all(map(Tensor.is_contiguous, there)):
            return grads
        weights, dtype = block.block.weights, block.block.dtype
        return [
            None if grad is None else self._made_readable(weight, grad, dtype)
            for weight, grad in zip(weights, grads, strict=True)
        ]

    def _made_readable(self, weight: Weight, grad: Tensor, dtype: torch.dtype) -> Tensor:
        param, engine = weight.param, self.engine
        if not _fits(grad, weight.shape):
            refuse_gradient(weight.shard, grad, weight.name)
        if grad.requires_grad:
            raise RuntimeError(
                f"the gradient of {describe(weight.name, param)} was made by backward(create_graph=True), and staging would "
                "lose its graph: for a penalty on gradients use torch.autograd.grad(loss, params, create_graph=True), and "
                "call backward() on the sum"
            )
        engine.check_unmoved(param)
        return grad if grad.dtype is dtype and grad.is_contiguous() else grad.to(dtype).contiguous()

    # In step()

    def collect(self, ids: Set[int]) -> None:
        """Make `.grad` and what is staged agree; refuse what cannot be used before anything changes.

        ids: of the optimizer's parameters.
        """
        engine = self.engine
        self._own_loose()
        left = [block for block in engine.blocks if self.handles.zeroed or not _stands(block)]
        for block in left:
            for param in block.params:
                self._check(param)
        grads = gradients_of(engine.resident_params)
        if set(map(type, grads)) != PLAIN_ONLY or list(map(LAYOUT_SHAPE, grads)) != engine.resident_forms:
            for param in engine.resident_params:
                self._check(param)
        strangers = set() if ids <= engine.ledger.ids else ids - engine.ledger.ids  # that were frozen at construction
        if len(ids) - len(strangers) < len(engine.ledger.ids):
            self._refuse_outsiders(ids)
        newcomers = [
            (engine.read_name(param), param)
            for param in (engine.read_params() if strangers else ())
            if id(param) in strangers and param.grad is not None
        ]
        if newcomers:  # they are trained now
            for _, param in newcomers:
                self._check(param)
            joining.adopt(engine, newcomers)
            left = engine.blocks
        for block in left:
            self._stage_left(block)
        engine.sending.finish()

    def _refuse_outsiders(self, ids: Set[int]) -> None:
        """Of parameters that somebody has taken out of the groups nobody knows the settings."""
        engine = self.engine
        for param in engine.ledger:
            if id(param) not in ids and param.grad is not None:
                managed = engine.weights[param].weight if param in engine.weights else engine.residents[param].resident
                raise RuntimeError(
                    f"{describe(managed.name, param)} has a gradient and is in no group of the optimizer any more: freeze it "
                    "(requires_grad_(False), zero_grad()) instead of taking it out, or build a new optimizer"
                )

    def _check(self, param: nn.Parameter) -> None:
        """Refuse a gradient that cannot be used."""
        grad = gradient_of(param)
        if type(grad) is StagedGradient:
            self._check_mine(param, grad.staged)
        elif grad is not None:
            shard = shard_of(param)
            if not _fits(grad, shard.shape):
                refuse_gradient(shard, grad, self.engine.read_name(param))

    def _stage_left(self, block: BlockState) -> None:
        """Stage what hooks have not."""
        grads = [self._left(state) for state in block.weights]
        if any(grad is not None for grad in grads):
            block.surprised = True
            self.stage(block, grads)

    def _check_mine(self, param: nn.Parameter, staged: Staged) -> None:
        """Refuse a handle that does not stand for the parameter's current gradient."""
        engine = self.engine
        weight = staged.weight
        if weight.param is not param or engine.weights.get(param) is None or engine.weights[param].weight is not weight:
            raise RuntimeError(
                f"what stands in .grad of {describe(engine.read_name(param), param)} is the staged gradient of another "
                "parameter or optimizer: call zero_grad(), then backward; train a parameter with one optimizer, and "
                "keep a gradient as optimizer.full_gradient(param)"
            )
        self.handles.check_current(staged)

    def _left(self, state: WeightState) -> Tensor | None:
        """A gradient that is still to be staged."""
        param = state.weight.param
        grad = gradient_of(param)
        if grad is None:
            if state.staged is not None:
                self.discard(state)
            return None
        if type(grad) is StagedGradient:
            if not grad.staged.zero:
                return None
            grad = torch.zeros_like(state.weight.shard)
        if state.staged is not None:
            if state.early:
                self.handles.refuse_change(state.staged)
            state.staged.leave()
        return grad


def _released(handles: Sequence[Any]) -> list[Staged] | None:
    """What handles stand for, if nobody has kept any: they, and it, can be used again."""
    if not are_alone(handles, 2):
        return None
    parts = handles if type(handles[0]) is StagedGradient else list(map(LOCAL, handles))
    staged = list(map(STAGED, parts))
    alone = are_alone(staged, 2) and (parts is handles or are_alone(parts, 2))
    return staged if alone and max(map(len, map(ATTRIBUTES, parts))) == 1 else None  # nothing hangs on any but `staged`


def _stands(block: BlockState) -> bool:
    """Whether what is staged of a block is all there is to it."""
    standing = block.handles
    if not all(block.staged):
        standing = [None if staged is None else handle for staged, handle in zip(block.staged, standing, strict=True)]
    return all(map(is_, map(GRAD, block.params), standing))


def _fits(grad: Tensor, shape: torch.Size) -> bool:
    return grad.layout is torch.strided and grad.shape == shape


def refuse_gradient(param: Tensor, grad: Tensor, name: str) -> NoReturn:
    if grad.layout != torch.strided:
        raise TypeError(
            f"the gradient of {describe(name, param)} is {grad.layout}; only dense ones work (nn.Embedding(sparse=False))"
        )
    raise RuntimeError(
        f"{describe(name, param)} was resized after the optimizer was built; build the optimizer after resizing the model"
    )
