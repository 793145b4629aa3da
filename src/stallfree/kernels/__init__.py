"""Kernels, each behind one interface: `replay` for the host half, `device` for the device half."""

from __future__ import annotations

from collections.abc import Sequence

from stallfree.kernels.replay import HostKernel


def host_kernel(name: str, threads: int, cores: Sequence[int] | None) -> HostKernel:
    """The kernel that `ZenFlowConfig.host_kernel` names, with its threads, pinned to cores unless those are None."""
    if name == "torch":
        from stallfree.kernels.replay import TorchReplay

        return TorchReplay()
    from stallfree.kernels.native import NativeReplay

    return NativeReplay(threads, cores)
