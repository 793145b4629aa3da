"""Counts what a user wants to see of a run, on the device where the numbers arise; read only when asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stallfree.engine.blocks import Weight
    from stallfree.engine.transfer import Link
    from stallfree.kernels.judging import Verdict


class Counted(NamedTuple):
    """What is counted as it happens."""

    down: int  # bytes
    up: int
    restages: int  # gradients to which a further backward pass has added, once per weight and pass


class Meter:
    """Stalls, bytes, norms and rho of the last call, totals since construction, and skipped calls since training began."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.restages = self.reselections = 0  # in all
        self._verdict: Verdict | None = None  # of each call
        self._kinds: Sequence[tuple[str, ...]] = ()  # of parameters, of each norm that a call is judged by
        self._earlier = (0, 0, "")  # before that: calls that were skipped, the last one, its kinds
        self._judged: tuple[Verdict, Sequence[Weight]] | None = None  # in the last call; weights with a gradient
        self._before = self._last = Counted(0, 0, 0)  # in all before this call, and in the last one

    def follow(self, verdict: Verdict, kinds: Sequence[tuple[str, ...]]) -> None:
        """Look here from now on: kinds of parameters are those of the verdict's norms. Waits for the device."""
        if self._verdict is not None:
            self._count_from(self.skips())
        self._verdict, self._kinds = verdict, kinds

    def judged(self, present: Sequence[Weight]) -> None:
        """A call has been; present: the weights that had a gradient."""
        assert self._verdict is not None
        self._judged = (self._verdict, present)

    def skips(self) -> dict[str, Any]:
        """What is known of skipped calls, for a checkpoint. Waits for the device."""
        call, kinds = self.last_skip()
        return {"count": self._skipped_calls(), "call": call or 0, "kinds": "\n".join(kinds)}

    def load_skips(self, saved: dict[str, Any]) -> None:
        """Go on counting from there."""
        if self._verdict is not None:
            self._verdict.skips.zero_()
        self._count_from(saved)

    def _count_from(self, saved: dict[str, Any]) -> None:
        self._earlier = (saved.get("count", 0), saved.get("call", 0), saved.get("kinds", ""))

    def _skipped(self) -> tuple[int, int]:
        """How many calls were skipped since then, and the last one; 0: none."""
        count, last = (0, 0) if self._verdict is None else self._verdict.skips.tolist()
        return count, last

    def _skipped_calls(self) -> int:
        return self._earlier[0] + self._skipped()[0]

    def last_skip(self) -> tuple[int | None, list[str]]:
        """The last call that was skipped, and the kinds of parameters whose gradients were not finite in it."""
        _, last = self._skipped()
        if not last or self._verdict is None:
            _, call, names = self._earlier
            return call or None, names.split("\n") if call else []
        bad = (~torch.isfinite(self._verdict.skipped_norms)).tolist()
        kinds = [kind for wrong, some in zip(bad, self._kinds, strict=True) if wrong for kind in some]
        return last, list(dict.fromkeys(kinds))

    def finish_call(self) -> None:
        before, self._before = self._before, self._counted()
        self._last = Counted(*map(sub, self._before, before))
        self.link.stalls.finish_call()
        self.link.crowding.finish_call()

    def _counted(self) -> Counted:
        return Counted(self.link.bytes_down, self.link.bytes_up, self.restages)

    def rho(self) -> tuple[float | None, dict[str, float]]:
        """Share of the squared gradient norm in deferred channels, in the last call: over all weights, and by kind."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        if self._judged is not None and self._judged[1]:
            verdict, present = self._judged
            squares, count = verdict.sums.tolist(), len(verdict.sums) - len(verdict.norms)
            for weight in present:
                for key in (weight.kind, ""):
                    sums[key][0] += squares[count + weight.key]
                    sums[key][1] += squares[weight.key]
        shares = {kind: deferred / total for kind, (deferred, total) in sums.items() if total > 0}
        return shares.pop("", None), shares

    def report(self) -> dict[str, Any]:
        """Waits for the device. Times in ms, sizes in bytes."""
        rho, by_kind = self.rho()
        last_skipped, not_finite = self.last_skip()
        crowding_total, crowding = self.link.crowding.read()
        late_total, late = self.link.stalls.read()
        return {
            "grad_norm": None if self._judged is None else float(self._judged[0].norm),
            "skipped_steps": self._skipped_calls(),
            "last_skipped_call": last_skipped,
            "last_skipped_kinds": not_finite,
            "rho": rho,
            "rho_by_kind": by_kind,
            "stall_ms": (late + crowding) * 1e3,
            "stall_ms_total": (late_total + crowding_total) * 1e3,
            "crowding_ms": crowding * 1e3,
            "crowding_ms_total": crowding_total * 1e3,
            "bytes_down": self._last.down,
            "bytes_up": self._last.up,
            "bytes_down_total": self.link.bytes_down,
            "bytes_up_total": self.link.bytes_up,
            "restages": self._last.restages,
            "restages_total": self.restages,
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
