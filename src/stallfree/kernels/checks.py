"""What a kernel's caller must not get wrong: a device kernel would read and write elsewhere in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stallfree.kernels.block import ALIGNMENT, DTYPES, BlockLayout, Part
from stallfree.kernels.hyper import Hyper


def check_split(
    layout: BlockLayout,
    grads: Sequence[Tensor | None],
    squares: Tensor,
    selected: Tensor,
    deferred: Tensor,
    low: int,
) -> torch.dtype | None:
    """Raise `ValueError` unless the arguments are what `split` says. Returns the gradients' dtype, None if there are none."""
    dtype = _check_weights("gradient", layout, grads)
    check_flat("squares", layout.device, squares, layout.channels, torch.float32)
    check_flat("selected", layout.device, selected, layout.selected_numel, dtype)
    _check_piece("deferred", layout, deferred, low, dtype)
    return dtype


def check_parts(parts: Sequence[Part]) -> torch.device | None:
    """Raise `ValueError` unless the parts are what `Part` says, on one device. Returns it, None if there are no parts."""
    device = parts[0].layout.device if parts else None
    for part in parts:
        layout = part.layout
        if layout.device != device:
            raise ValueError(f"the parts of an update must be on one device, not {device} and {layout.device}")
        if any(weight is None for weight in part.weights):
            raise ValueError("every weight of a part must be there when an update is planned")
        dtype = _check_weights("weight", layout, part.weights)
        check_flat("channels", layout.device, part.channels, layout.places, torch.int32)
        for name, flat in (("master", part.master), ("exp_avg", part.exp_avg), ("exp_avg_sq", part.exp_avg_sq)):
            check_flat(name, layout.device, flat, layout.selected_numel, torch.float32)
        check_flat("steps", layout.device, part.steps, layout.places, torch.int32)
        if isinstance(part.grad, Tensor):
            check_flat("grad", layout.device, part.grad, layout.selected_numel, dtype)
        elif part.grad < 0 or part.grad % ALIGNMENT:
            raise ValueError(f"grad must be a place in a step's memory, a multiple of {ALIGNMENT} bytes, not {part.grad}")
    return device


class Planned(NamedTuple):
    """What the arguments of a step are compared with."""

    device: torch.device | None
    weights: int
    places: tuple[int, ...]  # the numbers of weights whose gradients are in a step's memory
    nbytes: int  # of that, at least

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Planned:
        """Raises `ValueError` unless the parts are what `Part` says."""
        device, weights, nbytes = check_parts(parts), 0, 0
        places: list[int] = []
        for part in parts:
            count = len(part.weights)
            if isinstance(part.grad, int) and part.layout.places:
                places += [weights + place for place in range(count) if part.layout.segments[place].selected]
                nbytes = max(nbytes, part.grad + part.layout.selected_numel * part.weights[0].dtype.itemsize)
            weights += count
        return cls(device, weights, tuple(places), nbytes)


def check_step(planned: Planned, hypers: Sequence[Hyper | None], factors: Tensor, skip: Tensor, memory: Tensor | None) -> None:
    """Raise `ValueError` unless the arguments are what `Update.step` says."""
    device, weights, places, nbytes = planned
    if len(hypers) != weights:
        raise ValueError(f"{weights} weights need as many hypers, not {len(hypers)}")
    if device is None:
        return
    check_flat("factors", device, factors, weights, torch.float32)
    check_flat("skip", device, skip, 1, torch.bool)
    if memory is None:
        if any(hypers[place] is not None for place in places):
            raise ValueError("memory must be there: gradients of weights that take a step are in it")
    elif places:
        check_flat("memory", device, memory, max(memory.numel(), nbytes), torch.uint8)
        if memory.data_ptr() % ALIGNMENT:
            raise ValueError(f"memory must begin at a multiple of {ALIGNMENT} bytes, not at {memory.data_ptr():#x}")


def check_publish(layout: BlockLayout, weights: Sequence[Tensor | None], values: Tensor, low: int) -> torch.dtype | None:
    """Raise `ValueError` unless the arguments are what `publish` says. Returns the weights' dtype, None if there are none."""
    dtype = _check_weights("weight", layout, weights)
    _check_piece("values", layout, values, low, dtype)
    return dtype


def _check_weights(name: str, layout: BlockLayout, tensors: Sequence[Tensor | None]) -> torch.dtype | None:
    segments = layout.segments
    if len(tensors) != len(segments):
        raise ValueError(f"{len(segments)} weights need as many entries, not {len(tensors)}")
    dtype = None
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if dtype is None:
            dtype = tensor.dtype
            if dtype not in DTYPES:
                raise ValueError(f"{name} {index} must be fp32, bf16 or fp16, not {dtype}")
        if (
            tensor.dtype != dtype
            or tensor.numel() != segments[index].numel
            or not tensor.is_contiguous()
            or tensor.device != layout.device
        ):
            raise ValueError(
                f"{name} {index} must be {segments[index].numel} contiguous {dtype} elements on {layout.device}, not "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            )
    return dtype


def check_flat(name: str, device: torch.device, flat: Tensor, numel: int, dtype: torch.dtype | None) -> None:
    if (
        flat.numel() != numel
        or (dtype is not None and flat.dtype != dtype)
        or not flat.is_contiguous()
        or flat.device != device
    ):
        raise ValueError(
            f"{name} must be {numel} contiguous {dtype or ''} elements on {device}, not {flat.dtype} of shape "
            f"{tuple(flat.shape)}, strides {flat.stride()}, on {flat.device}"
        )


def _check_piece(name: str, layout: BlockLayout, flat: Tensor, low: int, dtype: torch.dtype | None) -> None:
    numel = layout.deferred_numel
    if low or flat.numel() != numel:
        high = low + flat.numel()
        if not (0 <= low <= high <= numel and layout.begins_row(low) and (high == numel or layout.begins_row(high))):
            raise ValueError(
                f"{name} must be {numel} elements, or a piece of them that begins and ends where rows do, not those from "
                f"{low} to {high}"
            )
        numel = flat.numel()
    check_flat(name, layout.device, flat, numel, dtype)
