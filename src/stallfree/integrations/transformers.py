"""Transformers' Trainer with `ZenFlowAdamW`.

`Trainer(optimizers=(optimizer, scheduler))` trains as it is: accumulation, clipping and resuming need nothing. Between steps,
though, the model holds published weights, which anticipate a few steps of drift. `ZenFlowCallback` makes evaluations see
exact ones, puts exact ones into every checkpoint, and leaves exact ones behind.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from stallfree.optimizer import ZenFlowAdamW

LOGGED = ("rho", "retention", "stall_ms", "skipped_steps", "last_skipped_call", "bytes_down", "bytes_up")


class ZenFlowCallback(TrainerCallback):
    """Exact weights wherever Trainer evaluates, predicts or saves, and the optimizer's numbers in its log (`zenflow/rho`, ...).

    Trainer hands its logs to the reporters of `report_to` before it asks callbacks that were passed to it. To see the numbers
    there too, put this one first: `trainer.callback_handler.callbacks.insert(0, ZenFlowCallback())`.

    Raises:
        TypeError: when training begins, if the optimizer is not a ZenFlowAdamW or the model has no `save_pretrained`.

    >>> trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, scheduler), callbacks=[ZenFlowCallback()])
    """

    def __init__(self) -> None:
        self._optimizer: ZenFlowAdamW | None = None
        self._exact = ExitStack()  # holds exact_weights() while an evaluation runs

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        if not isinstance(optimizer, ZenFlowAdamW):
            raise TypeError(f"ZenFlowCallback needs a ZenFlowAdamW, not {type(optimizer).__name__}: pass one as optimizers=")
        if not hasattr(kwargs["model"], "save_pretrained"):
            raise TypeError(f"ZenFlowCallback saves with save_pretrained, which {type(kwargs['model']).__name__} does not have")
        self._optimizer = optimizer
        # Trainer calls these, where an optimizer has them, at the head of every evaluation loop and of every training step.
        # No callback is asked before an evaluation; on_evaluate and on_predict come after each.
        vars(optimizer).update(eval=self._enter, train=self._leave)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._leave()

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        self._leave()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The checkpoint just written holds published weights. Those that training resumes from are in its optimizer state."""
        if self._optimizer is not None and args.should_save:
            assert args.output_dir is not None
            with self._optimizer.exact_weights():
                kwargs["model"].save_pretrained(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if self._optimizer is not None and "loss" in logs:
            measured = self._optimizer.metrics()
            numbers = {f"zenflow/{name}": measured[name] for name in LOGGED if measured[name] is not None}
            logs.update(numbers)  # for the callbacks after this one
            state.log_history[-1].update(numbers)  # Trainer put a copy there already

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._leave()
        if self._optimizer is not None:
            self._optimizer.flush()
            for name in ("eval", "train"):
                del vars(self._optimizer)[name]
            self._optimizer = None

    def _enter(self) -> None:
        self._leave()
        if self._optimizer is not None:
            self._exact.enter_context(self._optimizer.exact_weights())

    def _leave(self) -> None:
        self._exact.close()
