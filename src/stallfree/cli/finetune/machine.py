"""What this machine is, and which type of number it computes fast."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}  # without them a CPU emulates bfloat16, several times slower than float32


def choose_dtype(device: str) -> tuple[Literal["float32", "bfloat16"], str]:
    """(dtype, why): bfloat16 where the device computes it in hardware."""
    if device == "cuda":
        fast, who = torch.cuda.is_bf16_supported(including_emulation=False), "this GPU"
    else:
        fast, who = bool(BFLOAT16_FLAGS & _cpu_flags()), "this CPU"
    return ("bfloat16", f"{who} computes it in hardware") if fast else ("float32", f"{who} has no bfloat16")


def hardware(device: str) -> str:
    """The GPU, if it trains, the CPU, and the cores that this process may use."""
    cpu = f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} torch threads"
    return f"{torch.cuda.get_device_name()}; {cpu}" if device == "cuda" else cpu


def cpu_name() -> str:
    """The CPU's model, as far as the system tells."""
    found = re.search(r"^model name\s*: (.*)$", _cpu_info(), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def versions() -> str:
    """Of what a result depends on."""
    libraries = [f"{name} {version_of(name) or '(not installed)'}" for name in ("stallfree", "transformers")]
    return ", ".join([*libraries, f"torch {torch.__version__}", f"Python {platform.python_version()}"])  # with its build


def version_of(name: str) -> str | None:
    """Of a library. None: not installed, or run from its source tree."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_flags() -> set[str]:
    found = re.search(r"^flags\s*: (.*)$", _cpu_info(), re.MULTILINE)
    return set(found[1].split()) if found else set()


def _cpu_info() -> str:
    return CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.is_file() else ""
