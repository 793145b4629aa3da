"""SmolLM2's weights in two files: the quantized bytes of the GGUF file, renamed, and back to floating point with torch alone.

Two files, so that each can travel where transfers are limited in size, and no GGUF reader is needed where they arrive.
`prepare.py` writes them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .llama import SMOLLM2, Llama

GGUF_NAMES = {
    "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down",
    "attn_norm": "input_norm", "ffn_norm": "post_norm",
}  # fmt: skip


def dequantize(raw: Tensor, kind: str) -> Tensor:
    """[rows, bytes] uint8 -> [rows, cols] fp32. Blocks of 32 weights with an fp16 scale (Q8_0), and an fp16 minimum (Q4_1)."""
    if kind == "F32":
        return raw.view(torch.float32)
    rows = raw.shape[0]
    if kind == "Q8_0":
        blocks = raw.reshape(rows, -1, 34)
        return (blocks[..., :2].contiguous().view(torch.float16).float() * blocks[..., 2:].view(torch.int8)).reshape(rows, -1)
    if kind == "Q4_1":
        blocks = raw.reshape(rows, -1, 20)
        scale, minimum = blocks[..., :4].contiguous().view(torch.float16).float().split(1, -1)
        nibbles = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
        return (scale * nibbles + minimum).reshape(rows, -1)
    raise ValueError(f"{kind} is not a quantization used here; use a GGUF file in F32, Q8_0 or Q4_1")


def read_gguf(path: Path, shape: Llama = SMOLLM2) -> dict[str, tuple[Tensor, str]]:
    """Our names -> (raw bytes `[rows, bytes]`, quantization). Undoes the row order llama.cpp gives q and k for its RoPE."""
    import gguf

    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        parts = tensor.name.split(".")
        name = (
            f"{GGUF_NAMES[parts[2]]}.{parts[1]}"
            if parts[0] == "blk"
            else {"token_embd": "embed", "output_norm": "norm"}[parts[0]]
        )
        raw = torch.from_numpy(tensor.data.copy()).view(torch.uint8)
        raw = raw.reshape(tensor.data.shape[0] if tensor.data.ndim == 2 else 1, -1)
        if name[0] in "qk":
            heads = shape.heads if name[0] == "q" else shape.kv_heads
            raw = raw.view(heads, shape.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(raw.shape).contiguous()
        tensors[name] = (raw, tensor.tensor_type.name)
    return tensors


def load_weights(parts: list[Path]) -> dict[str, Tensor]:
    """fp32 weights by our names."""
    weights = {}
    for part in parts:
        for name, (raw, kind) in torch.load(part)["weights"].items():
            weights[name] = dequantize(raw, kind)
    return weights
