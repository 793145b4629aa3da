"""Kernels, each behind one interface: `replay` and `queue` for the host half, `block` and `judging` for the device half."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stallfree.kernels.block import BlockKernel
from stallfree.kernels.queue import HostQueue, TorchQueue
from stallfree.kernels.replay import HostKernel
from stallfree.kernels.torch_block import TorchBlock


def host_kernel(name: str, threads: int, cores: Sequence[int] | None, pin: bool) -> HostKernel:
    """The kernel that `ZenFlowConfig.host_kernel` names, with its threads, bound to cores unless those are None."""
    if name == "torch":
        from stallfree.kernels.replay import TorchReplay

        return TorchReplay()
    from stallfree.kernels.native import NativeReplay

    return NativeReplay(threads, cores, pin=pin)


def host_queue(kernel: HostKernel, done: Tensor, overlap: bool) -> HostQueue:
    """The queue that suits a host kernel."""
    from stallfree.kernels.native import NativeReplay

    if isinstance(kernel, NativeReplay):
        from stallfree.kernels.native_queue import NativeQueue

        return NativeQueue(kernel, done, overlap)
    return TorchQueue(kernel, done, overlap)


def block_kernel(device: torch.device) -> BlockKernel:
    """The kernel of the device half: Triton's on CUDA, torch's elsewhere. The engine has looked at what it gives them."""
    if device.type != "cuda":
        return TorchBlock()
    from stallfree.kernels.triton import TritonBlock

    return TritonBlock(device, checks=False)
