"""One call's update of one run, over all parameters at once: a Triton kernel, and the same in torch operations.

In order: replay (or average) the windows that are due, then AdamW of the selected and resident elements with this call's
gradient, then keep the gradient. With `commit=False` nothing but `out` is written: the weights that a flush would leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Layout
from .rule import Method

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Bits of a channel's flag
SELECTED = 1  # during this call: the device updates it
DEFERRED = 2  # while the window that is due collected: the host updates it
STAYS = 4  # selected from the next call on: a window that is published in the call of its close writes it plain


@dataclass(frozen=True)
class Hyper:
    """AdamW's settings, of all parameters."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


@dataclass
class State:
    """One run's tensors. P elements, C channels, T calls."""

    method: Method
    master: Tensor  # [P]
    exp_avg: Tensor  # [P]
    exp_avg_sq: Tensor  # [P]
    weight: Tensor  # [P] what forward reads, in the model's dtype
    grad: Tensor  # [P] in the model's dtype
    ring: Tensor  # [slots, P] gradients of the last calls; call t lies in slot t % slots
    flags: Tensor  # [C] uint8
    steps: Tensor  # [C] int32: AdamW steps of each channel; kept for the mean rule only (replay: the call number)
    lr: Tensor  # [T + 1]
    clip: Tensor  # [T + 1] factor on each call's gradient
    bias: Tensor  # [2, T + 1] 1 - beta**n

    def deferred_beta1(self, call: int, beta1: float) -> float:
        """Of the windows that are due in this call: those of the warm-up are due in it."""
        own = self.method.deferred_beta1
        return beta1 if own is None or call <= self.method.full_warm_up_rounds else own


def update_torch(
    state: State, layout: Layout, hyper: Hyper, call: int, windows: Tensor, lookahead: Tensor | None, out: Tensor, commit: bool
) -> None:
    """windows: [blocks + 1, W, 2]; lookahead: [blocks + 1], None for none; out: [P], `state.weight` if commit."""
    channel, block = layout.elements
    flags = state.flags[channel]
    deferred, mean = (flags & DEFERRED) != 0, state.method.rule == "mean"
    master, exp_avg, exp_avg_sq = state.master.clone(), state.exp_avg.clone(), state.exp_avg_sq.clone()
    steps = state.steps[channel].long()
    drift, written = torch.zeros_like(master), torch.zeros_like(deferred)
    (beta1, beta2), deferred_beta1 = hyper.betas, state.deferred_beta1(call, hyper.betas[0])

    def adamw(active: Tensor, grad: Tensor, lr: Tensor, n: Tensor | int, beta1: float) -> Tensor:
        m = exp_avg + (1 - beta1) * (grad - exp_avg)
        v = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
        direction = m / state.bias[0, n] / ((v / state.bias[1, n]).sqrt() + hyper.eps)
        moved = master * (1 - lr * hyper.weight_decay) - lr * direction
        for old, new in ((exp_avg, m), (exp_avg_sq, v), (master, moved)):
            old.copy_(torch.where(active, new, old))
        return direction

    for i in range(windows.shape[1]):
        first, last = (edge.long()[block] for edge in windows[:, i].unbind(-1))
        due = deferred & (first <= last)
        written |= due
        total = torch.zeros_like(master)
        for past in range(int(first.min()), int(last.max()) + 1):
            inside = due & (first <= past) & (past <= last)
            slot = state.grad if commit and past == call else state.ring[past % state.method.slots]
            grad = torch.where(inside, slot.to(master.dtype) * state.clip[past], 0.0)
            total += grad
            if not mean:
                lr = state.lr[past] * state.method.deferred_lr_scale
                drift = torch.where(inside, lr * adamw(inside, grad, lr, past, deferred_beta1), drift)
        if mean:
            steps = steps + due
            lr = state.lr[last] * state.method.deferred_lr_scale
            average = total / (last - first + 1).clamp(min=1)
            drift = torch.where(due, lr * adamw(due, average, lr, steps, deferred_beta1), drift)
        if lookahead is not None:
            plain = (last == call) & ((flags & STAYS) != 0)
            drift = torch.where(plain, 0.0, drift * lookahead[block])
    if not commit:
        out.copy_(master)
        return
    on = (flags & SELECTED) != 0
    adamw(on, state.grad.to(master.dtype) * state.clip[call], state.lr[call], steps + 1 if mean else call, beta1)
    out.copy_(torch.where(on, master, torch.where(written, master - drift, out)))
    for old, new in ((state.master, master), (state.exp_avg, exp_avg), (state.exp_avg_sq, exp_avg_sq)):
        old.copy_(new)
    if state.method.slots:
        state.ring[call % state.method.slots].copy_(state.grad)


if triton is not None:

    @triton.jit
    def _adamw(active, grad, lr, bias1, bias2, master, exp_avg, exp_avg_sq, new1, keep2, new2, eps, weight_decay):
        m = exp_avg + new1 * (grad - exp_avg)
        v = keep2 * exp_avg_sq + new2 * grad * grad
        direction = m / bias1 / (tl.sqrt(v / bias2) + eps)
        moved = master * (1.0 - lr * weight_decay) - lr * direction
        return direction, tl.where(active, moved, master), tl.where(active, m, exp_avg), tl.where(active, v, exp_avg_sq)

    UNALIGNED = [
        "flags_ptr",
        "steps_ptr",
        "tiles_ptr",
        "windows_ptr",
        "lookahead_ptr",
        "lr_ptr",
        "clip_ptr",
        "bias1_ptr",
        "bias2_ptr",
    ]

    @triton.jit(do_not_specialize=["call", *UNALIGNED])  # rows of tables: compile once, wherever they start
    def _update(
        grad_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, out_ptr, ring_ptr, flags_ptr, steps_ptr,  # P or C elements
        tiles_ptr, windows_ptr, lookahead_ptr, lr_ptr, clip_ptr, bias1_ptr, bias2_ptr,  # tables
        call, numel, lr_scale, deferred_new1, new1, keep2, new2, eps, weight_decay,
        SLOTS: tl.constexpr, WINDOWS: tl.constexpr, MEAN: tl.constexpr, COMMIT: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        tile = tl.program_id(0)
        offsets = tile * TILE + tl.arange(0, TILE)
        start, rows, cols = tl.load(tiles_ptr + tile * 6), tl.load(tiles_ptr + tile * 6 + 1), tl.load(tiles_ptr + tile * 6 + 2)
        by_row, channel0, block = (
            tl.load(tiles_ptr + tile * 6 + 3),
            tl.load(tiles_ptr + tile * 6 + 4),
            tl.load(tiles_ptr + tile * 6 + 5),
        )
        row = (offsets - start) // cols
        column = (offsets - start) - row * cols
        channel = channel0 + tl.where(by_row != 0, tl.minimum(row, rows - 1), column)
        flags = tl.load(flags_ptr + channel).to(tl.int32)
        deferred = (flags & 2) != 0
        on = (flags & 1) != 0

        due = tl.full([TILE], 0, tl.int1)
        for i in tl.static_range(WINDOWS):
            edge = windows_ptr + (block * WINDOWS + i) * 2
            due = due | (deferred & (tl.load(edge) <= tl.load(edge + 1)))
        # Whole tiles are read and written, or not at all: a mask by element would break up the vector accesses.
        pending = tl.max(due.to(tl.int32), 0) > 0
        if COMMIT:
            active = due | on
            used = tl.max(active.to(tl.int32), 0) > 0
            gradient = tl.load(grad_ptr + offsets)
            now = gradient.to(tl.float32)
            master = tl.load(master_ptr + offsets, mask=used, other=0.0)
        else:
            used = pending
            master = tl.load(master_ptr + offsets)
        exp_avg = tl.load(exp_avg_ptr + offsets, mask=used, other=0.0)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=used, other=0.0)
        steps = tl.zeros([TILE], tl.int32)
        if MEAN:
            steps = tl.load(steps_ptr + channel)
        drift = tl.zeros([TILE], tl.float32)

        for i in tl.static_range(WINDOWS):
            edge = windows_ptr + (block * WINDOWS + i) * 2
            first, last = tl.load(edge), tl.load(edge + 1)
            total = tl.zeros([TILE], tl.float32)
            past = first
            while past <= last:
                slot = ring_ptr + (past % SLOTS).to(tl.int64) * numel
                if COMMIT:
                    kept = tl.load(slot + offsets, mask=pending & (past != call), other=0.0).to(tl.float32)
                    grad = tl.where(past == call, now, kept) * tl.load(clip_ptr + past)
                else:
                    grad = tl.load(slot + offsets, mask=pending, other=0.0).to(tl.float32) * tl.load(clip_ptr + past)
                if MEAN:
                    total += grad
                else:
                    lr = tl.load(lr_ptr + past) * lr_scale
                    direction, master, exp_avg, exp_avg_sq = _adamw(
                        due, grad, lr, tl.load(bias1_ptr + past), tl.load(bias2_ptr + past), master, exp_avg, exp_avg_sq,
                        deferred_new1, keep2, new2, eps, weight_decay,
                    )  # fmt: skip
                    drift = lr * direction
                past += 1
            if MEAN:
                inside = deferred & (first <= last)
                steps += inside.to(tl.int32)
                lr = tl.load(lr_ptr + tl.maximum(last, 0)) * lr_scale
                n = tl.maximum(steps, 1)
                grad = total / tl.maximum(last - first + 1, 1).to(tl.float32)
                direction, master, exp_avg, exp_avg_sq = _adamw(
                    inside, grad, lr, tl.load(bias1_ptr + n), tl.load(bias2_ptr + n), master, exp_avg, exp_avg_sq,
                    deferred_new1, keep2, new2, eps, weight_decay,
                )  # fmt: skip
                drift = tl.where(inside, lr * direction, drift)
            if COMMIT:
                plain = (last == call) & ((flags & 4) != 0)
                drift = tl.where(plain, 0.0, drift * tl.load(lookahead_ptr + block))

        if COMMIT:
            if MEAN:
                n = steps + 1
            else:
                n = call
            clip, lr = tl.load(clip_ptr + call), tl.load(lr_ptr + call)
            direction, master, exp_avg, exp_avg_sq = _adamw(
                on, now * clip, lr, tl.load(bias1_ptr + n), tl.load(bias2_ptr + n), master, exp_avg, exp_avg_sq,
                new1, keep2, new2, eps, weight_decay,
            )  # fmt: skip
            tl.store(master_ptr + offsets, master, mask=used)
            tl.store(exp_avg_ptr + offsets, exp_avg, mask=used)
            tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=used)
            published = tl.where(on, master, master - drift).to(out_ptr.dtype.element_ty)
            before = tl.load(out_ptr + offsets, mask=used, other=0.0)
            tl.store(out_ptr + offsets, tl.where(active, published, before), mask=used)
            if SLOTS > 0:
                tl.store(ring_ptr + (call % SLOTS).to(tl.int64) * numel + offsets, gradient)
        else:
            tl.store(out_ptr + offsets, master.to(out_ptr.dtype.element_ty))


def update_triton(
    state: State, layout: Layout, hyper: Hyper, call: int, windows: Tensor, lookahead: Tensor | None, out: Tensor, commit: bool
) -> None:
    """As `update_torch`; fp32 state."""
    beta1, beta2 = hyper.betas
    _update[(layout.numel // layout.tile,)](
        state.grad, state.master, state.exp_avg, state.exp_avg_sq, out, state.ring, state.flags, state.steps,
        layout.tiles, windows, state.lr if lookahead is None else lookahead, state.lr, state.clip, state.bias[0], state.bias[1],
        call, layout.numel, state.method.deferred_lr_scale,
        1 - state.deferred_beta1(call, beta1), 1 - beta1, beta2, 1 - beta2, hyper.eps, hyper.weight_decay,
        SLOTS=state.method.slots, WINDOWS=windows.shape[1], MEAN=state.method.rule == "mean", COMMIT=commit, TILE=layout.tile,
    )  # fmt: skip


BACKENDS = {"torch": update_torch, "triton": update_triton}
