"""The training loop: one step, and the state that makes a resumed run equal an undisturbed one bit for bit.

Why not Trainer, TRL or Accelerate: on one device they would add their own checkpoints, log and bar around the same twenty
lines, evaluate with published instead of exact weights, and read every loss at once, which makes the launching thread
wait for the device. Who has a Trainer keeps it: see `stallfree.integrations.transformers`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from stallfree import ZenFlowConfig
from stallfree.cli.finetune.batches import Order, collate
from stallfree.cli.finetune.data import Data
from stallfree.cli.finetune.evaluation import token_losses
from stallfree.cli.finetune.optimizer import build_optimizer, build_schedule
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
        self, model: Any, data: Data, settings: FinetuneSettings, config: ZenFlowConfig, steps: int, pad_id: int
    ) -> None:
        self.model, self.steps = model.train(), steps
        self.optimizer = build_optimizer(model, settings, config)
        self.schedule = build_schedule(self.optimizer, settings, steps)
        self.step = 0  # steps done
        self.tokens = 0  # seen so far, without padding
        self._data, self._settings, self._pad_id = data, settings, pad_id
        self._log_every = settings.log_interval(model.device.type)
        self._order = Order(len(data.train), settings.seed)
        torch.manual_seed(settings.seed)  # dropout

    def advance(self) -> PendingRecord:
        """One optimizer step. The loss weighs every learned token of the step alike, however it is split into passes."""
        begun = time.perf_counter()
        batches = self._batches()
        learned = sum(batch.learned for batch in batches)
        loss = torch.zeros((), device=self.model.device)
        for batch in batches:
            part = token_losses(self.model, batch.to(self.model.device)) / learned
            part.backward()
            loss += part.detach()
        lr = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        tokens = sum(batch.tokens for batch in batches)
        self.tokens += tokens
        record = {"step": self.step, "lr": lr, "tokens": tokens}
        if self.step % self._log_every == 0 or self.step == self.steps:
            measured = self.optimizer.metrics()
            record |= {name: measured[name] for name in METRICS if measured.get(name) is not None}
        return PendingRecord(record | {"seconds": time.perf_counter() - begun}, loss)

    def state_dict(self) -> dict[str, Any]:
        """What the rest of the run depends on beside the model and the optimizer, which checkpoints hold themselves."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "schedule": self.schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens = state["step"], state["tokens"]
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])

    def _batches(self) -> list[Any]:
        size, passes = self._settings.micro_batch, self._settings.accumulation
        first = self.step * passes * size
        groups = [self._order.indices(first + start, size) for start in range(0, passes * size, size)]
        return [collate([self._data.train[index] for index in group], self._pad_id) for group in groups]


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
