"""The `stallfree` command."""

from stallfree.cli.app import main

__all__ = ["main"]
