"""What a state_dict holds, checked against the parameters it is loaded into before anything is changed.

Which parameters trained, and in which blocks, is part of the state: the calls at which weights are published depend on it. The
run that saved may have unfrozen parameters or gained groups on its way, so an optimizer built afresh may divide them otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import STATE, Block, Resident, Weight, classify, describe
from stallfree.engine.pipeline import Engine
from stallfree.engine.residents import resident_groups
from stallfree.engine.sharding import here, layout_of

VERSION = 3
NONE = -1  # in `selected`, before the first selection
# Settings that a run cannot change between saving and loading.
FIXED = (
    "topk_ratio",
    "rule",
    "lag",
    "stagger",
    "block_numel",
    "max_update_interval",
    "moments_dtype",
    "update_in_backward",
)
# What the state of a parameter says. Before the first call no more is taken from it than HEADER, and of a weight WEIGHT.
HEADER = ("version", "config", "clock", "block", "place")
WEIGHT = ("channel_dim", "phase")
ADAMW = (*STATE, "step")
IN_FLIGHT = ("published", "score", "selected", "schedule", "passes", "usual", "slots", "windows")
SCHEDULE = ("interval", "last_selection")
USUAL = ("expected", "watched", "last", "alike", "regular", "turn")
SLOT, GRADIENT = ("call", "hyper"), ("skipped", "factor", "grad")
WINDOW = ("due", "call", "deferred", "published", "hands_over", "dropped")

Entry = dict[str, Any]
Item = TypeVar("Item", Resident, Weight)


@dataclass(frozen=True)
class Checkpoint:
    """State by parameter, and the parameters as the run that saved had grouped them."""

    entries: dict[nn.Parameter, Entry]
    residents: list[list[Resident]]
    blocks: list[Block]

    @property
    def first(self) -> Entry:
        """One of them, for what all say alike."""
        return next(iter(self.entries.values()))

    @property
    def room(self) -> int:
        """`max_update_interval` of the run that saved."""
        return int(self.first["config"]["max_update_interval"])

    def fits(self, engine: Engine) -> bool:
        """Whether the engine's groups and blocks are these."""
        return _form(self.residents, self.blocks) == _form(
            [group.residents for group in engine.groups], [state.block for state in engine.blocks]
        )


def _form(residents: Iterable[Sequence[Resident]], blocks: Iterable[Block]) -> list[list[list[int]]]:
    return [
        [[id(item.param) for item in group] for group in residents],
        [[id(param) for param in block.params] for block in blocks],
    ]


def read(
    engine: Engine,
    groups: Sequence[dict[str, Any]],
    named: Sequence[tuple[str, nn.Parameter]],
    state_dict: dict[str, Any],
    any_room: bool = False,
) -> Checkpoint:
    """Pair state with parameters. named: all of the groups, in order. any_room: `max_update_interval` may differ.

    Raises:
        ValueError: the state is of another model or another configuration, or not whole.
    """
    entries = _match(engine, groups, named, state_dict)
    held = [(name, param) for name, param in named if param in entries]
    residents, weights = classify(held, engine.config)
    items: list[Resident | Weight] = [*residents, *weights]
    for item in items:
        _check_entry(engine.config, item, entries[item.param], any_room)
    if any(_is_from_elsewhere(item, entries[item.param]) for item in items):
        _spread_anew(residents, weights, entries)
    first = entries[held[0][1]]
    for item in items:
        for key in ("config", "clock"):
            if entries[item.param][key] != first[key]:
                raise ValueError(f"the state of {_label(item)} is of another moment than that of others: its {key} differs")
    for weight in weights:
        _check_in_flight(weight, entries[weight.param])
    blocks = [_block(members, entries) for members in _grouped(weights, entries)]
    for place, weight in enumerate(weight for block in blocks for weight in block.weights):
        weight.key = place
    return Checkpoint(entries, _grouped(residents, entries), blocks)


def _is_from_elsewhere(item: Resident | Weight, saved: Entry) -> bool:
    """Whether this rank's own part is not in it."""
    return saved.get("layout", "") != layout_of(item.param) or (isinstance(item, Weight) and _is_apart(saved))


def _is_apart(saved: Entry) -> bool:
    """Whether torch has set it as a full state. It takes tuples apart then, and leaves out what is empty: what stands in their
    place may be another rank's, or what was in flight here."""
    return not isinstance(saved.get("slots"), tuple)


def _spread_anew(residents: Sequence[Resident], weights: Sequence[Weight], entries: dict[nn.Parameter, Entry]) -> None:
    """Make state that was saved on other ranks, or whole, as it would be here before a selection. Blocks stay the same."""
    for weight in weights:
        saved = entries[weight.param]
        _require(weight, saved, ("schedule",))
        _require(weight, saved["schedule"], SCHEDULE, "schedule.")
        if saved.get("in_flight", saved.get("slots") or saved.get("windows")):
            theirs, ours = (layout or "unsharded" for layout in (saved.get("layout"), layout_of(weight.param)))
            if theirs == ours:
                raise ValueError(
                    f"the state of {_label(weight)} was saved mid-window, and its slots did not come whole: torch cannot set "
                    "them with full_state_dict=True. Save and load without it, or call optimizer.flush() before saving"
                )
            raise ValueError(
                f"the state of {_label(weight)} was saved mid-window under another layout ({theirs}; here it is {ours}), and "
                "what is in flight belongs to the ranks that saved it: resume on as many, or call optimizer.flush() before it"
            )
        if _is_apart(saved) and saved["clock"]["call"]:
            _check_flushed(weight, saved)
        selected = torch.full((weight.selected_count,), NONE, dtype=torch.int64, device=weight.shard.device)
        saved |= {"selected": selected, "slots": (), "windows": (), "schedule": saved["schedule"] | {"last_selection": 0}}
        saved.pop("selected_moments", None)
    for number, group in enumerate(resident_groups(residents)):
        for place, resident in enumerate(group):
            entries[resident.param] |= {"block": number, "place": place}


def _check_flushed(weight: Weight, saved: Entry) -> None:
    """Of a full state: that it came as it was saved. torch broadcasts the memory of tensors, in whatever order their elements
    lie there, and in the state of one process the host's channels lie one after the other."""
    _require(weight, saved, ("published",))
    master, published = saved["master"], saved["published"]
    if not torch.equal(master.to(published), published):
        raise ValueError(
            f"the full state of {_label(weight)} has a master that is not what was published. Call optimizer.flush() before "
            "saving; if that was done, one process has saved it: load it without broadcast_from_rank0"
        )


def _match(
    engine: Engine, groups: Sequence[dict[str, Any]], named: Sequence[tuple[str, nn.Parameter]], state_dict: dict[str, Any]
) -> dict[nn.Parameter, Entry]:
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("this is no optimizer state_dict: it lacks 'state' or 'param_groups'")
    saved_groups = state_dict["param_groups"]
    counts, saved_counts = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved_groups]
    if counts != saved_counts:
        raise ValueError(
            f"the state_dict is of another model: its groups hold {saved_counts} parameters, this optimizer's {counts}; groups "
            "that came with add_param_group(), and frozen parameters, count too"
        )
    for group, saved in zip(groups, saved_groups, strict=True):
        ours, theirs = group.get("param_names"), saved.get("param_names")
        if ours and theirs and ours != theirs:
            other = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)
            raise ValueError(
                f"the state_dict is of another model: where this one has {other[0]}, it has {other[1]} (another stage's?)"
            )
    entries: dict[nn.Parameter, Entry] = {}
    numbers = [number for saved in saved_groups for number in saved["params"]]
    for (name, param), number in zip(named, numbers, strict=True):
        if number in state_dict["state"]:
            entries[param] = here(param, state_dict["state"][number])
        elif param in engine.ledger:
            label = name or f"of shape {tuple(param.shape)}"
            raise ValueError(
                f"the state_dict has no state for parameter {number} ({label}), which trains here; if it was frozen when the "
                "state was saved, build the optimizer with it frozen, and unfreeze it after loading"
            )
    return entries


def selected_of(saved: Entry) -> Tensor:
    """The channels that the device holds, in the order of places; none before the first selection."""
    channels: Tensor = saved["selected"]
    return channels[channels != NONE]


def _label(item: Resident | Weight) -> str:
    return describe(item.name, item.param)


def _require(item: Resident | Weight, part: Any, keys: Sequence[str], where: str = "") -> None:
    for key in keys:
        if key not in part:
            raise ValueError(f"the state of {_label(item)} is not whole: {where}{key} is missing")


def _check_entry(config: ZenFlowConfig, item: Resident | Weight, saved: Entry, any_room: bool) -> None:
    label = _label(item)
    if "version" not in saved:
        raise ValueError(
            f"the state of {label} was not saved by ZenFlowAdamW; "
            "from_adamw_state(optimizer, state_dict) takes torch.optim.AdamW's"
        )
    if saved["version"] != VERSION:
        raise ValueError(f"the state_dict has format version {saved['version']}, this release reads version {VERSION}")
    _require(item, saved, HEADER)
    _require(item, saved["config"], (*FIXED, "update_interval"), "config.")
    _require(item, saved["clock"], ("call", "interval", "warm_up", "last_lr"), "clock.")
    for name in FIXED:
        ours, theirs = getattr(config, name), saved["config"][name]
        if ours != theirs and not (any_room and name == "max_update_interval"):
            limit = ", and an update_interval up to that" if name == "max_update_interval" else ""
            raise ValueError(
                f"the state_dict was saved with {name}={theirs!r}, this optimizer has {name}={ours!r}; give {name}={theirs!r}"
                f"{limit}, or carry AdamW's state over with to_adamw_state and from_adamw_state (docs/checkpoints.md)"
            )
    if ("channel_dim" in saved) != isinstance(item, Weight):
        raise ValueError(
            f"{label} is resident on one side only: use the same min_numel and topk_ratio as when the state was saved"
        )
    if isinstance(item, Weight):
        _require(item, saved, WEIGHT)
        if saved["channel_dim"] != item.channel_dim:
            raise ValueError(
                f"{label} was saved with channel_dim={saved['channel_dim']}, here it is {item.channel_dim}; give the optimizer "
                "the same names (model.named_parameters()) and channel_dim as when the state was saved"
            )
    _require(item, saved, ADAMW)
    if isinstance(item, Weight):
        for key in ("step", "score"):
            if key in saved:  # of a sharded parameter, in the shape of a row
                saved[key] = saved[key].reshape(-1)
    if saved["master"].shape == item.param.shape != item.shape:
        raise ValueError(
            f"the state_dict is a full one, and {label} is sharded here: give it to set_optimizer_state_dict with "
            "StateDictOptions(full_state_dict=True)"
        )
    for key in STATE:
        _check_shape(item, saved[key], item.shape, key)


def _check_shape(item: Resident | Weight, tensor: Tensor, shape: Sequence[int], what: str) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"the state_dict is of another model: {_label(item)} needs {what} of shape {tuple(shape)}, its state has "
            f"{tuple(tensor.shape)}"
        )


def _check_in_flight(weight: Weight, saved: Entry) -> None:
    _require(weight, saved, IN_FLIGHT)
    _require(weight, saved["schedule"], SCHEDULE, "schedule.")
    _require(weight, saved["usual"], USUAL, "usual.")
    _check_shape(weight, saved["published"], weight.shape, "published")
    for key in ("step", "score"):
        _check_shape(weight, saved[key], (weight.channels,), key)
    _check_shape(weight, saved["selected"], (weight.selected_count,), "selected")
    selected = len(selected_of(saved))
    for slot in saved["slots"]:
        _require(weight, slot, SLOT, "slots.")
        if slot["hyper"] is not None:
            _require(weight, slot, GRADIENT, "slots.")
            _check_shape(weight, slot["grad"], (weight.channels - selected, weight.length), "slots.grad")
    for window in saved["windows"]:
        _require(weight, window, WINDOW, "windows.")
        _check_shape(weight, window["published"], (len(window["deferred"]), weight.length), "windows.published")


def _grouped(items: Sequence[Item], entries: dict[nn.Parameter, Entry]) -> list[list[Item]]:
    """By block, in the order of places."""

    def block(item: Item) -> int:
        return int(entries[item.param]["block"])

    ordered = sorted(items, key=lambda item: (block(item), entries[item.param]["place"]))
    grouped = [list(members) for _, members in groupby(ordered, block)]
    for number, members in enumerate(grouped):
        if any(block(item) != number or entries[item.param]["place"] != place for place, item in enumerate(members)):
            raise ValueError(f"the state of some parameters is missing: {_label(members[0])} was saved beside others")
    return grouped


def _block(members: list[Weight], entries: dict[nn.Parameter, Entry]) -> Block:
    """The block of some weights, if what they say of it agrees."""
    said = [entries[weight.param] for weight in members]
    if len({weight.dtype for weight in members}) > 1:
        raise ValueError(f"{_label(members[0])} was saved beside others of its dtype; train in the same dtypes as then")
    held = [len(selected_of(saved)) if "selected" in saved else 0 for saved in said]
    for weight, saved, places in zip(members, said, held, strict=True):
        if _in_common(saved) != _in_common(said[0]) or (any(held) and places != weight.selected_count):
            raise ValueError(f"the state of {_label(weight)} contradicts that of {_label(members[0])}, which shares its block")
    return Block(members, said[0]["phase"])


def _in_common(saved: Entry) -> tuple[Any, ...]:
    slots = [slot["call"] for slot in saved.get("slots", ())]
    windows = [(window["call"], window["due"], window["hands_over"]) for window in saved.get("windows", ())]
    return saved["phase"], saved.get("schedule"), slots, windows
