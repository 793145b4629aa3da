"""A block's window on the host: what describes it, and what it means in jobs and in channels that change hands.

A window's gradients lie in slots in host memory, where the device copies them, one flat slot for each call. A `HostQueue` waits
until they are there, makes one `ReplayJob` of each weight's, and after a selection lets channels change hands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stallfree.kernels.hyper import Hyper
from stallfree.kernels.replay import GRADIENT_DTYPES, MOMENT_DTYPES, ReplayJob, SlotGradient, check_array


@dataclass(frozen=True, eq=False, slots=True)
class HostWeight:
    """One weight's state in host memory. All tensors keep their memory; all are contiguous."""

    master: Tensor  # [channels, length] fp32
    exp_avg: Tensor  # [channels, length] fp32 or bf16
    exp_avg_sq: Tensor  # [channels, length], dtype of exp_avg
    steps: Tensor  # [channels] int32
    deferred: Tensor  # [channels - selected] int64, ascending: the host's channels once divided; a merge overwrites it
    every: Tensor  # [channels] int64: 0, 1, 2, ...
    key: int  # for stochastic rounding, see `ReplayJob`

    @property
    def selected(self) -> int:
        return len(self.every) - len(self.deferred)


class HostExchange(NamedTuple):
    """Contiguous memory for channels that change hands: the places of a block's weights, one weight after the other."""

    master: Tensor  # [sum of selected * length] fp32: the device's state, as it comes down and goes up again
    exp_avg: Tensor  # [sum of selected * length] fp32
    exp_avg_sq: Tensor  # [sum of selected * length] fp32
    steps: Tensor  # [places] int32
    numbers: Tensor  # [2 places + rows] int32: channel of each place, of each deferred row; 1 where a place changes hands
    selected: Tensor  # [places] int32: the channel of each place so far; -1: nobody. A merge overwrites it


@dataclass(frozen=True, eq=False, slots=True)
class HostBlock:
    """What stays of a block from window to window. A queue reads it once, and holds on to it until it is closed."""

    weights: tuple[HostWeight, ...]
    record_start: int  # weight i's factor in a call's record is record[record_start + i]
    rule: Literal["replay", "mean"]
    dtype: torch.dtype  # of gradients and published rows


class Call(NamedTuple):
    """A call in a window."""

    memory: Tensor  # flat, the block's dtype: by weight, the rows [deferred or every, length] of its gradient
    record: Tensor | None  # fp32: not 0 at [0] if the device skipped the call; gradients' factors. None: not skipped, factors 1
    hypers: tuple[Hyper | None, ...]  # by weight; None: no gradient in that call


class Gate(NamedTuple):
    """A word in memory that somebody sets. The gate is open once the word has reached the value."""

    address: int  # of 32 bits
    value: int


class WindowWork(NamedTuple):
    """One block's window, or a portion of it. Memory and records are read only when the gates are open."""

    block: HostBlock
    calls: tuple[Call, ...]  # oldest first
    divided: bool  # the gradients are of the weights' `deferred` channels, else of every one
    lookahead: float
    publish: bool  # the published rows take the place of the first call's gradients
    names: str  # whose update it is, for errors
    gates: tuple[Gate, ...] = ()
    places: tuple[int, ...] | None = None  # the weights to update; None: all
    span: tuple[int, int] | None = None  # of a call's elements: only the rows that begin there are worked on; None: all
    exchange: HostExchange | None = None  # afterwards, let channels change hands as this says
    pause: float = 0.0  # seconds to sleep first: a place for tests to lose time in


def window_jobs(work: WindowWork) -> list[ReplayJob]:
    """The jobs of a window whose gates are open. A weight that no call has a gradient for publishes its masters."""
    block, jobs, offset = work.block, [], 0
    for place, weight in enumerate(block.weights):
        every, length = weight.deferred if work.divided else weight.every, weight.master.shape[1]
        low, high = work.span or (0, offset + len(every) * length)
        first, last = (min(max(-((offset - element) // length), 0), len(every)) for element in (low, high))
        rows, begin, end = every[first:last], offset + first * length, offset + last * length
        offset += len(every) * length
        if not len(rows) or (work.places is not None and place not in work.places):
            continue
        shape = (len(rows), length)
        slots = []
        for memory, record, hypers in work.calls:
            hyper = hypers[place]
            if hyper is not None and (record is None or not record[0]):
                factor = 1.0 if record is None else float(record[block.record_start + place])
                slots.append(SlotGradient(memory[begin:end].view(shape), *hyper, factor))
        jobs.append(
            ReplayJob(
                master=weight.master,
                exp_avg=weight.exp_avg,
                exp_avg_sq=weight.exp_avg_sq,
                steps=weight.steps,
                rows=rows,
                slots=tuple(slots),
                rule=block.rule,
                lookahead=work.lookahead,
                out=work.calls[0].memory[begin:end].view(shape) if work.publish else None,
                commit=True,
                key=weight.key,
            )
        )
    return jobs


def merge(block: HostBlock, exchange: HostExchange) -> None:
    """File the rows of channels that leave the device with the host's, and put those of arriving ones in their places."""
    places = len(exchange.selected)
    now, deferred, moved = exchange.numbers.long().split([places, len(exchange.numbers) - 2 * places, places])
    before, moved = exchange.selected.long(), moved.bool()
    first = start = row = 0
    for weight in block.weights:
        channels, length = weight.master.shape
        count, numel = weight.selected, weight.selected * length
        mine = slice(first, first + count)
        flats = (exchange.master, exchange.exp_avg, exchange.exp_avg_sq)
        ours = [*(flat[start : start + numel].view(count, length) for flat in flats), exchange.steps[mine]]
        pairs = list(zip(ours, (weight.master, weight.exp_avg, weight.exp_avg_sq, weight.steps), strict=True))
        leaving = moved[mine] & (before[mine] >= 0)
        for our, their in pairs:
            their[before[mine][leaving]] = our[leaving].to(their.dtype)
        for our, their in pairs:
            our[moved[mine]] = their[now[mine][moved[mine]]].to(our.dtype)
        weight.deferred.copy_(deferred[row : row + channels - count])
        first, start, row = first + count, start + numel, row + channels - count
    exchange.selected.copy_(now)


def check_block(block: HostBlock) -> None:
    """Raise `ValueError` unless a block is what `HostBlock` says. Channel numbers are left to the kernel."""
    for weight in block.weights:
        if weight.master.ndim != 2 or weight.master.shape[1] == 0 or weight.selected < 0:
            raise ValueError("a weight's master is [channels, length > 0], and no more channels are deferred than there are")
        shape = weight.master.shape
        check_array("master", weight.master, shape, (torch.float32,))
        check_array("exp_avg", weight.exp_avg, shape, MOMENT_DTYPES)
        check_array("exp_avg_sq", weight.exp_avg_sq, shape, (block.weights[0].exp_avg.dtype,))
        check_array("steps", weight.steps, shape[:1], (torch.int32,))
        check_array("deferred", weight.deferred, (len(weight.deferred),), (torch.int64,))
        check_array("every", weight.every, shape[:1], (torch.int64,))
    if block.rule not in ("replay", "mean") or block.dtype not in GRADIENT_DTYPES:
        raise ValueError(f'rule must be "replay" or "mean", not {block.rule!r}, and dtype one of {GRADIENT_DTYPES}')


def check_exchange(block: HostBlock, exchange: HostExchange) -> None:
    """Raise `ValueError` unless an exchange fits its block."""
    numel = sum(weight.selected * weight.master.shape[1] for weight in block.weights)
    places, rows = sum(w.selected for w in block.weights), sum(len(w.deferred) for w in block.weights)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        check_array(f"the exchange's {name}", getattr(exchange, name), (numel,), (torch.float32,))
    check_array("the exchange's steps", exchange.steps, (places,), (torch.int32,))
    check_array("numbers", exchange.numbers, (2 * places + rows,), (torch.int32,))
    check_array("selected", exchange.selected, (places,), (torch.int32,))


def window_numel(block: HostBlock, divided: bool) -> int:
    """Elements of one call's gradients."""
    return sum(len(weight.deferred if divided else weight.every) * weight.master.shape[1] for weight in block.weights)


def check_window(work: WindowWork, numel: int) -> None:
    """Raise `ValueError` unless a window fits its block, with calls of so many elements."""
    block = work.block
    if work.publish and not work.calls:
        raise ValueError("a window needs a call to publish")
    if work.span is not None and not 0 <= work.span[0] <= work.span[1] <= numel:
        raise ValueError(f"a window's span must lie in its {numel} elements, not from {work.span[0]} to {work.span[1]}")
    if work.exchange is not None:
        check_exchange(block, work.exchange)
    for memory, record, hypers in work.calls:
        if len(hypers) != len(block.weights):
            raise ValueError(f"{len(block.weights)} weights need as many hypers, not {len(hypers)}")
        if memory.dtype != block.dtype or memory.numel() < numel or not memory.is_contiguous():
            raise ValueError(f"a call's memory must be contiguous, {block.dtype}, and of {numel} elements")
        if record is not None and (record.dtype != torch.float32 or len(record) < block.record_start + len(block.weights)):
            raise ValueError("a call's record must be fp32 and hold a factor for each weight")
