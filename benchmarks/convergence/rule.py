"""The update rules under study: their settings, and when windows close, select and are published.

Field names and defaults are those of `stallfree.ZenFlowConfig`; the rule itself is docs/update-rule.md. What happens at which
call is pure arithmetic and is worked out here before a run starts, as tables that the update kernel reads on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to update deferred channels. `topk_ratio=1` is synchronous AdamW, whatever the other fields say."""

    name: str
    topk_ratio: float = 0.1
    update_interval: int = 4
    lag: int = 1
    stagger: bool = True
    rule: Literal["replay", "mean"] = "replay"
    lookahead: float | Literal["auto"] = "auto"
    deferred_lr_scale: float = 1.0
    full_warm_up_rounds: int = 20
    select_interval: int = 64
    score_decay: float = 0.9
    # Not settings of the library
    warm_up_lookahead: float | None = None
    """The look-ahead inside the warm-up; None: as outside it, which for "auto" is lag / 2 there."""
    ramp: tuple[tuple[int, int], ...] = ()
    """(S, last call) in ascending order: windows that begin no later than that call have this S, later ones `update_interval`.
    What calls of `set_update_interval` do, in the call before."""
    deferred_beta1: float | None = None
    """beta1 of deferred channels after the warm-up. Bias corrections remain those of the common beta1."""

    @property
    def synchronous(self) -> bool:
        return self.topk_ratio == 1

    @property
    def slots(self) -> int:
        """Calls whose gradients must be kept: those of a window, and those collected until it is published."""
        return 0 if self.synchronous else self.update_interval + self.lag

    def interval_at(self, call: int) -> int:
        """S of a window that begins at this call, after the warm-up."""
        return next((interval for interval, last in self.ramp if call <= last), self.update_interval)

    def lookahead_at(self, interval: int) -> float:
        return (interval - 1 + self.lag) / 2 if self.lookahead == "auto" else self.lookahead


class Window(NamedTuple):
    first: int  # the calls it collected
    last: int
    due: int  # the call that publishes it
    lookahead: float
    selects: bool  # a new selection takes effect at its close


def windows_of(method: Method, phase: int, calls: int) -> list[Window]:
    """A block's windows that close in calls 1..calls. A selection is taken to change something: its window is due at once."""
    if method.synchronous:
        return []
    windows: list[Window] = []
    interval, first, last_selection = 1, 1, 0
    for call in range(1, calls + 1):
        warming, warming_next = call <= method.full_warm_up_rounds, call < method.full_warm_up_rounds
        if not (warming or call % interval == phase % interval or call - first + 1 >= interval):
            continue
        interval = 1 if warming_next else method.interval_at(call + 1)
        due = call if warming else call + method.lag
        selects = not warming_next and method.topk_ratio > 0
        selects = selects and (not last_selection or call - last_selection >= method.select_interval)
        if selects:
            last_selection, due = call, min(due, call + 1)
        lookahead = method.warm_up_lookahead if warming_next else None
        windows.append(Window(first, call, due, method.lookahead_at(interval) if lookahead is None else lookahead, selects))
        first = call + 1
    return windows


class Schedule:
    """The windows of all blocks of one run, as tables. The row after the last block is for resident parameters: no windows."""

    def __init__(self, method: Method, blocks: int, calls: int, device: torch.device | str = "cpu") -> None:
        self.device, self.calls = device, calls
        phases = method.update_interval if method.stagger else 1
        self.windows = [windows_of(method, phase, calls) for phase in range(phases)]  # block b has phase b % phases
        self.phase_of_block = [block % phases for block in range(blocks)]
        due = torch.tensor([1, 0], dtype=torch.int32).repeat(calls + 1, phases + 1, 0 if method.synchronous else 1, 1)
        lookahead = torch.zeros(calls + 1, phases + 1)
        self.selecting: dict[int, list[int]] = {}  # call -> blocks whose new selection takes effect after it
        for phase, windows in enumerate(self.windows):
            published = [window for window in windows if window.due <= calls]
            assert len({window.due for window in published}) == len(published), "a lag above S is not simulated"
            if published:
                at = torch.tensor([window.due for window in published])
                due[at, phase, 0] = torch.tensor([window[:2] for window in published], dtype=torch.int32)
                lookahead[at, phase] = torch.tensor([float(window.lookahead) for window in published])
            for window in windows:
                if window.selects:
                    blocks_of_phase = [block for block, its in enumerate(self.phase_of_block) if its == phase]
                    self.selecting.setdefault(window.last, []).extend(blocks_of_phase)
        rows = [*self.phase_of_block, phases]
        self.due = due[:, rows].to(device)
        """[calls + 1, blocks + 1, 1, 2] int32: first and last call of the window that a call publishes; (1, 0) if none.
        Synchronous AdamW has no windows: [calls + 1, blocks + 1, 0, 2]."""
        self.lookahead = lookahead[:, rows].to(device)

    def publishes_in_its_call(self, call: int) -> bool:
        """Whether windows that close at this call have lag 0."""
        return any(w.last == call == w.due for windows in self.windows for w in windows)

    def outstanding(self, call: int) -> Tensor:
        """[blocks + 1, windows, 2] int32: the closed and the open windows that a flush after this call would apply."""
        rows = []
        for windows in self.windows:
            waiting = [list(w[:2]) for w in windows if w.last <= call < w.due]
            collected = max((w.last for w in windows if w.last <= call), default=0)
            rows.append([*waiting, [collected + 1, call]] if windows else [])
        width = max((len(row) for row in rows), default=0)
        rows = [*(rows[phase] for phase in self.phase_of_block), []]
        padded = [row + [[1, 0]] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int32, device=self.device).reshape(len(padded), width, 2)


def learning_rates(peak: float, calls: int, warm_up: int = 20, floor: float = 0.1) -> Tensor:
    """[calls + 1] float64, entry t for call t: linear warm-up, then a cosine down to `floor` of the peak. Entry 0 is 0."""
    call = torch.arange(calls + 1, dtype=torch.float64)
    progress = ((call - warm_up) / max(calls - warm_up, 1)).clamp(0, 1)
    cosine = floor + (1 - floor) * 0.5 * (1 + torch.cos(torch.pi * progress))
    return peak * torch.where(call < warm_up, call / max(warm_up, 1), cosine)
