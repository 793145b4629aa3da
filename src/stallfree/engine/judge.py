"""What a call's gradients are worth, all on the device: their norm, whether to skip the call, what each is multiplied by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stallfree.engine.channels import Summed
from stallfree.engine.schedule import slots_needed

if TYPE_CHECKING:
    from stallfree.engine.pipeline import Engine


class Judge:
    """Judges the gradients of one engine, a call at a time, and keeps the records that host work reads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._one = torch.ones((), dtype=torch.float32, device=engine.device)
        self._records: tuple[Tensor, Tensor] | None = None  # by call: skip flag and factors; on the device, on the host

    def make_room(self) -> None:
        """For all parameters that there are. Records of earlier calls keep their memory.

        A row is used again when its call's windows have been published.
        """
        engine = self.engine
        shape = (slots_needed(engine.config) + 1, 1 + len(engine.weights) + len(engine.residents))
        on_device = torch.empty(shape, dtype=torch.float32, device=engine.device)
        self._records = (on_device, engine.link.host_empty(shape, torch.float32))
        engine.kernel.carry(*(records[0] for records in self._records))  # compiles

    def __call__(self, summed: Summed) -> tuple[Tensor, Tensor, Tensor]:
        """Whether to skip this call, and by weight and then by resident what its gradient is multiplied by, on the device.

        The last is the host's copy of both. Every rank comes to the same answer.
        """
        engine, channels = self.engine, self.engine.channels
        staged = [state.staged for state in engine.weights.values() if state.staged is not None]
        present = tuple(gradient.weight.key for gradient in staged)
        scales = self._scales()
        parts = [torch.stack(summed.residents)] if summed.residents else []
        if engine.weights:
            split = summed.norms() if scales is None else summed.norms() * scales.abs()
            some = len(staged) < len(engine.weights)
            parts.append(torch.where(channels.masks(present)[0], split, 0.0) if some else split)
        all_norms = torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float32, device=engine.device)
        norm = engine.agreement.mean(torch.linalg.vector_norm(all_norms))
        finite = torch.isfinite(norm)
        skip = torch.zeros_like(finite) if engine.config.update_in_backward else ~finite
        clip = self._one
        if engine.config.max_grad_norm is not None:
            clip = torch.where(finite, (engine.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0), clip)
        factors = clip if scales is None else clip * scales
        assert self._records is not None
        values, slot = (records[engine.clock.call % len(records)] for records in self._records)
        record = [skip.float().view(1), factors.expand(len(engine.weights)), clip.expand(len(engine.residents))]
        torch.cat(record, out=values)
        if staged and engine.config.topk_ratio:
            channels.update_scores(scales, present, engine.config.score_decay, skip)
        engine.meter.judge(norm, [gradient.weight for gradient in staged], summed)
        engine.meter.judge_skip(engine.clock.call, skip, all_norms, engine.kinds)
        engine.kernel.carry(values, slot)
        engine.link.carried(slot.nbytes)
        return skip, values[1:], slot

    def _scales(self) -> Tensor | None:
        """What user code multiplied gradients by: a scalar where it is one number for all, else `[weights]`."""
        staged = [state.staged for state in self.engine.weights.values()]
        distinct = {id(gradient.factor): gradient.factor for gradient in staged if gradient is not None}
        if all(factor is None for factor in distinct.values()):
            return None
        if len(distinct) == 1:
            return next(iter(distinct.values()))
        factors = [None if gradient is None else gradient.factor for gradient in staged]
        return torch.stack([self._one if factor is None else factor for factor in factors])
