"""The one error of this package."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is refused; the message says why, and which one is good. Nothing has been changed."""
