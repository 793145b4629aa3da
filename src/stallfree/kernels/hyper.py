"""The settings of one parameter in one call, as every kernel of the device half takes them."""

from __future__ import annotations

from typing import NamedTuple


class Hyper(NamedTuple):
    """One parameter's settings in one call."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
