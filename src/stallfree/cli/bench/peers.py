"""Other libraries' offloading optimizers, driven as their own documentation says."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch import Tensor, nn

from stallfree.cli.bench.modes import LR, Mode, Training, WithOptimizer
from stallfree.cli.bench.settings import BenchSettings


def build_peer(mode: Mode, model: nn.Module, ids: Tensor, settings: BenchSettings) -> Training:
    """In a process that does nothing else: DeepSpeed sets the environment, the process group and the cores of its process."""
    if mode.name == "torchao":
        from torchao.optim import CPUOffloadOptimizer

        optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True, **mode.options)
        return WithOptimizer(model, ids, optimizer)
    return WithDeepSpeed(model, ids, deepspeed_settings(mode, settings))


def deepspeed_settings(mode: Mode, settings: BenchSettings) -> dict[str, Any]:
    """ZeRO stage 2 with its optimizer on the host; for ZenFlow with its section. No "auto" there: it yields NaN in 0.19.6."""
    zero: dict[str, Any] = {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    if mode.name == "deepspeed-zenflow":
        zero["zenflow"] = {"select_strategy": "step", **mode.options}
    return {
        "train_micro_batch_size_per_gpu": settings.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }


class WithDeepSpeed(Training):
    """Its engine wraps model and optimizer."""

    def __init__(self, model: nn.Module, ids: Tensor, config: dict[str, Any]) -> None:
        super().__init__(model, ids)
        _be_the_only_rank()
        import deepspeed

        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self) -> None:
        self.engine.backward(self.engine(input_ids=self.ids, labels=self.ids).loss)
        self.engine.step()


def _be_the_only_rank() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    major, minor = torch.cuda.get_device_capability()
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"  # it cannot read "9.0a"
