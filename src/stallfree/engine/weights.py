"""The model's weights as others see and write them: flush, exact weights, and writes from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stallfree.engine.window import BlockState, CollectedCall, WeightState, written

if TYPE_CHECKING:
    from stallfree.engine.pipeline import Engine


@torch.no_grad()
def flush(engine: Engine) -> None:
    """Finish and publish everything outstanding, without look-ahead: the weights are exact. Training may go on."""
    engine.check_usable()
    engine.refuse_early("flush()")
    notice_writes(engine)
    for block in engine.blocks:
        _finish(engine, block)
        values = _host_rows(block)
        for state in block.weights:
            block.half.installed.layout.deferred_rows(values, state.place).copy_(state.host.master[state.host.deferred])
        _publish(engine, block, values)
    engine.mark_written()


def _host_rows(block: BlockState) -> Tensor:
    """Host memory for the deferred rows of a block."""
    return torch.empty(block.half.installed.layout.deferred_numel, dtype=block.block.dtype)


def _publish(engine: Engine, block: BlockState, values: Tensor) -> None:
    division = block.half.installed
    engine.kernel.publish(division.layout, division.targets, block.params, engine.link.send(values))


def _finish(engine: Engine, block: BlockState) -> None:
    """Bring a block's state up to date with every gradient so far, publishing nothing."""
    block.settle()
    block.half.show()
    for state in block.weights:
        _replay_now(engine, state, block.open)
    block.clear()
    block.schedule.collected = 0


def _replay_now(engine: Engine, state: WeightState, calls: list[CollectedCall]) -> None:
    gradients = tuple(state.gradients(calls, state.block.half.installed))
    if gradients:
        engine.run(state, state.host.job(gradients, 0.0, None))


@contextmanager
def exact_weights(engine: Engine) -> Iterator[None]:
    """Show what `flush` would publish, commit nothing, and restore bit for bit."""
    engine.check_usable()
    engine.refuse_early("exact_weights()")
    with torch.no_grad():
        notice_writes(engine)
        saved = {param: param.detach().to("cpu", copy=True) for param in engine.weights}
        try:
            for block in engine.blocks:
                _show_exact(engine, block)
            engine.mark_written()
        except BaseException:
            _restore(engine, saved)
            raise
    engine.paused = "inside exact_weights(): leave the context before training on"
    try:
        yield
    finally:
        engine.paused = None
        touched = [engine.read_name(param) for param in _written_outside(engine)]
        with torch.no_grad():
            _restore(engine, saved)
        if touched:
            raise RuntimeError(f"weights were written inside exact_weights(), where nothing is kept: {', '.join(touched[:4])}")


def _show_exact(engine: Engine, block: BlockState) -> None:
    block.settle()
    block.half.show()
    values, division = _host_rows(block), block.half.installed
    for state in block.weights:
        out = division.layout.deferred_rows(values, state.place)
        engine.run(state, state.host.job(tuple(state.gradients(block.open, division)), 0.0, out, commit=False))
    _publish(engine, block, values)


def _restore(engine: Engine, saved: dict[nn.Parameter, torch.Tensor]) -> None:
    for param, values in saved.items():
        param.copy_(values)
    engine.mark_written()


def _written_outside(engine: Engine) -> list[nn.Parameter]:
    now = [(param.data_ptr(), param._version) for param in engine.managed]
    if now == engine.seen:
        return []
    return [param for param, place in engine.managed.items() if now[place] != engine.seen[place]]


def notice_writes(engine: Engine) -> None:
    """Honour weights that were written from outside since the last call: they become the masters."""
    changed = _written_outside(engine)
    for param in changed:
        check_unmoved(engine, param)
    for param in changed:
        if param in engine.weights:
            _absorb(engine, engine.weights[param])
        else:
            engine.residents[param].read_weights()
        engine.seen[engine.managed[param]] = written(param)


def check_unmoved(engine: Engine, param: nn.Parameter) -> None:
    """Refuse a parameter that has changed its device, dtype or shape since the optimizer was built."""
    managed = engine.weights[param].weight if param in engine.weights else engine.residents[param].resident
    label = managed.name or f"a parameter of shape {tuple(managed.shape)}"
    for what, now, then in (
        ("device", param.device, engine.device),
        ("dtype", param.dtype, managed.dtype),
        ("shape", tuple(param.shape), tuple(managed.shape)),
        ("memory layout", param.is_contiguous(), managed.contiguous),
    ):
        if now != then:
            raise RuntimeError(
                f"{label} changed its {what} from {then} to {now} after the optimizer was built; move, convert or resize the "
                "model first and build the optimizer then"
            )


def _absorb(engine: Engine, state: WeightState) -> None:
    """As after a synchronous step: every gradient so far is in the moments, and the written weights are the masters."""
    param, block, place = state.weight.param, state.block, state.place
    if state.restored is None or not torch.equal(param.detach().cpu(), state.restored):
        block.settle()
        for window in block.queue:
            window.dropped.add(place)
        _replay_now(engine, state, block.open)
        block.open = [collected.without(place) for collected in block.open]
        state.host.read_weights()
        block.half.read_weights(place)
