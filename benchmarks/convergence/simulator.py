"""The update rule on the device, for several runs at once: exact, but with nothing offloaded.

Every run has its own method and learning rates. Masters, moments and gradients of all parameters are flat buffers; deferral
is a flag per channel, a ring of past gradients and a table of windows. The weights that forward reads are those the engine
would publish, call by call (tests/benchmarks/test_convergence_simulator.py compares them with the executable rule). Left out:
skipped calls and parameters without a gradient. A non-finite gradient ends a run as diverged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import Layout
from .rule import Method, Schedule
from .update import BACKENDS, DEFERRED, SELECTED, STAYS, Hyper, State


class Simulator:
    def __init__(
        self,
        layout: Layout,
        master: Tensor,
        methods: Sequence[Method],
        lrs: Sequence[Tensor],
        *,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "torch",
        hyper: Hyper | None = None,
    ) -> None:
        """master: [numel] where all runs start, in the dtype of the optimizer's state; lrs: one `[calls + 1]` for each method;
        dtype: of weights and gradients."""
        runs, numel, calls, device = len(methods), layout.numel, len(lrs[0]) - 1, master.device
        self.layout, self.methods, self.hyper, self.call = layout, methods, hyper or Hyper(), 0
        self.update = BACKENDS[backend]
        self.schedules = [Schedule(method, layout.blocks, calls, device) for method in methods]
        self.weight = master.to(dtype).repeat(runs, 1)
        self.grad = torch.zeros(runs, numel, dtype=dtype, device=device)
        self.squares = torch.zeros(runs, layout.channels, dtype=master.dtype, device=device)
        """Squared gradient norm of every channel at the last call."""
        self.score = torch.zeros_like(self.squares)
        self.selected = torch.zeros(runs, layout.channels, dtype=torch.bool, device=device)
        for run, method in enumerate(methods):
            for group in layout.groups:
                self.selected[run, group.channels] = group.shape.resident or method.synchronous
        self.before = self.selected.clone()
        """The selection while the window that is due next collected."""
        self.deferred_share = torch.zeros(calls + 1, runs, dtype=master.dtype, device=device)
        """rho of every call."""
        self.clip = torch.ones(runs, calls + 1, dtype=master.dtype, device=device)
        counted = torch.arange(calls + 1, dtype=torch.float64)
        bias = torch.stack([1 - beta**counted for beta in self.hyper.betas]).to(self.squares)
        flags = torch.zeros(runs, layout.channels, dtype=torch.uint8, device=device)
        decay = torch.tensor([method.score_decay for method in methods], dtype=master.dtype, device=device)
        self.score_decay = decay[:, None]
        self.states = [
            State(
                method=method,
                master=master.clone(),
                exp_avg=torch.zeros_like(master),
                exp_avg_sq=torch.zeros_like(master),
                weight=self.weight[run],
                grad=self.grad[run],
                ring=torch.zeros(method.slots, numel, dtype=dtype, device=device),
                flags=flags[run],
                steps=torch.zeros(layout.channels, dtype=torch.int32, device=device),
                lr=lrs[run].to(master),
                clip=self.clip[run],
                bias=bias,
            )
            for run, method in enumerate(methods)
        ]
        self.block_of_channel = torch.empty(layout.channels, dtype=torch.long, device=device)
        for group in layout.groups:
            blocks = torch.tensor(group.blocks, device=device)
            self.block_of_channel[group.channels] = blocks.repeat_interleave(group.shape.channels)
        for run in range(runs):
            self._set_flags(run, self.selected[run])

    def step(self) -> None:
        """One `optimizer.step()` of every run with the gradients in `self.grad`."""
        self.call += 1
        self._measure()
        for run, (state, schedule) in enumerate(zip(self.states, self.schedules, strict=True)):
            selecting = schedule.selecting.get(self.call)
            after = self._choose(run, selecting) if selecting else self.selected[run]
            if selecting:
                self._set_flags(run, after)
            windows = schedule.due[self.call]
            self.update(state, self.layout, self.hyper, self.call, windows, schedule.lookahead[self.call], state.weight, True)
            if state.method.rule == "mean":
                self._count_steps(state, windows)
            if selecting or self.call - 1 in schedule.selecting:
                at_once = selecting and schedule.publishes_in_its_call(self.call)
                self.before[run] = after if at_once else self.selected[run]
                self.selected[run] = after
                self._set_flags(run, after)

    def exact(self) -> Tensor:
        """[runs, numel] the weights a flush would leave, without flushing."""
        out = torch.empty_like(self.weight)
        for run, state in enumerate(self.states):
            windows = self.schedules[run].outstanding(self.call)
            self.update(state, self.layout, self.hyper, self.call, windows, None, out[run], False)
        return out

    def _measure(self) -> None:
        """Channel norms, scores, clipping factors and rho of this call, of all runs at once."""
        for group in self.layout.groups:
            axis = 3 if group.shape.by_row or group.shape.resident else 2
            view = self.layout.view(self.grad, group)
            norms = torch.linalg.vector_norm(view, dim=axis, dtype=self.squares.dtype)
            self.squares[:, group.channels] = norms.square().flatten(1)
        self.score.mul_(self.score_decay).add_(self.squares * (1 - self.score_decay))
        total = self.squares.sum(1)
        self.clip[:, self.call] = (self.hyper.max_grad_norm / (total.sqrt() + 1e-6)).clamp(max=1)
        self.deferred_share[self.call] = (self.squares * ~self.selected).sum(1) / total

    def _choose(self, run: int, blocks: list[int]) -> Tensor:
        """[channels] the selection after these blocks chose anew; ties go to the lowest index."""
        chosen = self.selected[run].clone()
        for group in self.layout.groups:
            members = [i for i, block in enumerate(group.blocks) if block in blocks]
            if not members:
                continue
            channels = group.shape.channels
            index = torch.tensor(members, device=chosen.device)
            score = self.score[run, group.channels].view(group.count, channels)[index]
            top = score.argsort(dim=1, descending=True, stable=True)[:, : round(self.methods[run].topk_ratio * channels)]
            mask = torch.zeros_like(score, dtype=torch.bool).scatter_(1, top, True)
            chosen[group.channels].view(group.count, channels)[index] = mask
        return chosen

    def _set_flags(self, run: int, after: Tensor) -> None:
        bits = self.selected[run] * SELECTED + ~self.before[run] * DEFERRED + after * STAYS
        self.states[run].flags.copy_(bits)

    def _count_steps(self, state: State, windows: Tensor) -> None:
        due = (windows[:, 0, 0] <= windows[:, 0, 1])[self.block_of_channel] & ((state.flags & DEFERRED) != 0)
        state.steps += due.int() + ((state.flags & SELECTED) != 0).int()
