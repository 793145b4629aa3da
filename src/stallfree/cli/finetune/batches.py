"""Examples -> micro-batches, in an order that is a function of (seed, position) alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stallfree.cli.finetune.encode import Example

IGNORE = -100  # label of a token that is not learned


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences, padded at their ends. Attention is causal, so real tokens never see the padding and no mask is needed."""

    input_ids: Tensor  # int64 [batch, length]
    labels: Tensor  # int64 [batch, columns]: what the logits at `columns` should say, or IGNORE
    columns: Tensor  # int64 [columns]: positions at which any sequence has a learned next token
    learned: int  # labels that are not IGNORE

    def to(self, device: torch.device) -> Batch:
        ids, labels, columns = (part.to(device, non_blocking=True) for part in (self.input_ids, self.labels, self.columns))
        return Batch(ids, labels, columns, self.learned)


def collate(examples: list[Example], pad_id: int) -> Batch:
    """One batch of `examples`, as long as the longest."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([example.ids for example in examples], batch_first=True, padding_value=pad_id)
    learned = pad([example.learned for example in examples], batch_first=True)
    labels = torch.where(learned, ids, IGNORE)[:, 1:]
    columns = learned[:, 1:].any(0).nonzero().squeeze(1)
    return Batch(ids, labels[:, columns], columns, int(learned.sum()))


class Order:
    """An endless shuffled sequence: every example once per epoch, each epoch in a new order."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._epoch, self._permutation = -1, torch.empty(0)

    def indices(self, start: int, count: int) -> list[int]:
        """Which examples stand at positions start .. start + count - 1."""
        return [self._index(*divmod(position, self._size)) for position in range(start, start + count)]

    def _index(self, epoch: int, offset: int) -> int:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self._size, generator=generator)
        return int(self._permutation[offset])
