"""Ways in and out: torch.optim.AdamW's state in both directions, and the exact weights as a Transformers model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stallfree.checkpoints.commit import sync
from stallfree.engine import state
from stallfree.engine.blocks import STATE, describe
from stallfree.engine.checkpoint import NONE
from stallfree.engine.sharding import is_sharded
from stallfree.optimizer import ZenFlowAdamW

# Of torch.optim.AdamW's groups, what ours do not have; with these values they mean nothing.
OPTIONS = dict(
    amsgrad=False,
    maximize=False,
    foreach=None,
    capturable=False,
    differentiable=False,
    fused=None,
    decoupled_weight_decay=True,
)
MEAN_ANYTHING = ("foreach", "capturable", "fused")  # how the same is computed
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")  # as save_pretrained names them


class AdamWState(NamedTuple):
    """What torch.optim.AdamW goes on from."""

    state_dict: dict[str, Any]  # for its load_state_dict
    masters: list[Tensor]  # fp32, host, one per parameter of the groups, in order; a bf16 model holds them rounded


def to_adamw_state(optimizer: ZenFlowAdamW) -> AdamWState:
    """The state of a torch.optim.AdamW that had taken the same steps: every gradient so far is in it.

    Training here may go on as if nobody had asked. The copies need 12 bytes of host memory per parameter.

    Raises:
        ValueError: channels of a weight have taken different numbers of steps, as with rule="mean"; AdamW counts per parameter.
    """
    with optimizer.engine.uninterrupted():
        entries = state.finished(optimizer.engine)
    states, masters, groups, number = {}, [], [], 0
    for group in optimizer.param_groups:
        first = number
        for name, param in _members(group):
            if param in entries:
                entry = entries[param]
                masters.append(entry["master"])
                if step := _step(entry["step"], name, param):
                    moments = {name: entry[name].clone(memory_format=torch.contiguous_format) for name in STATE[1:]}
                    states[number] = {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")} | moments
            else:
                masters.append(param.detach().to("cpu", torch.float32, copy=True))
            number += 1
        groups.append(OPTIONS | {key: value for key, value in group.items() if key != "params"})
        groups[-1]["params"] = list(range(first, number))
    return AdamWState({"state": states, "param_groups": groups}, masters)


def from_adamw_state(optimizer: ZenFlowAdamW, state_dict: dict[str, Any], masters: Sequence[Tensor] | None = None) -> None:
    """Go on where a torch.optim.AdamW stopped: its moments, steps and groups. What is in flight here is given up.

    The call count becomes AdamW's step count; channels are selected anew.

    Args:
        masters: fp32 weights, one per parameter of the groups, in order. None: the parameters as they are.

    Raises:
        ValueError: the state is of another optimizer or another model. Nothing has been changed.
    """
    groups = optimizer.param_groups
    optimizer.engine.refuse_sharded("from_adamw_state()")
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in state_dict["param_groups"]]:
        raise ValueError(
            "the state_dict is of another model: its groups hold other numbers of parameters than this optimizer's"
        )
    members = [member for group in groups for member in _members(group)]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    if masters is None:
        masters = [param.detach() for _, param in members]
    if len(masters) != len(members):
        raise ValueError(f"there are {len(members)} parameters and {len(masters)} masters")
    own = optimizer.state_dict()
    places = [place for group in own["param_groups"] for place in group["params"]]
    entries, frozen = {}, []
    for (name, param), number, master, place in zip(members, numbers, masters, places, strict=True):
        if master.shape != param.shape:
            raise ValueError(f"{describe(name, param)} needs master of shape {tuple(param.shape)}, not {tuple(master.shape)}")
        if place not in own["state"]:
            frozen.append((param, master))
        else:
            entries[place] = _entry(name, param, own["state"][place], state_dict["state"].get(number, {}), master)
    calls = max((int(entry["step"].max()) for entry in entries.values()), default=0)
    for entry in entries.values():
        entry["clock"] = _fresh_clock(optimizer, max(calls, 1))
    converted = [_our_group(theirs, ours) for theirs, ours in zip(state_dict["param_groups"], own["param_groups"], strict=True)]
    optimizer.load_state_dict({"state": entries, "param_groups": converted})
    with torch.no_grad():
        for param, master in frozen:
            param.copy_(master)


def _fresh_clock(optimizer: ZenFlowAdamW, call: int) -> dict[str, Any]:
    clock = type(optimizer.engine.clock).of(optimizer.config)
    return {"call": call, "interval": clock.interval, "warm_up": clock.warm_up, "last_lr": clock.last_lr}


def _entry(name: str, param: nn.Parameter, ours: dict[str, Any], theirs: dict[str, Any], master: Tensor) -> dict[str, Any]:
    """Our state of a parameter of which AdamW says `theirs`; nothing, if it has not seen a gradient of it."""
    label = describe(name, param)
    if theirs and set(theirs) != {"step", *STATE[1:]}:
        raise ValueError(
            f"the state of {label} has {', '.join(sorted(theirs))}: torch.optim.AdamW's has step, exp_avg, exp_avg_sq"
        )
    count = float(theirs.get("step", 0))
    if count != int(count) or count < 0:
        raise ValueError(f"the state of {label} has taken {count} steps, which is no number of steps")
    moments = {key: theirs[key] if theirs else torch.zeros((), device="cpu").expand(param.shape) for key in STATE[1:]}
    for key, tensor in moments.items():
        if tensor.shape != param.shape:
            raise ValueError(f"{label} needs {key} of shape {tuple(param.shape)}, not {tuple(tensor.shape)}")
    entry = ours | moments | {"master": master.float(), "step": torch.full_like(ours["step"], int(count))}
    if "published" in ours:  # a weight, of which everything is deferred and nothing is in flight
        entry |= {"published": master.to(param.dtype), "score": torch.zeros_like(ours["score"])}
        entry |= {"selected": torch.full_like(ours["selected"], NONE), "passes": None, "slots": (), "windows": ()}
        entry["schedule"] = {"interval": 1, "last_selection": 0}
    return entry


def _our_group(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    for name, value in OPTIONS.items():
        if name not in MEAN_ANYTHING and theirs.get(name, value) != value:
            raise ValueError(
                f"{name}={theirs[name]!r} is not supported: the update here is torch.optim.AdamW's with {name}={value!r}"
            )
    kept = {key: value for key, value in theirs.items() if key not in OPTIONS and key != "params"}
    return kept | {"params": ours["params"]}


def _members(group: dict[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    return zip(group.get("param_names") or [""] * len(group["params"]), group["params"], strict=True)


def _step(steps: Tensor, name: str, param: nn.Parameter) -> int:
    low, high = (int(end) for end in steps.aminmax()) if steps.numel() else (0, 0)
    if low != high:
        raise ValueError(
            f"channels of {describe(name, param)} have taken {low} to {high} AdamW steps, as under the rule mean, where "
            "deferred ones take one per window: torch.optim.AdamW has one count per parameter, so it cannot go on from here"
        )
    return low


def export_model(model: Any, optimizer: ZenFlowAdamW, directory: str | Path, *, tokenizer: Any = None) -> None:
    """Write the exact weights, those a flush would give, in Transformers format; training goes on as if nobody had asked.

    Of a sharded model: on all ranks. Rank 0 gathers tensor by tensor into its host memory, and writes.

    >>> export_model(model, optimizer, "my-model", tokenizer=tokenizer)  # doctest: +SKIP
    >>> AutoModelForCausalLM.from_pretrained("my-model")  # doctest: +SKIP
    """
    if not hasattr(model, "save_pretrained"):
        raise TypeError(
            f"{type(model).__name__} is no Transformers model: save its exact weights with torch.save(model.state_dict(), ...) "
            "inside optimizer.exact_weights()"
        )
    with optimizer.exact_weights():
        write_model(model, tokenizer, Path(directory))


def write_model(model: Any, tokenizer: Any | None, directory: Path) -> None:
    """Write the model as it is in Transformers format, replacing an earlier one only once the new one is complete."""
    weights = _gathered(model) if any(is_sharded(param) for param in model.parameters()) else None
    if weights is not None and torch.distributed.get_rank():
        return
    partial = directory / ".saving"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        mode = (partial / "config.json").stat().st_mode  # safetensors makes files that nobody else may read
        for file in filter(Path.is_file, partial.iterdir()):
            file.chmod(mode)
            sync(file)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk nobody has room for half a model
        raise
    _replace(directory, partial)


def _replace(directory: Path, partial: Path) -> None:
    """Move a new model to where an old one may be, in an order in which a kill leaves one of them for Transformers to find.

    It takes model.safetensors if that is there, else what the index names. So the file that shows new shards comes after them,
    and old ones go when the new model is whole. Only shards of the same names are a mixture while they are moved.
    """
    old = {path.name for path in directory.iterdir() if WEIGHTS.fullmatch(path.name)}
    new = sorted((path.name for path in partial.iterdir()), key=lambda name: (bool(WEIGHTS.fullmatch(name)), name))
    for name in new:  # of weights the shards, then the single file or the index: "-" is before "."
        if (partial / name).is_dir() and (directory / name).is_dir():  # of chat templates, where a tokenizer has several
            shutil.rmtree(directory / name)
        (partial / name).replace(directory / name)
    sync(directory)
    for name in sorted(old - set(new), reverse=True):
        (directory / name).unlink()
    partial.rmdir()


def _gathered(model: nn.Module) -> dict[str, Tensor]:
    """On rank 0 the whole state_dict, in host memory; on others, which take part, nothing."""
    first = torch.distributed.get_rank() == 0
    found: dict[int, Tensor] = {}  # tied weights stay one tensor
    whole: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in found:
            full = tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()
            found[id(tensor)] = full.cpu() if first else full.new_empty(0)
        if first:
            whole[name] = found[id(tensor)]
    return whole
