"""What `param_groups` say of each parameter: read anew in every call, because schedulers and users write there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from stallfree.kernels.hyper import Hyper

Group = dict[str, Any]
Hypers = dict[int, Hyper]  # by id of the parameter: tensors are slow to look up


class Settings(NamedTuple):
    """Of one call."""

    hypers: Hypers
    lr: float  # the largest that some parameter has


def read_settings(groups: Sequence[Group]) -> Settings:
    """Raises `ValueError` or `TypeError` for settings that cannot be used."""
    every = [hyper_of(group) for group in groups]
    hypers: Hypers = {}
    for group, hyper in zip(groups, every, strict=True):
        hypers.update(dict.fromkeys(map(id, group["params"]), hyper))
    return Settings(hypers, max(hyper.lr for group, hyper in zip(groups, every, strict=True) if group["params"]))


def hyper_of(group: Group) -> Hyper:
    """A group's settings as plain numbers, checked."""
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(f"{option} is not supported: the update is torch.optim.AdamW's without it")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        raise ValueError(
            "lr is a tensor on the GPU, and reading it would make the training thread wait; use a number or a CPU tensor"
        )
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if value is None or (isinstance(value, Tensor) and value.numel() != 1):
            raise TypeError(f"{name} must be one number; got {value}")
        if isinstance(value, str):  # YAML reads 2e-5 as text, and 2.0e-5 as a number
            raise TypeError(f"{name} must be a number; got the text {value!r}")
    if not (isinstance(group["betas"], Sequence) and len(group["betas"]) == 2) or isinstance(group["betas"], str):
        raise TypeError(f"betas must be two numbers; got {group['betas']!r}")
    beta1, beta2 = (float(beta) for beta in group["betas"])
    hyper = Hyper(float(lr), beta1, beta2, float(group["eps"]), float(group["weight_decay"]))
    for name, value in zip(("lr", "eps", "weight_decay"), (hyper.lr, hyper.eps, hyper.weight_decay), strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number, at least 0; got {value}")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas must be from 0 to below 1; got {group['betas']}")
    return _one_of(hyper)


@lru_cache(maxsize=64)
def _one_of(hyper: Hyper) -> Hyper:
    """The same object for the same settings: that nothing has changed, for hundreds of weights, is then seen at a glance."""
    return hyper
