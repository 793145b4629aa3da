"""A nested state as JSON, with its tensors beside it.

Dicts (with keys that JSON would turn into text), tuples and floats that JSON does not have are tagged objects, so that what
comes back has the types of what was saved. Anything else is refused: nothing here can name a class or a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Key = tuple[Any, ...]
KINDS = (str, int, float, bool)


class Collector:
    """Gathers the tensors of a state. Two names of one memory (a model's weight, and the optimizer's view of it) are one."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}  # dense: contiguous, in the order of their memory
        self._known: dict[Key, str] = {}

    def encode(self, value: Any, path: str) -> Any:
        """`value` for json.dumps.

        Raises:
            TypeError: for what is neither tensor nor plain data, with its place.
        """
        if value is None or isinstance(value, (str, bool)):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), path)
        if isinstance(value, (list, tuple)):
            items = [self.encode(item, f"{path}/{place}") for place, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, KINDS):
                    raise TypeError(f"{path} has a key of type {type(key).__name__}, which a checkpoint cannot hold")
            return {"dict": [[key, self.encode(item, f"{path}/{key}")] for key, item in value.items()]}
        raise TypeError(
            f"{path} is a {type(value).__name__}; a checkpoint holds tensors, numbers, text, None, and lists, tuples and dicts "
            "of them: save what it is made of"
        )

    def _tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        if tensor.layout != torch.strided or tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter):
            what = f"{type(tensor).__name__} ({tensor.layout}, on {tensor.device})"
            raise TypeError(f"{path} is a {what}: only plain tensors are saved")
        strides: tuple[int, ...] = tuple(tensor.stride())
        order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])  # stable: of equal strides the first
        dense = tensor.permute(order).contiguous()  # host arrays are channel-major: as they lie, nothing is copied
        key = (dense.data_ptr(), dense.device, dense.dtype, dense.shape, tuple(order)) if dense.numel() else (path,)
        if key not in self._known:
            while path in self.tensors:
                path += "'"
            self._known[key] = path
            self.tensors[path] = dense
        straight = order == list(range(tensor.dim()))
        return {"tensor": self._known[key]} | ({} if straight else {"order": order})


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What `Collector.encode` was given. Raises ValueError, TypeError, KeyError or IndexError for what it did not write."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        found = tensor(value["tensor"])
        if "order" not in value:
            return found
        order = value["order"]
        return found.permute([order.index(axis) for axis in range(len(order))])
    ((tag, inside),) = value.items()
    if tag == "tuple":
        return tuple(decode(item, tensor) for item in inside)
    if tag == "dict":
        return {key: decode(item, tensor) for key, item in inside}
    if tag == "float":
        return float(inside)
    raise ValueError(f"{tag!r} is no part of a state")
