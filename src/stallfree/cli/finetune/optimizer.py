"""Settings -> the optimizer, its configuration and the learning rate's schedule."""

from __future__ import annotations

import math

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.cli.errors import UsageError
from stallfree.cli.finetune.settings import FinetuneSettings
from stallfree.engine.blocks import by_modules


def build_optimizer(model: nn.Module, settings: FinetuneSettings, config: ZenFlowConfig) -> ZenFlowAdamW:
    """AdamW on every trainable parameter; vectors (norms, biases) are not decayed.

    Raises:
        UsageError: if its state does not fit into memory, or the optimizer refuses this machine.
    """
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [pair for pair in trained if pair[1].dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [pair for pair in trained if pair[1].dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    try:
        return ZenFlowAdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, config=by_modules(config, model))
    except (MemoryError, RuntimeError) as error:
        raise UsageError(str(error)) from error


def build_schedule(optimizer: ZenFlowAdamW, settings: FinetuneSettings, steps: int) -> LambdaLR:
    """Rise over the warm-up, then as `--schedule` says; every step has a learning rate above zero."""
    warmup = warmup_steps(settings, steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[settings.schedule]

    return LambdaLR(optimizer, factor)


def warmup_steps(settings: FinetuneSettings, steps: int) -> int:
    """Steps of the warm-up, given as a share or as steps.

    Raises:
        UsageError: if it is longer than the run.
    """
    count = round(settings.warmup * steps) if settings.warmup < 1 else round(settings.warmup)
    if count > steps:
        raise UsageError(
            f"warmup {settings.warmup:g} is longer than the run of {steps} steps: lower it, as in --warmup 0.05 for 5% of them"
        )
    return count
