"""Host memory in whole pages, in huge ones where the system has them: replay reads it from end to end."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
HUGE = 1 << 21  # bytes; below this huge pages would be waste


def host_memory(nbytes: int) -> Tensor:
    """Zeroed bytes that begin at a page, and share no page with anything else."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    pages = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
