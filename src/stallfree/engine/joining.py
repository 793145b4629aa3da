"""Parameters join an engine: checked, sorted into residents and blocks, given their state, watched.

At construction, with a new group, when a frozen one starts to train, and when a checkpoint says how they were grouped.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from stallfree import planner
from stallfree.engine.blocks import Block, Resident, build_blocks, check_trainable, classify, describe, layer_of
from stallfree.engine.cores import near
from stallfree.engine.device import SelectedState
from stallfree.engine.residents import ResidentGroup, resident_groups
from stallfree.engine.sharding import LAYOUT_SHAPE, Agreement, OwnGradients, RankSums, is_sharded
from stallfree.engine.slots import plan_slots
from stallfree.engine.window import BlockState

if TYPE_CHECKING:
    from stallfree.engine.pipeline import Engine

Named = Sequence[tuple[str, nn.Parameter]]
OPEN: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines that have not been closed


def adopt(engine: Engine, named: Named) -> None:
    """Take parameters under management.

    Raises:
        TypeError, ValueError, MemoryError, RuntimeError: before anything is changed. If memory that was there has gone since,
            the engine is of no more use.
    """
    check(engine, named)
    residents, split = classify(named, engine.config, first_key=len(engine.weights))
    for resident in residents:
        if not resident.contiguous and resident.param.dim() > 1 and resident.param.numel() >= engine.config.min_numel:
            warnings.warn(
                f"{resident.name or tuple(resident.shape)} is not contiguous and is updated whole on the device, "
                "for 12 bytes per element; call .contiguous() on it before building the optimizer",
                stacklevel=3,
            )
    try:
        take(engine, resident_groups(residents), build_blocks(split, engine.config))
    except BaseException as error:  # of memory, mostly: some parameters have joined, others have not
        engine.failed = error
        raise


def check(engine: Engine, named: Named) -> None:
    """Refuse more parameters that cannot be trained, or not here, or that there is no memory for."""
    check_ranks(named)
    check_trainable(named, engine.device)
    needed = planner.plan(named, engine.config)
    if engine.blocks:  # room for copies is there
        needed = dataclasses.replace(needed, device_staging=0)
    ranks = Agreement(param for _, param in named)
    planner.check_fits(needed, engine.device, lambda number: ranks.least(number, engine.device))


def check_ranks(named: Named) -> None:
    """Refuse parameters that each of several processes would train for itself."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    plain = [describe(name, param) for name, param in named if not is_sharded(param)]
    if plain:
        raise RuntimeError(
            f"plain (unsharded) parameters in a job of several processes, {plain[0]} among them: DistributedDataParallel would "
            "keep a full copy of the host state on every rank. Use torch.distributed.fsdp.fully_shard(model) (docs/fsdp.md), "
            "on the whole model, root included, and build the optimizer after it. A pipeline stage: fully_shard(stage, "
            'mesh=mesh["dp"]), also where that is one rank'
        )


def take(engine: Engine, residents: Sequence[Sequence[Resident]], blocks: Sequence[Block]) -> None:
    """Take what is grouped already, with the weights' keys in the order of the blocks."""
    weights = [weight for block in blocks for weight in block.weights]
    members = [resident for group in residents for resident in group]
    groups = [ResidentGroup(group) for group in residents]
    engine.groups.extend(groups)
    engine.residents.update({state.resident.param: state for group in groups for state in group.states})
    engine.resident_params = list(engine.residents)
    engine.resident_forms = [LAYOUT_SHAPE(state.resident.shard) for state in engine.residents.values()]
    if weights:
        engine.channels.extend(weights)
    states = _states(engine, blocks)
    trained = [*(resident.param for resident in members), *(weight.param for weight in weights)]
    _close_others(engine, trained)
    for param in trained:
        engine.ledger.see(param)
    sharded = [resident for resident in members if is_sharded(resident.param)]
    for state in states:
        engine.hooks.watch_block(state)
        layers = {layer_of(weight.name) for weight in state.block.weights}
        state.residents = OwnGradients.of([resident.param for resident in sharded if layer_of(resident.name) in layers])
    _judge_them(engine)
    engine.adamw = None


def _states(engine: Engine, blocks: Sequence[Block]) -> list[BlockState]:
    """The new blocks with their state on the device and on the host, and room for what they send each other."""
    layouts, size = engine.layouts, engine.link.piece_bytes
    halves = [SelectedState(block, engine.channels, engine.selected, engine.kernel, layouts, size) for block in blocks]
    engine.link.reserve(blocks)
    states = []
    with near(engine.worker.cores):
        for block, half in zip(blocks, halves, strict=True):
            states.append(BlockState(block, half, engine.link, engine.pool, engine.config))
            engine.blocks.append(states[-1])
            engine.weights.update({state.weight.param: state for state in states[-1].weights})
        engine.pool.follow(plan_slots([block.block for block in engine.blocks], engine.config))
    engine.ids = [id(param) for param in engine.weights]
    return states


def _judge_them(engine: Engine) -> None:
    """Sums, norms and records are of all parameters that there are."""
    weights = engine.channels.weights
    engine.kinds = [*(group.kinds for group in engine.groups), *((weight.kind,) for weight in weights)]
    engine.agreement = Agreement([*engine.residents, *engine.weights])
    runs = [(weight.split, weight.channels) for weight in weights]
    runs += [(weight.spread, 1) for weight in weights] * 2
    engine.sums = RankSums([*runs, *((group.residents[0].spread, 1) for group in engine.groups)], engine.device)
    engine.judge.make_room()


def _close_others(engine: Engine, params: Sequence[nn.Parameter]) -> None:
    """Close other optimizers of these parameters: of two, each would take gradients that are for the other."""
    for other in list(OPEN):
        if other is not engine and other.belongs_here and any(param in other.ledger for param in params):
            other.close("the optimizer was closed when a newer ZenFlowAdamW took over its parameters")
