"""A mode in a process of its own, which takes its turn when it is asked to: one line of JSON each way.

For other libraries: some set the environment, the process group and the cores of the process they run in.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any, TextIO

from stallfree.cli.bench.modes import Mode
from stallfree.cli.bench.records import Footprint, Round
from stallfree.cli.bench.settings import BenchSettings

EXIT_SECONDS = 20


class PeerError(RuntimeError):
    """A worker's mode failed, or the worker ended. The message is its reason in one line."""


class RemoteRunner:
    """As a LocalRunner, elsewhere."""

    def __init__(self, mode: Mode, settings: BenchSettings) -> None:
        self.mode, self.settings = mode, settings.of_peers()
        self.process: subprocess.Popen[str] | None = None

    def build(self) -> Footprint:
        """Start the process, load its libraries, build and warm up."""
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - open until close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stallfree.cli.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # Ctrl-C is the parent's, and libraries' own processes end with the group
        )
        request = {"mode": self.mode.text, "settings": self.settings.model_dump(mode="json")}
        return Footprint(**self._ask(request))

    def round(self) -> Round:
        """Some measured steps."""
        return Round(**self._ask({}))

    def close(self) -> None:
        """End the process and whatever it started."""
        if self.process is None:
            return
        process, self.process = self.process, None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self.log.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise PeerError(f"{self.mode.text} ended: {self._last_words()}")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        return lines[-1] if lines else "without a word"


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer until there are no more requests."""
    from stallfree.cli.bench.measure import LocalRunner, rehearse
    from stallfree.cli.bench.modes import parse_mode
    from stallfree.cli.bench.shapes import model_config

    runner: LocalRunner | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if runner is None:
                settings = BenchSettings.model_validate(request["settings"])
                config = model_config(settings)
                rehearse(config, settings)
                runner = LocalRunner(parse_mode(request["mode"]), config, settings, with_children=True)
                reply = asdict(runner.build())
            else:
                reply = asdict(runner.round())
        except Exception as error:  # whatever the library raises
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":  # libraries may start processes that import this file
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # libraries print
    serve(requests, replies)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # DeepSpeed's optimizer process would keep this one alive
