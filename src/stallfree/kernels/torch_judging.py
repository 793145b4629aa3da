"""`Judging` as torch operations: on any device, and the definition for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from stallfree.kernels.judging import MARGIN, Evidence, Policy, Verdict, add_segments, all_norms, check_evidence, check_judge


class TorchJudging:
    """`Judging` as torch operations."""

    def __init__(self, evidence: Evidence, policy: Policy) -> None:
        device = check_evidence(evidence)
        self.verdict = Verdict.of(evidence)
        self._evidence, self._policy = evidence, policy
        self._offsets = torch.tensor(evidence.starts, dtype=torch.int64, device=device)
        counts = self._offsets.diff()
        numbers = torch.arange(evidence.weights, dtype=torch.int64, device=device)
        self._owner = torch.repeat_interleave(numbers, counts)  # [channels] the weight of each
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def add_up(self) -> None:
        squares, weights, sums = self._evidence.squares, self._evidence.weights, self.verdict.sums
        if weights:
            held = torch.where(self._evidence.deferred, squares, 0.0)
            for place, values in ((0, squares), (weights, held)):
                sums[place : place + weights] = add_segments(values, self._offsets)
        for place, group in enumerate(self._evidence.groups, 2 * weights):
            sums[place] = torch.linalg.vector_norm(group, dtype=torch.float32).double().square()

    def judge(
        self,
        call: int,
        target: Tensor,
        present: Tensor | None = None,
        scales: Tensor | None = None,
        squares: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> None:
        check_judge(self._evidence, target, present, scales, squares, norm)
        if squares is None:
            self.add_up()
        verdict, policy, weights = self.verdict, self._policy, self._evidence.weights
        all_norms(verdict.sums, weights, present, scales, out=verdict.norms)
        verdict.norm.copy_(torch.linalg.vector_norm(verdict.norms) if norm is None else norm)
        finite = torch.isfinite(verdict.norm)
        if policy.skips:
            torch.logical_not(finite, out=verdict.skip)
        clip = self._one
        if policy.max_norm is not None:
            clip = torch.where(finite, (policy.max_norm / (verdict.norm + MARGIN)).clamp(max=1.0), clip)
        verdict.record[0] = verdict.skip
        verdict.record[1 : 1 + weights] = clip if scales is None else clip * scales
        verdict.record[1 + weights :] = clip
        target.copy_(verdict.record)
        count, last = verdict.skips.unbind()
        count += verdict.skip
        last.copy_(torch.where(verdict.skip, call, last))
        torch.where(verdict.skip, verdict.norms, verdict.skipped_norms, out=verdict.skipped_norms)
        if policy.decay is not None:
            self._update_score(self._evidence.squares if squares is None else squares, present, scales, policy.decay)

    def _update_score(self, squares: Tensor, present: Tensor | None, scales: Tensor | None, decay: float) -> None:
        """As gradients stand in `.grad` now."""
        stays = self.verdict.skip
        if scales is not None:
            factor = scales.square()
            squares = squares * (factor if factor.dim() == 0 else factor[self._owner])
        if present is not None:
            stays = stays | ~present[self._owner]
        update_score(self._evidence.score, squares, decay, stays)


def update_score(score: Tensor, squares: Tensor, decay: float, skip: Tensor) -> None:
    """Exponential mean of squared channel norms, in place, except where it stays."""
    torch.where(skip, score, score.lerp(squares, 1 - decay), out=score)
