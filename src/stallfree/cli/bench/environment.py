"""What a result depends on beside the settings."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime
from typing import Any

import torch

from stallfree.cli.bench.settings import FILES, BenchSettings, command_line
from stallfree.cli.finetune.machine import cpu_name, version_of

LIBRARIES = ("stallfree", "transformers", "triton", "deepspeed", "torchao")


def environment(settings: BenchSettings) -> dict[str, Any]:
    """Machine, versions, date and command."""
    on_gpu = settings.device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "gpu_memory_GiB": round(torch.cuda.mem_get_info()[1] / 2**30, 1) if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,  # with its build
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in LIBRARIES},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command_line(settings),
        "settings": settings.model_dump(mode="json", exclude=set(FILES)),
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
