"""An optimizer with a block that staging memory may not hold whole."""

import torch

from stallfree import ZenFlowAdamW, ZenFlowConfig

LARGE = dict(topk_ratio=0.25, update_interval=2, full_warm_up_rounds=1, select_interval=2, min_numel=0, block_numel=1)


def large(dtype: torch.dtype = torch.float32, **settings) -> tuple[list[torch.nn.Parameter], ZenFlowAdamW]:
    """A block that comes first in the backward pass and takes many pieces, and some that take few."""
    params = [torch.nn.Parameter(torch.ones(8, 8, dtype=dtype)) for _ in range(4)]
    params.append(torch.nn.Parameter(torch.ones(64, 16, dtype=dtype)))
    named = [(f"layers.0.{place}.weight", param) for place, param in enumerate(params)]
    return params, ZenFlowAdamW(named, lr=1e-2, config=ZenFlowConfig(**LARGE | settings))
