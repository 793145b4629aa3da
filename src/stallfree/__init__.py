"""Stallfree: train models whose optimizer state does not fit on the GPU, without letting the GPU wait."""

from stallfree.config import PRESETS, ZenFlowConfig
from stallfree.engine.blocks import channel_dims
from stallfree.optimizer import ZenFlowAdamW

__version__ = "0.1.0"
__all__ = ["PRESETS", "ZenFlowAdamW", "ZenFlowConfig", "channel_dims"]
