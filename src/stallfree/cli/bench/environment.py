"""What a result depends on beside the settings."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path
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
        "commit": commit_of(Path(__file__)),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command_line(settings),
        "settings": settings.model_dump(mode="json", exclude=set(FILES)),
    }


def _driver() -> str | None:
    words = _said_by(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split()
    return words[0] if words else None


def commit_of(file: Path) -> str | None:
    """Of the source tree that a file belongs to, with "-dirty" if it has been changed since; None where there is none."""
    git = ["git", "-C", str(file.parent)]
    if not _said_by([*git, "ls-files", file.name]):  # installed, be it inside a tree of something else
        return None
    return _said_by([*git, "describe", "--always", "--dirty", "--exclude=*"]).strip() or None


def _said_by(command: list[str]) -> str:
    """What a command prints; nothing if it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
