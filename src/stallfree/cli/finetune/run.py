"""A fine-tuning run from settings to report: everything is checked before anything is written."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import torch
from rich.console import Console
from safetensors import SafetensorError

from stallfree.cli.errors import UsageError
from stallfree.cli.finetune import checkpoint
from stallfree.cli.finetune.data import Data, encode_source, read_source
from stallfree.cli.finetune.display import Display, Unheard
from stallfree.cli.finetune.evaluation import Evaluation, Evaluator
from stallfree.cli.finetune.interrupt import Interrupted, StopRequest
from stallfree.cli.finetune.machine import choose_dtype
from stallfree.cli.finetune.metrics import METRICS_FILE, MetricsLog
from stallfree.cli.finetune.models import check_model, checkpoint_activations, load_model
from stallfree.cli.finetune.optimizer import warmup_steps
from stallfree.cli.finetune.ranks import Ranks
from stallfree.cli.finetune.report import CURVE_FILE, REPORT_FILE, verdict, write_report
from stallfree.cli.finetune.settings import MODEL_NAMES, SETTINGS_FILE, FinetuneSettings, save_settings
from stallfree.cli.finetune.sharding import load_sharded
from stallfree.cli.finetune.train import PendingRecord, Training
from stallfree.convert import export_model, write_model

NOT_FINITE_LIMIT = 5  # steps in a row without a finite loss, or finite gradients, after which a run is given up


def finetune(settings: FinetuneSettings, ranks: Ranks, *, resume: bool = False, overwrite: bool = False) -> int:
    """Run (or continue) a fine-tuning, on all ranks. Returns the exit code: 0, or 128 + n after signal n.

    Raises:
        UsageError: for anything wrong with the input, before the output directory is touched.
    """
    _check_output(settings, ranks, resume=resume, overwrite=overwrite)
    settings = _with_ranks(settings, ranks, resume=resume)
    if settings.steps is not None:
        warmup_steps(settings, settings.steps)
    what = check_model(settings.model)
    settings, why = ranks.same(_choose_device(settings, ranks))
    console = Console(file=cast(TextIO, Unheard()), highlight=False, markup=False, soft_wrap=True, quiet=not ranks.first)
    console.print(f"reading {settings.data}")
    source = read_source(settings)
    console.print(f"loading {what}, in {settings.dtype}{why}")
    model, tokenizer = _load(settings, ranks)
    data = encode_source(settings, source, tokenizer)
    if ranks.sharded and ranks.same(data.fingerprint) != data.fingerprint:
        raise UsageError(
            f"{settings.data} gives other sequences here than on rank 0: write them to a file, and give it as --data"
        )
    steps = _steps(settings, len(data.train))
    warmup_steps(settings, steps)
    training = Training(model, data, settings, settings.optimizer_config(), steps, tokenizer.pad_token_id, ranks)
    try:
        with _alone(settings.output, ranks):
            saved = None
            if resume:
                try:
                    saved = checkpoint.load(settings.output, training, data.fingerprint, settings.decisive())
                except checkpoint.RunIsComplete as said:
                    console.print(str(said))
                    return 0
            with Display(steps, console) as display, StopRequest(display.note, ranks) as stop:
                return Run(settings, training, tokenizer, data, display, stop, saved).go()
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"the GPU is out of memory: halve --micro-batch ({settings.micro_batch}) and double --accumulation "
            f"({settings.accumulation}), or add --gradient-checkpointing"
        ) from error


@contextmanager
def _alone(output: Path, ranks: Ranks) -> Iterator[None]:
    """Refuse a second run in a directory, as when one is resumed that still goes on: each would spoil the other's files.

    The lock is on the directory itself, so that it leaves nothing and goes with the process. Not all network file systems take
    one there; on those nobody is refused.
    """
    if not ranks.first:
        yield
        return
    output.mkdir(parents=True, exist_ok=True)
    directory = os.open(output, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another run is going on in {output}: stop it first, or give another --output") from None
        yield
    finally:
        os.close(directory)


class Seen(NamedTuple):
    """What the last reading of the optimizer's numbers said."""

    step: int
    skipped: int


class Run:
    """A run whose input is sound."""

    def __init__(
        self,
        settings: FinetuneSettings,
        training: Training,
        tokenizer: Any,
        data: Data,
        display: Display,
        stop: StopRequest,
        saved: dict[str, Any] | None,
    ) -> None:
        self.settings, self.training, self.tokenizer, self.data = settings, training, tokenizer, data
        self.display, self.stop, self.output = display, stop, settings.output
        self.ranks = training.ranks
        self.evaluator = Evaluator(training.model, tokenizer, data, settings, stop.check, self.ranks)
        self.evaluations: dict[int, Evaluation] = {}  # by step
        self.pending: PendingRecord | None = None
        self.losses_not_finite = 0  # in a row
        self.skipped_in_a_row = 0  # steps
        self.seen = Seen(training.step, training.optimizer.metrics()["skipped_steps"] or 0)
        self.unlogged = False  # whether the log could not be written
        if saved is not None:
            self.evaluations = {record["step"]: Evaluation(**record) for record in saved["evaluations"]}
        self.log: MetricsLog | None = None
        if self.ranks.first:
            with self._way_out():
                if saved is None:
                    _clear(self.output)
                save_settings(settings, self.output)
                self.log = MetricsLog(self.output, step=training.step, evaluated=set(self.evaluations))

    def go(self) -> int:
        training, display = self.training, self.display
        parameters = sum(parameter.numel() for parameter in training.model.parameters())
        where = f"{training.model.device.type}, {self.ranks}" if self.ranks.sharded else training.model.device
        display.note(
            f"{parameters / 1e6:,.1f}M parameters on {where}, {training.steps} steps of {self.settings.batch} sequences, "
            f"{len(self.data.train)} sequences to train on, {len(self.data.held_out)} held out"
        )
        display.note("rho: share of the squared gradient norm whose update is deferred; stall: time a step waits for the host")
        if self.data.task is not None and self.settings.score_size:
            display.note("score: the task's own, 0 to 1 with partial credit; solved: problems with the full score")
        for note in self.data.notes:
            display.note(f"note: {note}")
        if training.step:
            display.note(f"resuming after step {training.step}")
        try:
            while True:
                if self._evaluation_is_due():
                    self._evaluate()
                self.stop.check()
                if training.step == training.steps:
                    return self._finish()
                if self.settings.save_every and training.step and training.step % self.settings.save_every == 0:
                    self._save_on_the_way()
                self._log_pending()
                self.pending = training.advance()
        except Interrupted:
            return self._leave()

    def _evaluation_is_due(self) -> bool:
        step, last = self.training.step, self.training.steps
        every = self.settings.eval_interval(last)
        return (step in (0, last) or (every > 0 and step % every == 0)) and step not in self.evaluations

    def _evaluate(self) -> None:
        self._log_pending()
        self.display.evaluating()
        step = self.training.step
        scored = self.evaluations[0].scored if step else None
        with self.training.optimizer.exact_weights():
            found = self.evaluator.evaluate(step, answers=step in (0, self.training.steps), scored_before=scored)
        self.evaluations[step] = found
        self._write(found.record())
        self.display.evaluation(found)

    def _write(self, record: dict[str, Any]) -> None:
        if self.log is None:
            return
        try:
            self.log.append(record)
        except OSError as error:
            if self.settings.on_save_error == "stop":
                raise self._unwritable(error) from error
            if not self.unlogged:
                self.display.note(f"{METRICS_FILE} cannot be written, and training goes on: {error.strerror}")
            self.unlogged = True
        else:
            self.unlogged = False

    def _log_pending(self) -> None:
        """Write the record of the step before: by now the device has finished it."""
        if self.pending is None:
            return
        record, self.pending = self.pending.result(), None
        self._write(record)
        self.display.step(record)
        self._give_up_if_lost(record)

    def _give_up_if_lost(self, record: dict[str, Any]) -> None:
        """A diverged model may well have a finite loss; its gradients are not, so that every step is skipped from then on."""
        step, way_out = record["step"], "lower --lr or raise --warmup, and add --overwrite"
        self.losses_not_finite = 0 if math.isfinite(record["loss"]) else self.losses_not_finite + 1
        if self.losses_not_finite == NOT_FINITE_LIMIT:
            raise UsageError(f"the loss was not finite in {NOT_FINITE_LIMIT} steps up to {step}: {way_out}")
        if "skipped_steps" not in record:
            return
        skipped = record["skipped_steps"] - self.seen.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + skipped if skipped == step - self.seen.step else 0
        self.seen = Seen(step, record["skipped_steps"])
        if self.skipped_in_a_row >= NOT_FINITE_LIMIT:
            raise UsageError(f"the gradients were not finite in {self.skipped_in_a_row} steps up to {step}: {way_out}")

    def _save(self) -> None:
        """Everything needed to go on, and exact weights for use."""
        self._log_pending()
        evaluations = [asdict(found) for found in self.evaluations.values()]
        about = {"evaluations": evaluations, "fingerprint": self.data.fingerprint, "settings": self.settings.decisive()}
        checkpoint.save(self.output, self.training, about)
        with self._way_out():
            export_model(self.training.model, self.training.optimizer, self.output, tokenizer=self.tokenizer)

    @contextmanager
    def _way_out(self) -> Iterator[None]:
        """Say of what cannot be written how the run can go on."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> UsageError:
        then = "go on with --resume" if checkpoint.exists(self.output) else "there is no checkpoint to go on from"
        return UsageError(f"{self.output} cannot be written ({error}): make room; {then}")

    def _save_on_the_way(self) -> None:
        self._log_pending()  # a run that is given up is no save that has failed
        try:
            self._save()
        except UsageError as error:
            if self.settings.on_save_error == "stop":
                raise UsageError(f"step {self.training.step} could not be saved: {error}") from error
            self.display.note(f"step {self.training.step} could not be saved, and training goes on: {error}")

    def _leave(self) -> int:
        assert self.stop.signal is not None
        self._save()
        self.display.note(f"stopped after step {self.training.step} of {self.training.steps}; to continue:")
        self.display.note(f"  {checkpoint.resume_command(self.output)}")
        self.ranks.wait()
        return 128 + self.stop.signal

    def _finish(self) -> int:
        self.training.optimizer.flush()
        with self._way_out():
            write_model(self.training.model, self.tokenizer, self.output)
        if self.ranks.first:
            self._report()
        self.ranks.wait()
        return 0

    def _report(self) -> None:
        found, prompts = self.evaluations.values(), self.evaluator.prompts
        report = write_report(self.output, self.settings, self.training, found, prompts, self.data)
        checkpoint.remove(self.output)  # nothing is left to resume
        before, after = self.evaluations[0], self.evaluations[self.training.steps]
        assert before.samples is not None
        assert after.samples is not None
        mark = f"  ({verdict(after.sample_scores[0])})" if after.sample_scores else ""
        texts = self.evaluator.prompts[0].text, before.samples[0], after.samples[0]
        prompt, first, last = (" ".join(text.split()) for text in texts)  # each on a line; the report has them as they are
        self.display.note(f"prompt: {prompt}\nbefore: {first}\nafter:  {last}{mark}")
        line = f"held-out loss {before.loss:.4f} -> {after.loss:.4f}"
        if before.score is not None and after.score is not None:
            line += (
                f", score {before.score:.3f} -> {after.score:.3f}, solved {before.solved} -> {after.solved} of {after.scored}"
            )
        self.display.note(f"{line}\nmodel in {self.output}, report in {report}")
        if skipped := self.training.optimizer.metrics()["skipped_steps"]:
            of = f"{skipped} of {self.training.steps} steps"
            self.display.note(f"note: {of} were skipped, because their gradients were not finite; a lower --lr may help")
        if not after.loss < before.loss:  # nor if it is not finite
            self.display.note("note: the held-out loss did not fall; try a lower --lr, more --steps or more data")


def _check_output(settings: FinetuneSettings, ranks: Ranks, *, resume: bool, overwrite: bool) -> None:
    output = settings.output
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite starts anew: give one of them")
    if output.exists() and not output.is_dir():
        raise UsageError(f"output {output} is a file: give a directory as --output")
    if settings.model not in MODEL_NAMES and Path(settings.model).resolve() == output.resolve():
        raise UsageError(f"--output {output} is the directory of --model: give another, so that the model you start from stays")
    if not resume and not overwrite and output.is_dir() and any(output.iterdir()):
        with _alone(output, ranks):
            raise UsageError(
                f"output directory {output} is not empty: add --overwrite or --resume, or give another as --output"
            )
    existing = next(path for path in [output.absolute(), *output.absolute().parents] if path.exists())
    if not os.access(existing, os.W_OK):
        raise UsageError(f"output {output} cannot be written: {existing} is read-only for you; give another as --output")


def _with_ranks(settings: FinetuneSettings, ranks: Ranks, *, resume: bool) -> FinetuneSettings:
    """With the number of ranks; of a resumed run it is the number that it began with, as its batch is."""
    if ranks.sharded and settings.nproc is None:
        if resume:
            raise UsageError(f"the run in {settings.output} began as one process, and can go on as that only: without torchrun")
        return settings.model_copy(update={"nproc": ranks.world})
    if not resume and ranks.sharded and settings.nproc != ranks.world:
        raise UsageError(f"--nproc {settings.nproc} under a launcher that has started {ranks}: leave --nproc out")
    if settings.batch % ranks.world:
        fits = [str(count) for count in range(1, settings.batch + 1) if settings.batch % count == 0]
        raise UsageError(
            f"{ranks} cannot share the {settings.batch} sequences of this run's steps: go on with --nproc "
            f"{' or '.join(fits[-6:])}"
        )
    return settings


def _load(settings: FinetuneSettings, ranks: Ranks) -> tuple[Any, Any]:
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32

    def load() -> tuple[Any, Any]:
        model, tokenizer = load_model(settings.model, dtype, settings.seed)
        if settings.gradient_checkpointing:
            checkpoint_activations(model)
        return model, tokenizer

    if ranks.sharded:
        return load_sharded(load, ranks, settings.device)
    model, tokenizer = load()
    return model.to(settings.device), tokenizer


def _clear(output: Path) -> None:
    """Remove what an earlier run wrote about itself, and nothing else."""
    for name in (SETTINGS_FILE, METRICS_FILE, REPORT_FILE, CURVE_FILE):
        (output / name).unlink(missing_ok=True)
    checkpoint.remove(output)


def _choose_device(settings: FinetuneSettings, ranks: Ranks) -> tuple[FinetuneSettings, str]:
    """With `device` and `dtype` made definite, so that a resumed run keeps them; and why this dtype, to be shown."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU; leave --device out to train on the CPU")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    if device == "cuda" and ranks.world > (seen := torch.cuda.device_count()):
        raise UsageError(f"{ranks} need a GPU each, and torch sees {seen}: use --nproc {seen}, or --device cpu")
    if settings.dtype != "auto":
        return settings.model_copy(update={"device": device}), ""
    dtype, why = choose_dtype(device)
    return settings.model_copy(update={"device": device, "dtype": dtype}), f" (dtype auto: {why})"


def _steps(settings: FinetuneSettings, sequences: int) -> int:
    if settings.steps is not None:
        return settings.steps
    return math.ceil((settings.epochs or 1.0) * sequences / settings.batch)
