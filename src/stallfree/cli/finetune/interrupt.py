"""Ctrl-C and SIGTERM as a request that the loop honours between steps."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from stallfree.cli.finetune.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """An evaluation was left because a stop was requested."""


class StopRequest:
    """While entered, the first signal asks for a stop; a second one of the same kind acts as if nobody listened.

    Of several ranks one that has got a signal is enough. They stop at the same place, where they compare notes: `check()`.
    """

    def __init__(self, announce: Callable[[str], None], ranks: Ranks) -> None:
        self._announce, self._ranks = announce, ranks
        self._previous: dict[signal.Signals, Any] = {}
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if a stop was requested, on all ranks."""
        number = self._ranks.largest(self.signal or 0)
        if number:
            self.signal = signal.Signals(number)
            if self._ranks.sharded:
                self._announce(f"{self.signal.name}: saving; once more to stop at once, without")
            raise Interrupted

    def _request(self, number: int, frame: FrameType | None) -> None:
        came = signal.Signals(number)
        self.signal = self.signal or came
        signal.signal(came, self._previous.pop(came))
        if not self._ranks.sharded:  # the launcher of several sends signals also when one of them has failed
            self._announce(f"{came.name}: finishing this step, then saving; once more to stop at once, without saving")
