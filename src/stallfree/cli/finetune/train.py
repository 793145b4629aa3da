"""The training loop: one step, and the state that makes a resumed run equal an undisturbed one bit for bit.

Why not Trainer, TRL or Accelerate: they would add their own checkpoints, log and bar around the same twenty
lines, evaluate with published instead of exact weights, and read every loss at once, which makes the launching thread
wait for the device. Who has a Trainer keeps it: see `stallfree.integrations.transformers`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from stallfree import ZenFlowConfig
from stallfree.cli.finetune.batches import Batch, Order, collate
from stallfree.cli.finetune.data import Data
from stallfree.cli.finetune.encode import Example
from stallfree.cli.finetune.evaluation import token_losses
from stallfree.cli.finetune.optimizer import build_optimizer, build_schedule
from stallfree.cli.finetune.ranks import Ranks
from stallfree.cli.finetune.settings import FinetuneSettings

METRICS = (
    "grad_norm",
    "rho",
    "retention",
    "stall_ms",
    "skipped_steps",
    "last_skipped_call",
    "last_skipped_kinds",
    "restages",
    "bytes_down",
    "bytes_up",
    "rho_by_kind",
    "warming_up",
)


class Training:
    """A model under training, between two steps."""

    def __init__(
        self,
        model: Any,
        data: Data,
        settings: FinetuneSettings,
        config: ZenFlowConfig,
        steps: int,
        pad_id: int,
        ranks: Ranks,
    ) -> None:
        self.model, self.steps, self.ranks = model.train(), steps, ranks
        self.optimizer = build_optimizer(model, settings, config)
        self.schedule = build_schedule(self.optimizer, settings, steps)
        self.step = 0  # steps done
        self.tokens = 0  # seen so far, without padding
        self._data, self._settings, self._pad_id = data, settings, pad_id
        self._log_every = settings.log_interval(model.device.type)
        self._order = Order(len(data.train), settings.seed)
        self.reseed()

    def reseed(self) -> None:
        """For dropout: of several ranks each draws its own numbers, which after a save depend on the step alone."""
        ranks, seed = self.ranks, self._settings.seed
        torch.manual_seed((seed * 1_000_003 + self.step) * ranks.world + ranks.rank if ranks.sharded else seed)

    def advance(self) -> PendingRecord:
        """One optimizer step. The loss weighs every learned token of the step alike, in whatever pass and on whatever rank."""
        begun = time.perf_counter()
        examples = self._examples()
        learned = sum(int(example.learned.sum()) for example in examples)
        loss = torch.zeros((), device=self.model.device)
        for batch in self._batches(examples):
            part = token_losses(self.model, batch.to(self.model.device)) / learned
            (part * self.ranks.world).backward()  # fully_shard takes the mean over ranks
            loss += part.detach()
        self.ranks.add_up(loss)
        lr = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        tokens = sum(len(example.ids) for example in examples)
        self.tokens += tokens
        record = {"step": self.step, "lr": lr, "tokens": tokens}
        if self.step % self._log_every == 0 or self.step == self.steps:
            measured = self.optimizer.metrics()
            record |= {name: measured[name] for name in METRICS if measured.get(name) is not None}
        return PendingRecord(record | {"seconds": time.perf_counter() - begun}, loss)

    def progress(self) -> dict[str, Any]:
        """Of all ranks alike."""
        return {"step": self.step, "tokens": self.tokens, "schedule": self.schedule.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """What the rest of the run depends on beside the model and the optimizer, which checkpoints hold themselves."""
        return self.progress() | {
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_progress(self, state: dict[str, Any]) -> None:
        self.step, self.tokens = state["step"], state["tokens"]
        self.schedule.load_state_dict(state["schedule"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_progress(state)
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])

    def _examples(self) -> list[Example]:
        """Those of the next step, on all ranks."""
        count = self._settings.batch
        return [self._data.train[index] for index in self._order.indices(self.step * count, count)]

    def _batches(self, examples: list[Example]) -> list[Batch]:
        """This rank's share."""
        share, size = len(examples) // self.ranks.world, self._settings.micro_batch
        first = share * self.ranks.rank
        starts = range(first, first + share, size)
        return [collate(examples[start : min(start + size, first + share)], self._pad_id) for start in starts]


class PendingRecord:
    """A step's record, of which the device may still owe the loss. Read it a step later and nobody waits."""

    def __init__(self, record: dict[str, Any], loss: Tensor) -> None:
        self._record = record
        self._loss = loss.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if loss.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def result(self) -> dict[str, Any]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return {"kind": "step", "step": self._record["step"], "loss": float(self._loss)} | self._record
