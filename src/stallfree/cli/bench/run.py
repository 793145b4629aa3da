"""A measurement from settings to numbers: everything is checked before anything is built."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stallfree.cli.bench.environment import environment
from stallfree.cli.bench.fit import needs, room, together, why_too_large
from stallfree.cli.bench.measure import LocalRunner, rehearse
from stallfree.cli.bench.modes import DEFAULT, FLOOR, Mode, parse_mode
from stallfree.cli.bench.records import Footprint, Result, row
from stallfree.cli.bench.settings import BenchSettings, output_file
from stallfree.cli.bench.shapes import build_model, model_config
from stallfree.cli.bench.table import show_table
from stallfree.cli.bench.worker import PeerError, RemoteRunner
from stallfree.cli.errors import UsageError

Runner = LocalRunner | RemoteRunner
TABLE_WIDTH = 160  # where there is no terminal
FAILURES = (torch.OutOfMemoryError, MemoryError, PeerError)


def bench_step(settings: BenchSettings) -> int:
    """Measure, print, write. Returns the exit code: 0, 1 if a mode failed, 130 after Ctrl-C.

    Raises:
        UsageError: for anything wrong with the input, before anything is measured.
    """
    settings = _definite(settings)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    modes = [parse_mode(text) for text in dict.fromkeys((FLOOR, *(settings.modes or DEFAULT)))]
    modes = _present(modes, settings, console)
    traced = next((mode for mode in modes if mode.config is not None), None)
    if settings.trace and traced is None:
        raise UsageError("--trace records a mode of Stallfree's own: name one among --modes, for example stallfree")
    config = model_config(settings)
    output = output_file(settings.output)
    for path in (output, settings.trace):
        _check_writable(path)
    bench = Bench(settings, config, modes, console)
    try:
        try:
            bench.measure()
            if settings.trace and traced is not None:
                bench.trace(traced, settings.trace)
        finally:
            bench.close()
    except KeyboardInterrupt:  # in close() too, which takes seconds where much memory is pinned
        bench.interrupted = True
        console.print("interrupted; measured so far:")
    return bench.report(output)


class Bench:
    """Modes whose settings are sound."""

    def __init__(self, settings: BenchSettings, config: Any, modes: Sequence[Mode], console: Console) -> None:
        """modes: the floor first."""
        self.settings, self.config, self.modes, self.console = settings, config, list(modes), console
        self.results = {mode.text: Result(mode.text) for mode in modes}
        self.runners: dict[str, Runner] = {}  # of modes in memory now
        self.interrupted = False
        self.environment = environment(settings)

    @property
    def floor(self) -> Result:
        return self.results[FLOOR]

    def measure(self) -> None:
        """All modes, in turns if they fit into memory together.

        Raises:
            UsageError: if the floor, or a mode that was named, does not fit by itself.
        """
        self.console.print(f"rehearsing {self._what()}")
        try:
            rehearsal = rehearse(self.config, self.settings)
        except FAILURES as error:
            raise UsageError(
                f"the model itself does not fit: lower --batch ({self.settings.batch}) or --seq ({self.settings.seq}), or add "
                f"--gradient-checkpointing ({_line(error)})"
            ) from error
        if self._fit_together(rehearsal) and not self.settings.apart:
            self._in_turns()
        else:
            self._apart()

    def _fit_together(self, rehearsal: Footprint) -> bool:
        """Also drops modes that cannot run at all."""
        model = build_model(self.config, self.settings, "meta")
        there = room(self.settings.device)
        need = {mode.text: needs(mode, model, self.settings.device) for mode in self.modes}
        held = need[FLOOR].device
        step = max(0, (rehearsal.host_bytes if rehearsal.device_peak_bytes is None else rehearsal.device_peak_bytes) - held)
        for mode in list(self.modes):
            if why := why_too_large(need[mode.text], step, there):
                if mode.text in self.settings.modes:
                    raise UsageError(f"mode {mode.text} {why}; or leave it out")
                self.console.print(f"skipped: {mode.text} {why}")
                self.modes.remove(mode)
                del self.results[mode.text], need[mode.text]
        fit = together(list(need.values()), step, there)
        if not fit and not self.settings.apart:
            self.console.print("not all modes fit into memory at once: one after the other, the floor before and after each")
        return fit

    def _in_turns(self) -> None:
        for result in self.results.values():
            result.beside = self.floor.rounds
        for mode in self.modes:
            self._build(mode)
        for number in range(self.settings.rounds):
            for text in list(self.runners):
                self.console.print(f"round {number + 1} of {self.settings.rounds}: {text}")
                self._round(text)

    def _apart(self) -> None:
        self.floor.beside = self.floor.rounds
        self._alone(self.modes[0])
        before = list(self.floor.rounds)
        for mode in self.modes[1:]:
            beside = self.results[mode.text].beside = before
            self._alone(mode)
            measured = len(self.floor.rounds)
            self._alone(self.modes[0])
            before = self.floor.rounds[measured:]
            self.results[mode.text].beside = beside + before

    def _alone(self, mode: Mode) -> None:
        self._build(mode)
        for number in range(self.settings.rounds):
            if mode.text in self.runners:
                self.console.print(f"round {number + 1} of {self.settings.rounds}: {mode.text}")
                self._round(mode.text)
        self.close()

    def _build(self, mode: Mode) -> None:
        self.console.print(f"building {mode.text}")
        runner: Runner
        if mode.peer is not None:
            runner = RemoteRunner(mode, self.settings)
        else:
            runner = LocalRunner(mode, self.config, self.settings)
        self.runners[mode.text] = runner
        with self._dropping_out(mode.text):
            footprint = runner.build()
            result = self.results[mode.text]
            result.footprint = result.footprint or footprint
            if footprint.warming_up:
                result.note = f"was still warming up after {self.settings.warm_up} steps: raise --warm-up"

    def _round(self, text: str) -> None:
        with self._dropping_out(text):
            self.results[text].rounds.append(self.runners[text].round())

    @contextlib.contextmanager
    def _dropping_out(self, text: str) -> Iterator[None]:
        """A mode that fails inside drops out; the others go on."""
        result = self.results[text]
        try:
            yield
        except Exception as error:
            if not isinstance(error, FAILURES):
                traceback.print_exception(error)
            result.error = f"failed: {_line(error)}"
        if result.error:  # here the error and the frames that it held are gone, and the memory in them
            self.console.print(f"{text} {result.error}")
            self._close(text)

    def trace(self, mode: Mode, path: Path) -> None:
        """Record some steps of a mode, built again if it is not in memory."""
        if mode.text not in self.runners and not self.results[mode.text].error:
            self._build(mode)
        runner = self.runners.get(mode.text)
        if isinstance(runner, LocalRunner):
            self.console.print(f"tracing {mode.text}")
            with self._dropping_out(mode.text):
                runner.trace(path)

    def close(self) -> None:
        """Give all memory back."""
        for text in list(self.runners):
            self._close(text)

    def _close(self, text: str) -> None:
        try:
            self.runners.pop(text).close()
        except Exception as error:  # what was measured is to be shown all the same
            self.results[text].error = self.results[text].error or f"could not be closed: {_line(error)}"

    def rows(self) -> list[dict[str, Any]]:
        """Of all modes, the floor first."""
        return [row(result, self.floor.footprint) for result in self.results.values()]

    def report(self, output: Path | None) -> int:
        """Print the table, write the file; returns the exit code."""
        rows = self.rows()
        width = self.console.width if self.console.is_terminal else TABLE_WIDTH
        show_table(rows, width)
        for entry in rows:
            for name in ("note", "error"):
                if name in entry:
                    self.console.print(f"{entry['mode']} {entry[name]}")
        if output is not None:
            found = {"environment": self.environment, "interrupted": self.interrupted, "rows": rows}
            output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            self.console.print(f"numbers in {output}")
        if self.interrupted:
            return 128 + signal.SIGINT
        return 1 if any("error" in entry for entry in rows) else 0

    def _what(self) -> str:
        settings = self.settings
        return f"{settings.model}, {settings.batch} × {settings.seq} tokens, {settings.dtype}, on {settings.device}"


def _definite(settings: BenchSettings) -> BenchSettings:
    """With the model and the device decided."""
    there = torch.cuda.is_available()
    if settings.device == "cuda" and not there:
        raise UsageError("--device cuda: torch sees no GPU; leave --device out to measure on the CPU")
    device = ("cuda" if there else "cpu") if settings.device == "auto" else settings.device
    model = settings.model or ("1.5b" if device == "cuda" else "tiny")
    return settings.model_copy(update={"device": device, "model": model})


def _present(modes: Sequence[Mode], settings: BenchSettings, console: Console) -> list[Mode]:
    """Those that this machine has."""
    present = []
    for mode in modes:
        if why := mode.why_absent(settings.device):
            if settings.modes:
                raise UsageError(f"mode {mode.text}: {why}")
            console.print(f"skipped: {mode.text}: {why}")
        else:
            present.append(mode)
    return present


def _check_writable(path: Path | None) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: give another file")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
