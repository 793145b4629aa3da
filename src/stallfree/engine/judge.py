"""What a call's gradients are worth, all on the device: their norm, whether to skip the call, what each is multiplied by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stallfree.engine.gradient import Staged
from stallfree.engine.schedule import slots_needed
from stallfree.engine.sharding import RankSums
from stallfree.kernels.judging import Evidence, Judging, Policy, all_norms

if TYPE_CHECKING:
    from stallfree.engine.pipeline import Engine

MASKS = 64  # of weights with a gradient, that are remembered


class Judge:
    """Judges the gradients of one engine, a call at a time, and keeps the records that host work reads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._one = torch.ones((), dtype=torch.float32, device=engine.device)
        self._masks: dict[tuple[int, ...], Tensor] = {}  # by the keys of who has a gradient
        self._judging: Judging | None = None
        self._factors = self._one  # of the verdict's record
        self._records: tuple[Tensor, ...] = ()  # of calls, on the host

    def make_room(self) -> None:
        """For all parameters that there are. Records of earlier calls keep their memory.

        A row is used again when its call's windows have been published.
        """
        engine, channels, config = self.engine, self.engine.channels, self.engine.config
        evidence = Evidence(
            starts=channels.starts,
            squares=channels.squares,
            deferred=channels.deferred,
            score=channels.score,
            groups=[group.gradients for group in engine.groups],
            residents=len(engine.residents),
        )
        policy = Policy(config.max_grad_norm, not config.update_in_backward, config.score_decay if config.topk_ratio else None)
        self._judging = engine.kernel.judging(evidence, policy)
        verdict = self._judging.verdict
        self._factors = verdict.record[1:]
        self._records = engine.link.host_empty((slots_needed(config) + 1, len(verdict.record)), torch.float32).unbind()
        self._masks.clear()
        engine.meter.follow(verdict, engine.kinds)

    def __call__(self, staged: Sequence[Staged | None], ranks: RankSums) -> tuple[Tensor, Tensor, Tensor]:
        """Whether to skip this call, and by weight and then by resident what its gradient is multiplied by, on the device.

        The last is the host's copy of both. Every rank comes to the same answer. staged: by weight.
        """
        engine, judging = self.engine, self._judging
        assert judging is not None
        call, verdict = engine.clock.call, judging.verdict
        there = [gradient for gradient in staged if gradient is not None]
        present = None if len(there) == len(staged) else self._mask(tuple(gradient.weight.key for gradient in there))
        scales = self._scales(staged, there)
        squares = norm = None
        if ranks.needed:
            judging.add_up()
            squares = self._over_ranks(ranks, verdict.sums)
            if engine.agreement.mixed:
                norms = all_norms(verdict.sums, len(staged), present, scales)
                norm = engine.agreement.mean(torch.linalg.vector_norm(norms))
        record = self._records[call % len(self._records)]
        judging.judge(call, record, present, scales, squares, norm)
        engine.meter.judged(engine.channels.weights if present is None else [one.weight for one in there])
        engine.link.carried(record.nbytes)
        return verdict.skip, self._factors, record

    def _over_ranks(self, ranks: RankSums, sums: Tensor) -> Tensor:
        """Add up over the ranks that hold parts: the sums, in place, and the squares, which are returned. All in fp32."""
        channels = self.engine.channels
        added, count = ranks(torch.cat([channels.squares, sums.float()])), len(channels.squares)
        sums.copy_(added[count:])
        return added[:count]

    def _mask(self, present: tuple[int, ...]) -> Tensor:
        """Which weights have a gradient when these keys do: bool `[weights]`."""
        mask = self._masks.get(present)
        if mask is None:
            if len(self._masks) >= MASKS:
                self._masks.clear()
            chosen = torch.zeros(len(self.engine.weights), dtype=torch.bool, device="cpu")
            chosen[list(present)] = True
            mask = self._masks[present] = chosen.to(self.engine.device)
        return mask

    def _scales(self, staged: Sequence[Staged | None], there: Sequence[Staged]) -> Tensor | None:
        """What user code multiplied gradients by: a scalar where it is one number for all, else `[weights]`."""
        factors = [gradient.factor for gradient in there]
        if not factors or all(map(is_, factors, repeat(factors[0]))):
            return factors[0] if factors else None
        every = [None if gradient is None else gradient.factor for gradient in staged]
        return torch.stack([self._one if factor is None else factor for factor in every])
