"""The model's weights as others see and write them: flush, exact weights, and writes from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stallfree.engine.blocks import describe
from stallfree.engine.sharding import shard_of
from stallfree.engine.window import BlockState, WeightState

if TYPE_CHECKING:
    from stallfree.engine.pipeline import Engine

INSIDE = (
    "not possible inside exact_weights(), where the model holds other weights than training's: leave the context first, then "
    "step, save, load or flush"
)
HABIT = 4  # calls; a weight that is written in all but one of them is written all the time


@torch.no_grad()
def flush(engine: Engine) -> None:
    """Finish and publish everything outstanding, without look-ahead: the weights are exact. Training may go on."""
    engine.check_usable()
    engine.refuse_early("flush()")
    notice_writes(engine)
    try:
        for block in engine.blocks:
            _finish(engine, block)
            values, division = _host_rows(block), block.half.installed
            for state in block.weights:
                rows = state.host.rows(division.divided)
                division.layout.deferred_rows(values, state.place).copy_(state.host.master[rows])
            _publish(engine, block, values)
    finally:  # what an interrupted flush has written is not from outside
        engine.ledger.mark()
        engine.expect_windows()
    engine.exact_at = engine.clock.call


def _host_rows(block: BlockState) -> Tensor:
    """Host memory for the deferred rows of a block."""
    return torch.empty(block.half.installed.layout.deferred_numel, dtype=block.block.dtype, device="cpu")


def _publish(engine: Engine, block: BlockState, values: Tensor) -> None:
    division, shards = block.half.installed, block.block.shards
    for low, piece in block.half.pieces(division.layout, values):
        engine.kernel.publish(division.layout, division.targets, shards, engine.link.to_device(piece), low)


def _finish(engine: Engine, block: BlockState) -> None:
    """Bring a block's state up to date with every gradient so far, publishing nothing."""
    block.settle()
    block.half.show()
    for state in block.weights:
        _replay_now(engine, state)
    block.clear()


def _replay_now(engine: Engine, state: WeightState) -> None:
    """Apply what the open window holds of one weight, once: whoever waits for it may be interrupted."""
    block = state.block
    division = block.half.installed
    gradients = tuple(state.gradients(block.open, division))
    block.open = [collected.without(state.place) for collected in block.open]
    if gradients:
        engine.run(state, state.host.job(gradients, division.divided, 0.0, None))


@contextmanager
def exact_weights(engine: Engine) -> Iterator[None]:
    """Show what `flush` would publish, commit nothing, and restore bit for bit."""
    saved: list[dict[nn.Parameter, Tensor]] = []  # what training's weights are, while others are shown
    try:
        with engine.uninterrupted(), torch.no_grad():
            engine.check_usable()
            engine.refuse_early("exact_weights()")
            notice_writes(engine)
            saved.append({param: shard_of(param).detach().to("cpu", copy=True) for param in engine.weights})
            for block in engine.blocks:
                _show_exact(engine, block)
            engine.ledger.mark()
            engine.paused = INSIDE
        yield
    finally:
        try:
            _leave(engine, saved)
        except BaseException:  # of a signal that came before anything was restored, or after
            _leave(engine, saved)
            raise


def _leave(engine: Engine, saved: list[dict[nn.Parameter, Tensor]]) -> None:
    """Restore, unless that has been done."""
    with engine.uninterrupted(), torch.no_grad():
        if not saved:
            return
        if engine.closed:  # inside, by hand or because a newer optimizer took the parameters over: they are not ours to write
            saved.clear()
            return
        touched = [engine.read_name(param) for param in engine.ledger.touched()] if engine.paused else []
        engine.paused = None
        for param, values in saved[0].items():
            shard_of(param).copy_(values)
        engine.ledger.mark()
        saved.clear()
    if touched:
        raise RuntimeError(
            "weights were written inside exact_weights(), where nothing is kept; training's weights are back. Write outside, "
            f"under torch.no_grad(): {', '.join(touched[:4])}"
        )


def _show_exact(engine: Engine, block: BlockState) -> None:
    block.settle()
    block.half.show()
    values, division = _host_rows(block), block.half.installed
    for state in block.weights:
        out = division.layout.deferred_rows(values, state.place)
        gradients = tuple(state.gradients(block.open, division))
        engine.run(state, state.host.job(gradients, division.divided, 0.0, out, commit=False))
    _publish(engine, block, values)


def notice_writes(engine: Engine) -> None:
    """Honour weights that were written from outside since the last call: they become the masters."""
    if not engine.ledger.touched():
        return
    with engine.uninterrupted():
        changed = engine.ledger.touched()
        for param in changed:
            check_unmoved(engine, param)
        for param in changed:
            if param in engine.weights:
                _absorb(engine, engine.weights[param])
            else:
                engine.residents[param].read_weights()
            engine.see(param)


def check_unmoved(engine: Engine, param: nn.Parameter) -> None:
    """Refuse a parameter that has changed its device, dtype or shape since the optimizer was built."""
    managed = engine.weights[param].weight if param in engine.weights else engine.residents[param].resident
    label, shard = describe(managed.name, param), shard_of(param)
    for what, now, then in (
        ("device", shard.device, engine.device),
        ("dtype", shard.dtype, managed.dtype),
        ("shape", tuple(shard.shape), tuple(managed.shape)),
        ("memory layout", _layout(shard.is_contiguous()), _layout(managed.contiguous)),
    ):
        if now != then:
            raise RuntimeError(
                f"{label} changed its {what} from {then} to {now} after the optimizer was built; move, convert or resize the "
                "model first and build the optimizer then"
            )


def _layout(contiguous: bool) -> str:
    return "contiguous" if contiguous else "strided"


def _absorb(engine: Engine, state: WeightState) -> None:
    """As after a synchronous step: every gradient so far is in the moments, and the written weights are the masters."""
    param, block, place = state.weight.param, state.block, state.place
    restored = block.restored.get(place)
    if restored is None or not torch.equal(shard_of(param).detach().cpu(), restored):
        block.settle()
        for window in block.queue:
            window.dropped.add(place)
        if block.early is not None and place in block.early.places:
            block.early.dropped.add(place)
        _replay_now(engine, state)
        state.host.read_weights()
        block.half.read_weights(place)
        call = engine.clock.call
        if (engine.clock.interval, engine.config.lag) != (1, 0) and engine.exact_at != call:
            state.writes = [earlier for earlier in state.writes if call - HABIT < earlier < call] + [call]
            if len(state.writes) == HABIT - 1:
                engine.written.append(state)


def refuse_steady_writes(engine: Engine) -> None:
    """Refuse to train weights that are written between any two calls: what is on its way to them would never arrive."""
    while engine.written:
        state = engine.written.pop(0)
        if len(state.writes) == HABIT - 1:
            state.writes = []
            raise RuntimeError(
                f"{describe(state.weight.name, state.weight.param)} was written from outside in "
                f"{HABIT - 1} of the last {HABIT} calls (clamping, nn.Embedding(max_norm=...), SAM?): each write takes the "
                "place of updates that are on their way, so its deferred channels would hardly train; use "
                'preset="zero-offload", or update_interval=1 and lag=0, which honour a write at every call'
            )
