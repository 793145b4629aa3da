"""What a person sees while the run goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stallfree.cli.finetune.evaluation import Evaluation

LINES_PER_RUN = 20  # without a terminal
BAR_FROM = 120  # columns of a terminal; with fewer the numbers need the room


class Unheard:
    """stdout of a run that goes on where nobody takes its words any more.

    In `stallfree finetune ... | tee log` Ctrl-C ends tee as well, and the run has yet to save.
    """

    def __init__(self) -> None:
        # Kept, because rich puts another in its place while the bar is shown. There is none where it was closed from the start.
        self._stream: IO[str] = sys.stdout or open(os.devnull, "w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._close()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._close()

    def _close(self) -> None:
        """Send what is still in Python's buffer, and all that comes, nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class Display:
    """The bar with loss, tokens/s, rho and stall; notes and evaluations scroll above it."""

    def __init__(self, steps: int, console: Console) -> None:
        """`console`: without markup, and with soft_wrap, so that commands can be copied."""
        self.console = console
        self._steps = steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            *([BarColumn()] if console.width >= BAR_FROM else []),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, numbers="")
        self._latest: dict[str, Any] = {}  # rho and stall are not read at every step

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        self.console.print(text)

    def step(self, record: dict[str, Any]) -> None:
        skipped = record.get("skipped_steps", 0)
        if skipped > self._latest.get("skipped_steps", 0):
            where = ", ".join(record["last_skipped_kinds"])
            self.note(f"step {record['last_skipped_call']} was skipped: gradients not finite in {where}; {skipped} so far")
        self._latest |= record
        step, numbers = record["step"], _numbers(self._latest)
        self._bar.update(self._task, completed=step, numbers=numbers, description="training")
        if not self.console.is_terminal and (step % max(1, self._steps // LINES_PER_RUN) == 0 or step == self._steps):
            self.note(f"step {step}/{self._steps}  {numbers}")

    def evaluating(self) -> None:
        self._bar.update(self._task, description="evaluating")

    def evaluation(self, evaluation: Evaluation) -> None:
        text = f"step {evaluation.step}: held-out loss {evaluation.loss:.4f}"
        if evaluation.score is not None:
            text += f", score {evaluation.score:.3f} on {evaluation.scored} problems, {evaluation.solved} solved"
        self.console.print(text, style="bold")


def _numbers(record: dict[str, Any]) -> str:
    parts = [f"loss {record['loss']:.4f}", f"{record['tokens'] / record['seconds']:,.0f} tok/s"]
    if "rho" in record:
        parts.append("warm-up" if record.get("warming_up") else f"rho {record['rho']:.3f}")
    if "stall_ms" in record:
        parts.append(f"stall {record['stall_ms']:.0f} ms")
    return "  ".join(parts)
