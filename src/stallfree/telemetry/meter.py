"""Counts what a user wants to see of a run, on the device where the numbers arise; read only when asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stallfree.engine.blocks import Weight
    from stallfree.engine.channels import Summed
    from stallfree.engine.transfer import Link


class Meter:
    """Stalls, bytes, norms and rho of the last call, and totals since construction."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.restages = self.reselections = 0
        self.norm: Tensor | None = None
        self.skipped: Tensor | None = None  # calls, int64 on the device
        self._skip: tuple[Tensor, Tensor] | None = None  # of the last one, there too: its call, and the norms it was judged by
        self._kinds: Sequence[tuple[str, ...]] = ()  # of parameters, of each of these norms
        self._earlier = (0, 0, "")  # of the run that was loaded: calls that were skipped, the last one, its kinds
        self._judged: tuple[Sequence[Weight], Tensor, Tensor] | None = None  # with gradient; deferred, all: [weights] fp64
        self._before = self._last = (0, 0)  # bytes down and up: in all before this call, and in the last one

    def judge(self, norm: Tensor, present: Sequence[Weight], summed: Summed) -> None:
        """Of one call: the gradient norm, the weights that have a gradient, and squared norms."""
        self.norm = norm
        self._judged = (present, summed.deferred_totals, summed.totals) if present else None

    def judge_skip(self, call: int, skip: Tensor, norms: Tensor, kinds: Sequence[tuple[str, ...]]) -> None:
        """Of one call: whether it is skipped, the norms that say so, and the kinds of parameters that each is of."""
        self.skipped = skip.to(torch.int64) if self.skipped is None else self.skipped + skip
        if self._skip is None or len(kinds) != len(self._kinds):  # parameters have joined
            self._skip, self._kinds = (torch.zeros_like(self.skipped), torch.zeros_like(norms)), kinds
        last, before = self._skip
        self._skip = torch.where(skip, call, last), torch.where(skip, norms, before)

    def skips(self) -> dict[str, Any]:
        """What is known of skipped calls, for a checkpoint. Waits for the device."""
        call, kinds = self.last_skip()
        return {"count": self._skipped_calls(), "call": call or 0, "kinds": "\n".join(kinds)}

    def load_skips(self, saved: dict[str, Any]) -> None:
        """Go on counting from there."""
        self.skipped = self._skip = None
        self._earlier = (saved.get("count", 0), saved.get("call", 0), saved.get("kinds", ""))

    def _skipped_calls(self) -> int:
        return self._earlier[0] + (0 if self.skipped is None else int(self.skipped))

    def last_skip(self) -> tuple[int | None, list[str]]:
        """The last call that was skipped, and the kinds of parameters whose gradients were not finite in it."""
        if self._skip is None or not int(self._skip[0]):
            _, call, names = self._earlier
            return call or None, names.split("\n") if call else []
        bad = (~torch.isfinite(self._skip[1])).tolist()
        kinds = [kind for wrong, some in zip(bad, self._kinds, strict=True) if wrong for kind in some]
        return int(self._skip[0]), list(dict.fromkeys(kinds))

    def finish_call(self) -> None:
        now = (self.link.bytes_down, self.link.bytes_up)
        self._last = (now[0] - self._before[0], now[1] - self._before[1])
        self._before = now
        self.link.stalls.finish_call()
        self.link.crowding.finish_call()

    def rho(self) -> tuple[float | None, dict[str, float]]:
        """Share of the squared gradient norm in deferred channels, in the last call: over all weights, and by kind."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        if self._judged is not None:
            present, deferred, total = self._judged[0], self._judged[1].tolist(), self._judged[2].tolist()
            for weight in present:
                for key in (weight.kind, ""):
                    sums[key][0] += deferred[weight.key]
                    sums[key][1] += total[weight.key]
        shares = {kind: deferred / total for kind, (deferred, total) in sums.items() if total > 0}
        return shares.pop("", None), shares

    def report(self) -> dict[str, Any]:
        """Waits for the device. Times in ms, sizes in bytes."""
        rho, by_kind = self.rho()
        last_skipped, not_finite = self.last_skip()
        down, up = self._last
        stall_total, stall = (sum(parts) for parts in zip(self.link.stalls.read(), self.link.crowding.read(), strict=True))
        return {
            "grad_norm": None if self.norm is None else float(self.norm),
            "skipped_steps": self._skipped_calls(),
            "last_skipped_call": last_skipped,
            "last_skipped_kinds": not_finite,
            "rho": rho,
            "rho_by_kind": by_kind,
            "stall_ms": stall * 1e3,
            "stall_ms_total": stall_total * 1e3,
            "bytes_down": down,
            "bytes_up": up,
            "bytes_down_total": self.link.bytes_down,
            "bytes_up_total": self.link.bytes_up,
            "restages": self.restages,
            "reselections_total": self.reselections,
        }


def mean_by_kind(values: Sequence[tuple[str, Tensor | None]]) -> tuple[float | None, dict[str, float]]:
    """Mean over all, and by kind; values that are not there yet are left out."""
    lists: dict[str, list[float]] = defaultdict(list)
    for kind, value in values:
        if value is not None:
            lists[kind].append(float(value))
            lists[""].append(float(value))
    means = {kind: sum(items) / len(items) for kind, items in lists.items()}
    return means.pop("", None), means
