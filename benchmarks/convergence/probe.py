"""rho and retention of each kind of parameter, by input columns and by rows, on the gradients of one synchronous run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layout import Group, Layout
from .rule import Method, windows_of

AXES = {"columns": 1, "rows": 2}  # the dimension of [count, rows, cols] that a channel's norm is taken over


class Probe:
    """Selects as the rule does, for both channel axes at once, but updates nothing."""

    def __init__(self, layout: Layout, method: Method, calls: int) -> None:
        """`method` gives topk_ratio, score_decay and when to select: at the calls at which its first block would."""
        self.layout, self.method = layout, method
        self.groups = [group for group in layout.groups if not group.shape.resident]
        self.selecting = {window.last for window in windows_of(method, 0, calls) if window.selects}
        self.scores: dict[tuple[str, str], Tensor] = {}
        self.masks: dict[tuple[str, str], Tensor] = {}
        # (kind, "all" or an axis) -> squared norm, and that of deferred channels.
        self.energy: dict[tuple[str, str], list[Tensor]] = {}
        self.retained: dict[tuple[str, str], list[Tensor]] = {}

    def measure(self, grad: Tensor, call: int) -> None:
        """grad: [numel] of one call."""
        for group in self.groups:
            view = self.layout.view(grad[None], group)[0]
            for axis, dim in AXES.items():
                self._measure(group, axis, torch.linalg.vector_norm(view, dim=dim, dtype=torch.float32).square(), call)

    def _measure(self, group: Group, axis: str, squares: Tensor, call: int) -> None:
        key, decay = (group.shape.name, axis), self.method.score_decay
        score = self.scores.setdefault(key, torch.zeros_like(squares))
        score.mul_(decay).add_(squares * (1 - decay))
        if key in self.masks:
            self.energy.setdefault(key, []).append((squares * ~self.masks[key]).sum())
            if axis == "columns":
                self.energy.setdefault((group.shape.name, "all"), []).append(squares.sum())
        if call in self.selecting:
            top = score.argsort(dim=1, descending=True, stable=True)[:, : round(self.method.topk_ratio * score.shape[1])]
            mask = torch.zeros_like(score, dtype=torch.bool).scatter_(1, top, True)
            if key in self.masks:
                self.retained.setdefault(key, []).append((mask & self.masks[key]).sum() / mask.sum())
            self.masks[key] = mask

    def result(self) -> dict[str, Any]:
        """Means over calls: share of the squared gradient norm, and rho and retention by axis, of each kind and together."""
        energy = {key: torch.stack(values).double().cpu() for key, values in self.energy.items()}
        kinds = [group.shape.name for group in self.groups]
        everything = sum(energy[kind, "all"] for kind in kinds)
        table: dict[str, Any] = {}
        for kind in kinds:
            table[kind] = dict(share=float((energy[kind, "all"] / everything).mean()))
            for axis in AXES:
                rho = (energy[kind, axis] / energy[kind, "all"]).mean()
                retention = (
                    torch.stack(self.retained[kind, axis]).float().mean() if (kind, axis) in self.retained else torch.nan
                )
                table[kind][axis] = dict(rho=float(rho), retention=float(retention))
        automatic = {group.shape.name: "rows" if group.shape.by_row else "columns" for group in self.groups}
        for name, axis_of in (("auto", automatic), ("columns only", dict.fromkeys(kinds, "columns"))):
            table[f"together, {name}"] = dict(
                rho=float((sum(energy[kind, axis_of[kind]] for kind in kinds) / everything).mean())
            )
        return table
