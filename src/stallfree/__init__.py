"""Stallfree: train models whose optimizer state does not fit on the GPU, without letting the GPU wait."""

from stallfree.checkpoints import CheckpointError, NoCheckpointError, load_checkpoint, save_checkpoint
from stallfree.config import PRESETS, ZenFlowConfig
from stallfree.convert import export_model, from_adamw_state, to_adamw_state
from stallfree.engine.blocks import channel_dims
from stallfree.optimizer import ZenFlowAdamW

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "CheckpointError",
    "NoCheckpointError",
    "ZenFlowAdamW",
    "ZenFlowConfig",
    "channel_dims",
    "export_model",
    "from_adamw_state",
    "load_checkpoint",
    "save_checkpoint",
    "to_adamw_state",
]
