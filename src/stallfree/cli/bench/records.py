"""What is measured of a mode, and the numbers that a row shows of it. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stallfree.limits import GIB

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """From before a mode's model is built to after its warm-up."""

    parameters: int
    host_bytes: int
    """Growth of the process's resident memory."""
    machine_bytes: int
    """Growth of the memory in use on the whole machine: a cross-check that everything else on it disturbs."""
    device_peak_bytes: int | None
    """Beyond what was allocated before; None on the CPU."""
    warming_up: bool = False
    """Whether the optimizer's own warm-up is longer than the measurement's."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Some steps of one mode in a row, without a synchronization between them."""

    seconds: float
    """Of all steps together."""
    step_ms: list[float]
    """Of each, by the device's clock."""
    counted: dict[str, float]
    """Growth of the optimizer's `..._total` metrics; empty for optimizers that have none."""
    chosen: dict[str, int]
    """S and the host's threads at its end; empty for optimizers that choose neither."""
    host_bytes: int
    """Growth of the process's resident memory."""
    device_peak_bytes: int | None
    """Beyond other modes' memory."""
    device_bytes: int | None
    """Growth of the reserved device memory."""


@dataclass
class Result:
    """Of one mode."""

    mode: str
    footprint: Footprint | None = None
    rounds: list[Round] = field(default_factory=list)
    beside: list[Round] = field(default_factory=list)  # the floor's, measured beside these
    note: str = ""  # what to know about the numbers
    error: str = ""  # why some are missing


def mean_ms(rounds: Sequence[Round]) -> float:
    """Per step, over whole rounds."""
    return 1e3 * sum(entry.seconds for entry in rounds) / sum(len(entry.step_ms) for entry in rounds)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def row(result: Result, floor: Footprint | None) -> dict[str, Any]:
    """The numbers of one mode. `floor`: what a model takes without an optimizer."""
    numbers: dict[str, Any] = {"mode": result.mode}
    numbers |= {name: text for name in ("note", "error") if (text := getattr(result, name))}
    if result.rounds:
        numbers |= _times(result) | _counts(result)
    if result.footprint is not None:
        numbers |= _memory(result, result.footprint, floor)
    return numbers


def _times(result: Result) -> dict[str, Any]:
    single = [value for entry in result.rounds for value in entry.step_ms]
    mean, p99 = mean_ms(result.rounds), percentile(single, 0.99)
    return {
        "steps": len(single),
        "mean_ms": mean,
        "ratio": mean / mean_ms(result.beside) if result.beside else None,
        "floor_ms": mean_ms(result.beside) if result.beside else None,
        "round_ms": [mean_ms([entry]) for entry in result.rounds],
        "floor_round_ms": [mean_ms([entry]) for entry in result.beside],
        "median_ms": percentile(single, 0.5),
        "p99_ms": p99,
        "p99_to_mean": p99 / mean,
        "max_ms": max(single),
    }


def _counts(result: Result) -> dict[str, Any]:
    steps = sum(len(entry.step_ms) for entry in result.rounds)
    names = result.rounds[0].counted.keys()
    total = {name: sum(entry.counted[name] for entry in result.rounds) for name in names}
    numbers: dict[str, Any] = {}
    for name in ("stall_ms", "crowding_ms", "host_ms"):
        if f"{name}_total" in total:
            numbers[name] = total[f"{name}_total"] / steps
    if result.footprint is not None:
        for direction in ("down", "up"):
            if (name := f"bytes_{direction}_total") in total:
                numbers[f"{direction}_bytes_per_parameter"] = total[name] / steps / result.footprint.parameters
    for name in result.rounds[0].chosen:
        numbers[f"round_{name}"] = [entry.chosen[name] for entry in result.rounds]
    if "reselections_total" in total:
        numbers["reselections"] = round(total["reselections_total"])
    return numbers


def _memory(result: Result, own: Footprint, floor: Footprint | None) -> dict[str, Any]:
    numbers: dict[str, Any] = {"parameters": own.parameters}
    if floor is not None:
        numbers["host_bytes_per_parameter"] = (own.host_bytes - floor.host_bytes) / own.parameters
        numbers["machine_bytes_per_parameter"] = (own.machine_bytes - floor.machine_bytes) / own.parameters
    numbers["host_growth_MiB"] = sum(entry.host_bytes for entry in result.rounds) / MIB
    if own.device_peak_bytes is not None:
        peaks = [entry.device_peak_bytes or 0 for entry in result.rounds]
        numbers["device_peak_GiB"] = max(own.device_peak_bytes, *peaks, 0) / GIB
        numbers["device_growth_MiB"] = sum(entry.device_bytes or 0 for entry in result.rounds) / MIB
    return numbers
