"""The one error that a command shows without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """A mistake in what the user gave. Its message is one sentence that names the way out."""


def did_you_mean(name: str, known: Iterable[str], *, or_else: str = "") -> str:
    """`"; did you mean a, b?"` for names near `name`, else `or_else`."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else or_else
