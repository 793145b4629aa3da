"""Checkpoints that survive: complete or not there, checked before they are read, and never code (docs/checkpoints.md)."""

from stallfree.checkpoints.errors import CheckpointError, NoCheckpointError
from stallfree.checkpoints.read import load_checkpoint
from stallfree.checkpoints.write import save_checkpoint

__all__ = ["CheckpointError", "NoCheckpointError", "load_checkpoint", "save_checkpoint"]
