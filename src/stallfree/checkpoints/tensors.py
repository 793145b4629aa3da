"""Files of tensors in safetensors format, written in one pass over memory and read as a mapping of the file.

The writer is our own, because the library's takes all tensors of a file at once, in host memory, and leaves the digest to a
second reading: this one needs room for one piece of one tensor, wherever the tensor lives. The reader is the library's.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

PIECE_BYTES = 1 << 24
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FileSum(NamedTuple):
    """What a file must be."""

    size: int  # bytes
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileSum:
    """A new safetensors file on the disk. tensors: contiguous, on any device."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write_file(path, _bytes(text, tensors))


def write_file(path: Path, pieces: Iterator[bytes | memoryview]) -> FileSum:
    """A new file, on the disk when this returns."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(size, digest.hexdigest())


def _bytes(header: bytes, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        flat, step = tensor.view(-1), PIECE_BYTES // tensor.itemsize
        for start in range(0, len(flat), step):
            piece = flat[start : start + step].cpu()  # of host memory: itself
            yield memoryview((ctypes.c_ubyte * piece.nbytes).from_address(piece.data_ptr())).cast("B")


class TensorFiles:
    """Tensors of several files by name. What is read is the file itself, mapped: copy what is to outlive it."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = {}
        for path in paths:
            file = safe_open(path, framework="pt", device="cpu")
            self._files.update(dict.fromkeys(file.keys(), file))

    def __call__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor
