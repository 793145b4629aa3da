"""The optimizer's state as torch sees it: parameter-shaped views of the host arrays, and what is in flight.

Everything lives in `state[p]`, so that whatever carries per-parameter state carries all of it. Nothing is copied on export: the
rows of selected channels are filled into the room that the host arrays keep for them.

From construction on the same names are there, with tensors of the same shapes: torch.distributed.checkpoint loads into what an
optimizer that has just been built exports. What is in flight has no fixed shape. It is in tuples, which are one value to it.

Of a sharded parameter, what has its shape or one number per channel is a DTensor, which any number of ranks can load. What else
differs between ranks carries the rank in its name: of equal names only one rank's value is kept.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stallfree.engine.blocks import STATE
from stallfree.engine.checkpoint import FIXED, NONE, VERSION, Checkpoint, Entry, selected_of
from stallfree.engine.device import Division
from stallfree.engine.pipeline import Engine
from stallfree.engine.residents import ResidentState
from stallfree.engine.schedule import BlockSchedule
from stallfree.engine.sharding import layout_of, of_this_rank, whole, whole_channels
from stallfree.engine.weights import notice_writes
from stallfree.engine.window import BlockState, CollectedCall, WeightState, Window
from stallfree.kernels.hyper import Hyper


def populate(engine: Engine, into: MutableMapping[Any, Any]) -> None:
    """Views of the live state, there from construction on."""
    for param, state in engine.weights.items():
        into[param] = {name: whole(param, state.weight.shaped(getattr(state.host, name))) for name in STATE}
        into[param]["step"] = whole_channels(param, state.weight.channel_axes, state.host.steps)
    for param, resident in engine.residents.items():
        into[param] = {name: whole(param, getattr(resident, name)) for name in STATE}
        into[param]["step"] = resident.steps[:1]


# Export


@torch.no_grad()
def export(engine: Engine, into: MutableMapping[Any, Any]) -> None:
    """Bring `state[p]` up to date. Waits for host work under way; changes nothing that training can see."""
    _prepare(engine, "state_dict()")
    clock = {
        "call": engine.clock.call,
        "interval": engine.clock.interval,
        "warm_up": engine.clock.warm_up,
        "last_lr": engine.clock.last_lr,
        "tuner": engine.tuner.state(),
        "skips": engine.meter.skips(),
    }
    config = {name: getattr(engine.config, name) for name in (*FIXED, "update_interval")}
    header = {"version": VERSION, "config": config, "clock": clock}
    populate(engine, into)
    for number, group in enumerate(engine.groups):
        for place, resident in enumerate(group.residents):
            into[resident.param].update(header, block=number, place=place, layout=layout_of(resident.param))
    for number, block in enumerate(engine.blocks):
        block.settle()
        for state in block.weights:
            entry = into[state.weight.param]
            entry.update(header, block=number, place=state.place, phase=block.phase, channel_dim=state.weight.channel_dim)
            entry.update(_export_weight(block, state))


def _prepare(engine: Engine, what: str) -> None:
    engine.check_usable()
    engine.refuse_early(what)
    notice_writes(engine)


@torch.no_grad()
def finished(engine: Engine) -> dict[nn.Parameter, Entry]:
    """AdamW's state as a flush would leave it, in copies on the host, parameter-shaped; changes nothing."""
    _prepare(engine, "to_adamw_state()")
    entries = {param: _finished_weight(engine, state) for param, state in engine.weights.items()}
    for param, resident in engine.residents.items():
        entries[param] = {name: whole(param, getattr(resident, name).to("cpu", copy=True)) for name in STATE}
        entries[param]["step"] = resident.steps[:1].cpu()
    return entries


def _finished_weight(engine: Engine, state: WeightState) -> Entry:
    block, host = state.block, state.host
    block.settle()
    entry = {name: getattr(host, name).clone() for name in STATE} | {"steps": host.steps.clone()}
    division = block.half.installed
    gradients = tuple(state.gradients(block.open, division))
    if gradients:
        engine.run(state, replace(host.job(gradients, division.divided, 0.0, None), **entry))
    entry = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in entry.items()}
    held = block.half.installed.selected[state.place].to("cpu")
    if held.numel():
        for (ours, _), copy in zip(state.halves(), entry.values(), strict=True):
            copy[held] = ours.to("cpu")
    param = state.weight.param
    return {name: whole(param, state.weight.shaped(entry[name])) for name in STATE} | {"step": entry["steps"]}


def _export_weight(block: BlockState, state: WeightState) -> Entry:
    half, host, place, param = block.half, state.host, state.place, state.weight.param
    selected = half.installed.selected[place]
    held = selected.to("cpu")
    for ours, theirs in state.halves():
        if held.numel():
            theirs[held] = ours.to("cpu", theirs.dtype)
    exported: Entry = {
        "layout": layout_of(param),
        "published": param.detach(),
        "score": whole_channels(param, state.weight.channel_axes, half.nobody.channels_of(half.score, place)),
        "schedule": {
            "interval": block.schedule.interval,
            "last_selection": block.schedule.last_selection,
        },
        "passes": block.passes_expected[place],
        "usual": {  # what the next backward pass is compared with
            "expected": block.expected[place],
            "watched": block.watched is state,
            "last": block.last_before is state,
            "alike": block.alike,
            "regular": block.regular,
            "turn": block.turn,
        },
        "in_flight": bool(block.open or block.queue),
    }
    own: Entry = {
        "selected": selected if held.numel() else selected.new_full((state.weight.selected_count,), NONE),
        "slots": tuple(_export_slot(collected, state) for collected in block.open),
        "windows": tuple(_export_window(window, state) for window in block.queue),
    }
    if state.weight.selected_count and host.exp_avg.dtype != torch.float32:  # the host's room would round the device's moments
        moments = torch.stack((half.rows(half.exp_avg, place), half.rows(half.exp_avg_sq, place)))
        shape = (2, state.weight.selected_count, state.weight.length)
        own["selected_moments"] = moments if held.numel() else moments.new_zeros(shape)
    return exported | of_this_rank(param, own)


def _export_slot(collected: CollectedCall, state: WeightState) -> dict[str, Any]:
    hyper, layout = collected.hypers[state.place], state.block.half.division.layout
    slot: dict[str, Any] = {"call": collected.call, "hyper": None if hyper is None else list(hyper)}
    if hyper is not None:
        assert collected.memory is not None
        slot["skipped"] = collected.skipped
        slot["factor"] = collected.factor(state.weight.key)
        slot["grad"] = _alone(layout.deferred_rows(collected.memory, state.place))
    return slot


def _alone(part: Tensor) -> Tensor:
    """The same host memory as a storage of its own: who pickles a part of a slot would take the whole slot along."""
    start = part.storage_offset() * part.itemsize
    storage = part.untyped_storage()[start : start + part.nbytes]
    return torch.empty(0, dtype=part.dtype, device="cpu").set_(storage, 0, part.shape, part.stride())


def _export_window(window: Window, state: WeightState) -> dict[str, Any]:
    division, place = window.division, state.place
    deferred = division.deferred[place]
    if window.shown:  # during backward already: its slots are free
        published = state.weight.rows_of(state.weight.shard)[deferred]
    else:
        published = _alone(division.layout.deferred_rows(window.published, place))
    return {
        "due": window.due,
        "call": window.calls[0].call,
        "deferred": deferred,
        "published": published,
        "hands_over": window.hands_over,
        "dropped": place in window.dropped,
    }


# Load


@torch.no_grad()
def abandon(engine: Engine) -> None:
    """Let go of all that is under way: it belongs to the state that is given up, and so do the gradients in `.grad`."""
    engine.sending.forget()
    for block in engine.blocks:
        block.settle()
        block.early = None
        block.let_go()
        for state in block.weights:
            state.writes = []
        block.clear()
        if block.filling is not None:
            block.give_back([block.filling])
            block.filling = None
    engine.selected.let_go()
    engine.staging.handles.after_call()
    for param in engine.ledger:
        param.grad = None


@torch.no_grad()
def load(engine: Engine, checkpoint: Checkpoint) -> None:
    """Take over a state that fits."""
    clock = checkpoint.first["clock"]
    engine.clock.call = clock["call"]
    same = checkpoint.first["config"]["update_interval"] == engine.config.update_interval  # otherwise the new setting holds
    if same:
        engine.clock.interval = clock["interval"]
    engine.clock.warm_up, engine.clock.last_lr = clock["warm_up"], clock["last_lr"]
    engine.tuner.load(engine.clock, clock.get("tuner", {}), same)
    engine.meter.load_skips(clock.get("skips", {}))
    for param, resident in engine.residents.items():
        if clock["call"]:
            _load_resident(resident, checkpoint.entries[param])
        else:  # nothing had happened: weights, settings and the division into blocks say it all
            resident.reset()
        engine.see(param)
    entries = {param: _apart(engine, checkpoint.entries[param]) for param in engine.weights}
    for block in engine.blocks:
        _load_block(engine, block, [entries[param] for param in block.params])
    engine.expect_windows()


def _apart(engine: Engine, entry: Entry) -> Entry:
    """An entry, without memory of the slots that loading fills: it may be this optimizer's own."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and engine.pool.holds(value) else value

    in_flight = {name: entry[name] for name in ("slots", "windows")}
    return entry | {
        name: tuple({key: copied(value) for key, value in part.items()} for part in parts) for name, parts in in_flight.items()
    }


def _load_resident(resident: ResidentState, saved: Entry) -> None:
    for name in STATE:
        getattr(resident, name).copy_(saved[name])
    resident.steps.copy_(saved["step"])
    resident.show()


def _load_block(engine: Engine, block: BlockState, entries: list[Entry]) -> None:
    block.expect()
    block.regular, block.watched, block.last, block.last_before, block.alike = False, None, None, None, 0
    engine.hooks.watch_block(block)  # until it is known how gradients come
    for state in block.weights:
        state.stream = None
    block.schedule = BlockSchedule(entries[0]["phase"])
    if not engine.clock.call:
        block.reset()
        return
    block.schedule = BlockSchedule(entries[0]["phase"], **entries[0]["schedule"])
    _load_half(block, entries)
    for state, saved in zip(block.weights, entries, strict=True):
        _load_weight(engine, state, saved)
    for slots in zip(*(saved["slots"] for saved in entries), strict=True):
        block.open.append(_load_call(engine, block, slots))
    for parts in zip(*(saved["windows"] for saved in entries), strict=True):
        block.queue.append(_load_window(block, parts))
    _load_usual(engine, block, [saved["usual"] for saved in entries])


def _load_usual(engine: Engine, block: BlockState, entries: list[dict[str, Any]]) -> None:
    """How gradients have come lately: it decides what is published during backward, and so what a surprise would read."""
    block.alike, block.regular, block.turn = (entries[0][name] for name in ("alike", "regular", "turn"))
    for state, saved in zip(block.weights, entries, strict=True):
        block.expected[state.place] = saved["expected"]
        if saved["last"]:
            block.last_before = state
        if saved["watched"]:
            engine.hooks.watch_alone(block, state)
    block.missing = sum(block.expected)


def _load_half(block: BlockState, entries: list[Entry]) -> None:
    half = block.half
    half.retention = [None] * len(entries)
    selected = [selected_of(saved) for saved in entries]
    half.follow(_division(block, selected))
    if block.exchange:
        here = torch.cat(selected).to("cpu")
        block.exchange.selected.copy_(here) if half.installed.divided else block.exchange.selected.fill_(-1)


def _division(block: BlockState, selected: list[Tensor]) -> Division:
    half = block.half
    layout = half.chosen if sum(map(len, selected)) else half.nobody
    deferred = []
    for channels, segment in zip(selected, layout.segments, strict=True):
        rest = torch.ones(segment.channels, dtype=torch.bool, device="cpu")
        rest[channels.to("cpu")] = False
        deferred.append(rest.nonzero().flatten().to(half.device))
    return Division.of(layout, [channels.to(half.device, copy=True) for channels in selected], deferred)


def _load_weight(engine: Engine, state: WeightState, saved: Entry) -> None:
    half, host, place = state.block.half, state.host, state.place
    for name in STATE:
        rows, mine = state.weight.rows_of(saved[name]), getattr(host, name)
        if rows.data_ptr() != mine.data_ptr():  # torch.distributed.checkpoint has loaded into what is exported
            mine.copy_(rows)
    host.steps.copy_(saved["step"])
    half.nobody.channels_of(half.score, place).copy_(saved["score"])
    held = half.installed.selected[place].to("cpu")
    if held.numel():
        for ours, theirs in state.halves():
            ours.copy_(theirs[held])
        if "selected_moments" in saved:
            half.rows(half.exp_avg, place).copy_(saved["selected_moments"][0])
            half.rows(half.exp_avg_sq, place).copy_(saved["selected_moments"][1])
    if half.installed.divided:
        host.deferred.copy_(half.installed.deferred[place])
    state.block.passes_expected[place] = saved["passes"]
    param = state.weight.param
    state.weight.shard.copy_(saved["published"])
    engine.see(param)
    state.block.restored[place] = saved["published"].to("cpu", copy=True)


def _load_call(engine: Engine, block: BlockState, slots: tuple[dict[str, Any], ...]) -> CollectedCall:
    record = torch.ones(1 + len(engine.weights), dtype=torch.float32, device="cpu")
    record[0] = any(slot.get("skipped", False) for slot in slots)
    memory = block.take_slot() if any(slot["hyper"] is not None for slot in slots) else None
    for state, slot in zip(block.weights, slots, strict=True):
        if slot["hyper"] is not None:
            assert memory is not None
            record[1 + state.weight.key] = slot["factor"]
            block.half.division.layout.deferred_rows(memory, state.place).copy_(slot["grad"])
    hypers = tuple(None if slot["hyper"] is None else Hyper(*slot["hyper"]) for slot in slots)
    filled, block.filling = block.filling, None
    return CollectedCall(slots[0]["call"], record, hypers, filled, memory)


def _load_window(block: BlockState, parts: tuple[dict[str, Any], ...]) -> Window:
    selected = []
    for part, state in zip(parts, block.weights, strict=True):
        rest = torch.ones(state.weight.channels, dtype=torch.bool, device="cpu")
        rest[part["deferred"].to("cpu")] = False
        selected.append(rest.nonzero().flatten())  # not in the order of places, which nobody asks for
    division = _division(block, selected)
    slot = block.pool.take(block.block, division.layout.deferred_numel * block.block.dtype.itemsize)
    memory = slot.rows(block.block.dtype, division.layout.deferred_numel)
    for state, part in zip(block.weights, parts, strict=True):
        division.layout.deferred_rows(memory, state.place).copy_(part["published"])
    record = torch.ones(1, dtype=torch.float32, device="cpu")
    call = CollectedCall(parts[0]["call"], record, (None,) * len(parts), slot, memory)
    return Window(
        calls=[call],
        due=parts[0]["due"],
        lookahead=0.0,
        division=division,
        pieces=block.pieces(division, call),
        hands_over=parts[0]["hands_over"],
        dropped={place for place, part in enumerate(parts) if part["dropped"]},
    )
