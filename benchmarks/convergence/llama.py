"""A Llama that trains several runs at once: every weight has a leading run dimension, every product is a batched one.

SmolLM2-135M on a few hundred tokens keeps no large GPU busy; sixteen copies with different weights do, without CUDA graphs or
streams. The arithmetic is that of Transformers' LlamaForCausalLM (`prepare.py --check` compares the logits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Layout, Shape


@dataclass(frozen=True)
class Llama:
    """Hyperparameters of a Llama with tied embeddings."""

    vocab: int = 49152
    hidden: int = 576
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    ffn: int = 1536
    theta: float = 100_000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def layout(self, *, tile: int = 1024, device: torch.device | str = "cpu") -> Layout:
        """Channels are input columns, for the embedding table rows."""
        d, kv = self.hidden, self.kv_heads * self.head_dim
        norms = [Shape(name, 1, d, resident=True) for name in ("input_norm", "post_norm")]
        linear = [
            ("q", d, d),
            ("k", kv, d),
            ("v", kv, d),
            ("o", d, d),
            ("gate", self.ffn, d),
            ("up", self.ffn, d),
            ("down", d, self.ffn),
        ]
        single = [Shape("embed", self.vocab, d, by_row=True), Shape("norm", 1, d, resident=True)]
        return Layout(self.layers, [*(Shape(*shape) for shape in linear), *norms], single, tile=tile, device=device)


SMOLLM2 = Llama()


def flatten(weights: dict[str, Tensor], layout: Layout) -> Tensor:
    """[numel] fp32: weights named "q.3" (kind and layer), "embed" and "norm", in the layout's flat buffer."""
    flat = torch.zeros(layout.numel, device=layout.device)
    for group in layout.groups:
        for i, matrix in enumerate(layout.view(flat[None], group)[0]):
            name = group.shape.name if group.count == 1 and group.shape.name in weights else f"{group.shape.name}.{i}"
            matrix.copy_(weights[name].view_as(matrix))
    return flat


def random_weights(shape: Llama, generator: torch.Generator) -> dict[str, Tensor]:
    """Small random weights, for tests and timings."""
    weights = {}
    for group in shape.layout().groups:
        name, size = group.shape.name, (group.shape.rows, group.shape.cols)
        for i in range(group.count):
            weight = torch.ones(size) if group.shape.resident else torch.randn(size, generator=generator) * 0.02
            weights[name if name in ("embed", "norm") else f"{name}.{i}"] = weight
    return weights


class _Linear(torch.autograd.Function):
    """x [R, N, in] @ weight [R, out, in]ᵀ. Autograd's own formula would give the weight's gradient transposed in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return torch.bmm(grad, weight), torch.bmm(grad.mT, x)


class BatchedLlama:
    """R models whose parameters are views of `flat`, [R, numel]."""

    def __init__(self, shape: Llama, layout: Layout, flat: Tensor) -> None:
        self.shape, self.layout = shape, layout
        self.params = {
            group.shape.name: [p.requires_grad_() for p in layout.view(flat.detach(), group).unbind(1)]
            for group in layout.groups
        }
        self.runs = torch.arange(flat.shape[0], device=flat.device)

    def loss(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """[R] each run's mean loss. tokens: [R, B, T]; labels: [R, B, C], of the tokens after `positions`; -100: none."""
        logits = self.logits(tokens, positions)
        losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="none")
        return losses.view(len(self.runs), -1).sum(1) / (labels != -100).flatten(1).sum(1)

    def backward(self, losses: Tensor, grad: Tensor) -> None:
        """Write the gradient of every run's loss to `grad`, [R, numel]."""
        params = [p for name in self.params for p in self.params[name]]
        views = [view for group in self.layout.groups for view in self.layout.view(grad, group).unbind(1)]
        torch._foreach_copy_(views, torch.autograd.grad(losses.sum(), params))

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[R, B, C, vocab] at `positions`, [R, B, C]."""
        runs, batch, length = tokens.shape
        (embed,), (final_norm,) = self.params["embed"], self.params["norm"]
        x = embed[self.runs[:, None], tokens.flatten(1)]  # [R, B*T, hidden]
        rope = self._rope(length, x)
        for layer in range(self.shape.layers):
            x = self._layer({name: stack[layer] for name, stack in self.params.items() if len(stack) > layer}, x, batch, rope)
        at = (torch.arange(batch, device=x.device)[None, :, None] * length + positions).flatten(1)
        x = x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
        return _Linear.apply(self._norm(x, final_norm), embed).view(runs, batch, -1, self.shape.vocab)

    def _layer(self, w: dict[str, Tensor], x: Tensor, batch: int, rope: tuple[Tensor, Tensor]) -> Tensor:
        runs, tokens, _ = x.shape
        normed = self._norm(x, w["input_norm"])

        def heads(name: str, count: int) -> Tensor:  # [R*B, heads, T, head_dim]
            return (
                _Linear.apply(normed, w[name]).view(runs * batch, tokens // batch, count, self.shape.head_dim).transpose(1, 2)
            )

        q, k, v = (
            heads(name, n) for name, n in (("q", self.shape.heads), ("k", self.shape.kv_heads), ("v", self.shape.kv_heads))
        )
        q, k = _rotate(q, *rope), _rotate(k, *rope)
        k, v = (t.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(runs, tokens, -1)
        x = x + _Linear.apply(attended, w["o"])
        normed = self._norm(x, w["post_norm"])
        gated = F.silu(_Linear.apply(normed, w["gate"])) * _Linear.apply(normed, w["up"])
        return x + _Linear.apply(gated, w["down"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.shape.eps) * weight  # [R, N, hidden] * [R, 1, hidden]

    def _rope(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        frequency = self.shape.theta ** -(
            torch.arange(0, self.shape.head_dim, 2, device=like.device).float() / self.shape.head_dim
        )
        angle = torch.arange(length, device=like.device).float()[:, None] * frequency
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
