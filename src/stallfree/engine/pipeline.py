"""One training step, in the order data flows: gradients -> slots -> host -> publish -> weights.

The order inside a call is DESIGN's: judge the gradients, publish what is due and install arriving channels, update residents
and selected channels, close windows. Nothing here decides by timing; waiting is the only thing that timing may cause.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from stallfree.config import ZenFlowConfig
from stallfree.engine import weights
from stallfree.engine.blocks import build_blocks, classify
from stallfree.engine.device import ResidentState
from stallfree.engine.gradient import Staged, StagedGradient
from stallfree.engine.host import HostWorker, host_cores
from stallfree.engine.schedule import Clock, slots_needed
from stallfree.engine.transfer import Link
from stallfree.engine.window import BlockState, CallRecord, CollectedCall, WeightState, Window, written
from stallfree.kernels import host_kernel
from stallfree.kernels.device import Hyper, TorchDevice
from stallfree.kernels.replay import ReplayJob
from stallfree.telemetry.meter import Meter

Hypers = dict[nn.Parameter, Hyper]


class Engine:
    """Everything behind `ZenFlowAdamW`. Owns the state of all parameters; knows the optimizer only through two callbacks."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        config: ZenFlowConfig,
        read_hypers: Callable[[], Hypers],
        read_name: Callable[[nn.Parameter], str],
    ) -> None:
        self.config, self.read_hypers, self.read_name = config, read_hypers, read_name
        self.device = named[0][1].device
        self.kernel = TorchDevice()
        self.link = Link(self.device)
        threads, cores = host_cores(config, on_gpu=self.device.type != "cpu")
        self.worker = HostWorker(host_kernel(config.host_kernel, threads, cores), config.overlap_step)
        self.clock = Clock.of(config)
        self.meter = Meter(self.link)
        self.residents: dict[nn.Parameter, ResidentState] = {}
        self.weights: dict[nn.Parameter, WeightState] = {}
        self.blocks: list[BlockState] = []
        self.resident_seen: dict[nn.Parameter, tuple[int, int]] = {}
        self.paused: str | None = None  # why step() is refused now
        self.failed: BaseException | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._records: Tensor | None = None
        self._process = os.getpid()
        self.adopt(named)

    # Construction

    def adopt(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Take parameters under management: at construction, with a new group, or when a frozen one starts to train."""
        residents, split = classify(named, self.config, first_key=len(self.weights))
        for resident in residents:
            self.residents[resident.param] = ResidentState(resident)
            self.resident_seen[resident.param] = written(resident.param)
        engine = weakref.ref(self)
        for weight in split:
            state = self.weights[weight.param] = WeightState(weight, self.kernel, self.link, self.config)

            def arrived(param: Tensor, state: WeightState = state) -> None:
                if (alive := engine()) is not None:
                    alive.on_gradient(state)

            self._hooks.append(weight.param.register_post_accumulate_grad_hook(arrived))
        for block in build_blocks(split, self.config):
            self.blocks.append(BlockState(block, [self.weights[weight.param] for weight in block.weights]))
        # Records of earlier calls keep the memory they were written to.
        self._records = self.link.host_empty((slots_needed(self.config) + 1, 1 + len(self.weights)), torch.float32)

    @property
    def delay(self) -> Callable[[str], None] | None:
        """Called at the worker, at copies and in hooks: a place for tests to lose time in."""
        return self.link.delay

    @delay.setter
    def delay(self, sleep: Callable[[str], None] | None) -> None:
        self.link.delay = self.worker.delay = sleep

    # Gradients -> slots

    @torch.no_grad()
    def on_gradient(self, state: WeightState) -> None:
        """After each accumulation into a weight's `.grad`: stage it, if no further pass is expected before the next call."""
        if self.delay:
            self.delay("hook")
        param = state.weight.param
        if isinstance(param.grad, StagedGradient):
            state.passes_seen += 1  # it was added to what is staged already
            return
        if state.staged is not None:  # zero_grad() discarded it
            self._discard(state)
        state.passes_seen += 1
        if state.passes_seen >= (state.passes_expected or 1) and param.grad is not None:
            self._stage(state, param.grad)

    def _discard(self, state: WeightState) -> None:
        if state.early is not None:
            raise RuntimeError(
                f"the gradient of {state.weight.name} was discarded after its update had begun: update_in_backward (preset "
                "stronghold) cannot take an update back; call step() after every backward, or use preset zero-offload"
            )
        state.staged, state.passes_seen = None, 0

    def _stage(self, state: WeightState, grad: Tensor) -> None:
        """Replace a gradient by a handle: selected rows stay on the device, deferred rows go down to the next call's slot."""
        weight = state.weight
        check_gradient(weight.param, grad, lambda: weight.name)
        if weight.param.data_ptr() != state.seen[0]:
            weights.check_unmoved(self, weight.param)
        staged = Staged(weight, self.clock.call + 1, self)
        split = state.selected.split
        staged.squares, staged.selected, deferred = self.kernel.split(weight.rows_of(grad), split.selected, split.deferred)
        state.slots.fill(staged.call, deferred, self.link)
        state.staged = staged
        weight.param.grad = StagedGradient(staged)
        if self.config.update_in_backward and state.passes_expected is not None:
            self._replay_early(state, staged)

    def _replay_early(self, state: WeightState, staged: Staged) -> None:
        if written(state.weight.param) != state.seen:
            weights.notice_writes(self)
        hyper = self.read_hypers()[state.weight.param]

        def work() -> None:
            out = state.slots.rows(staged.call, len(state.host.deferred))
            self.worker.kernel.replay(state.host.job([state.gradient(staged.call, hyper, 1.0)], 0.0, out))

        state.early = self.worker.submit(state.weight.name, work)

    def restage(self, staged: Staged, grad: Tensor) -> None:
        """Another backward pass adds to a staged gradient, in the gradient's dtype, as `.grad += grad` would."""
        state = self.weights[staged.weight.param]
        if staged.consumed and not staged.zero:
            raise RuntimeError(
                f"the gradient of {staged.weight.name} was applied by step() already; call zero_grad() after step()"
            )
        if state.early is not None:
            self._refuse_change(staged)
        if staged.zero:
            total = grad.clone()
        else:
            self.meter.restages += 1
            total = self.full_gradient(staged) + grad
        split = state.selected.split
        staged.squares, staged.selected, deferred = self.kernel.split(
            staged.weight.rows_of(total), split.selected, split.deferred
        )
        staged.factor, staged.zero, staged.consumed, staged.call = None, False, False, self.clock.call + 1
        state.slots.fill(staged.call, deferred, self.link)
        state.staged = staged

    def check_scalable(self, staged: Staged) -> None:
        if self.config.update_in_backward:
            self._refuse_change(staged)

    def _refuse_change(self, staged: Staged) -> NoReturn:
        raise RuntimeError(
            f"the gradient of {staged.weight.name} cannot be changed: update_in_backward (preset stronghold) starts "
            "its update during backward. Clipping, scaling and a varying number of backward passes need preset zero-offload"
        )

    def full_gradient(self, staged: Staged) -> Tensor:
        """The plain gradient of a handle: a device tensor of the parameter's shape. Waits for its copy."""
        state = self.weights[staged.weight.param]
        if staged.zero:
            return torch.zeros_like(staged.weight.param)
        if staged.consumed or state.early is not None:
            raise RuntimeError(f"the gradient of {staged.weight.name} was applied already; read it between backward and step()")
        full = torch.empty_like(staged.weight.param, memory_format=torch.contiguous_format)
        rows, split = staged.weight.rows_of(full), state.selected.split
        state.slots.wait(staged.call)
        rows.index_copy_(0, split.selected, staged.selected)
        rows.index_copy_(0, split.deferred, self.link.up(state.slots.rows(staged.call, len(split.deferred))))
        return full if staged.factor is None else full.mul_(staged.factor)

    # One call

    @torch.no_grad()
    def step(self) -> None:
        self.check_usable()
        hypers = self.read_hypers()
        self._collect_gradients(hypers)
        weights.notice_writes(self)
        self.clock.tick(max(hyper.lr for hyper in hypers.values()))
        try:
            self._update(hypers)
        except BaseException as error:
            self.failed = error
            raise

    def _update(self, hypers: Hypers) -> None:
        dense = {param: param.grad for param in self.residents if param.grad is not None}
        staged = {state.weight.param: state.staged for state in self.weights.values() if state.staged is not None}
        skip, clip, record = self._judge(dense, staged)
        for block in self.blocks:
            self._publish_due(block)
        for param, grad in dense.items():
            self.residents[param].step(self.kernel, grad, hypers[param], clip, skip)
        for param, gradient in staged.items():
            half = self.weights[param].selected
            half.score_gradient(gradient.scaled_squares(), skip)
            half.step(gradient.selected, hypers[param], clip if gradient.factor is None else clip * gradient.factor, skip)
        for block in self.blocks:
            self._collect(block, record, hypers)
            if block.schedule.closes(self.clock):
                self._close(block)
        for block in self.blocks:
            self._publish_due(block)
        self._finish_call()

    def _collect_gradients(self, hypers: Hypers) -> None:
        """Make `.grad` and what is staged agree; refuse what cannot be used before anything changes."""
        newcomers = []
        for param in hypers:
            grad = param.grad
            if grad is None or isinstance(grad, StagedGradient):
                continue
            check_gradient(param, grad, partial(self.read_name, param))
            if param not in self.weights and param not in self.residents:
                newcomers.append((self.read_name(param), param))
        if newcomers:  # frozen at construction, trained now
            self.adopt(newcomers)
        for param, state in self.weights.items():
            grad = param.grad
            if isinstance(grad, StagedGradient) and grad.staged.consumed and not grad.staged.zero:
                raise RuntimeError(
                    f"the gradient of {state.weight.name} was applied by the last step(): call zero_grad(), then backward"
                )
        for param, state in self.weights.items():
            grad = param.grad
            if grad is None:
                if state.staged is not None:
                    self._discard(state)
            elif not isinstance(grad, StagedGradient):
                self._stage(state, grad)
            elif grad.staged.zero:
                self._stage(state, torch.zeros_like(param))

    def _judge(
        self, dense: dict[nn.Parameter, Tensor], staged: dict[nn.Parameter, Staged]
    ) -> tuple[Tensor, Tensor, CallRecord]:
        """Norm, skip flag and clip factor of this call, on the device; and the host's copy of what it needs of them."""
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in dense.values()]
        norms += [gradient.norm() for gradient in staged.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self.device)
        finite = torch.isfinite(norm)
        skip = torch.zeros_like(finite) if self.config.update_in_backward else ~finite
        clip = torch.ones_like(norm)
        if self.config.max_grad_norm is not None:
            clip = torch.where(finite, (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0), clip)
        values = clip.repeat(1 + len(self.weights))
        values[0] = skip
        for param, gradient in staged.items():
            if gradient.factor is not None:
                values[1 + self.weights[param].weight.key] *= gradient.factor
        assert self._records is not None
        slot = self._records[self.clock.call % len(self._records)]
        self.meter.judge(
            norm,
            skip,
            [
                (self.weights[param].weight, g.squares, self.weights[param].selected.split.deferred)
                for param, g in staged.items()
            ],
        )
        return skip, clip, CallRecord(slot, self.link.down(values, slot))

    def _collect(self, block: BlockState, record: CallRecord, hypers: Hypers) -> None:
        present = tuple(hypers[state.weight.param] if state.staged is not None else None for state in block.weights)
        block.open.append(CollectedCall(self.clock.call, record, present))
        block.schedule.collect()

    # Slots -> host

    def _close(self, block: BlockState) -> None:
        selects = block.schedule.wants_selection(self.clock, self.config.select_interval)
        due = block.schedule.close(self.clock, self.config.lag)
        lookahead = self.config.lookahead_at(block.schedule.interval)
        window = Window(block.open, due, lookahead, [state.selected.installed.deferred for state in block.weights])
        block.open = []
        if selects:
            self._select(block, window)
        for place, state in enumerate(block.weights):
            if state.early is not None:
                window.jobs.append(state.early)
                state.early = None
            else:
                window.jobs.append(self._replay(state, window, place))
        block.queue.append(window)

    def _select(self, block: BlockState, window: Window) -> None:
        block.schedule.last_selection = self.clock.call
        for state in block.weights:
            if state.weight.selected_count:
                state.selected.select()
        if window.due > self.clock.call + 1:  # rounds only (lag > 1): whether anyone moves decides when the window is due
            for state in block.weights:
                if state.selected.handover is not None and not bool(state.selected.handover.moved.any()):
                    state.selected.handover = None
        window.hands_over = any(state.selected.handover is not None for state in block.weights)
        if window.hands_over:  # who moves must be there when the next call updates on the device
            window.due = min(window.due, self.clock.call + 1)

    def _replay(self, state: WeightState, window: Window, place: int) -> Future[None]:
        def work() -> None:
            out = state.slots.rows(window.calls[0].call, len(state.host.deferred))
            self.worker.kernel.replay(state.host.job(tuple(state.gradients(window.calls, place)), window.lookahead, out))

        return self.worker.submit(state.weight.name, work)

    # Host -> publish -> weights

    def _publish_due(self, block: BlockState) -> None:
        """In order; a window that is due takes earlier ones with it."""
        last = max((place for place, window in enumerate(block.queue) if window.due <= self.clock.call), default=-1)
        for _ in range(last + 1):
            window = block.queue.pop(0)
            self.wait(window)
            for place, state in enumerate(block.weights):
                if place not in window.dropped:
                    values = self.link.up(state.slots.rows(window.calls[0].call, len(window.deferred[place])))
                    self.kernel.scatter(state.weight.rows, window.deferred[place], values)
            if window.hands_over:
                self.install(block)

    def run(self, state: WeightState, job: ReplayJob) -> None:
        """Do one job now, after whatever the worker has still to do."""
        self.worker.submit(state.weight.name, lambda: self.worker.kernel.replay(job)).result()

    def wait(self, window: Window) -> None:
        start = time.perf_counter()
        for job in window.jobs:
            job.result()
        self.meter.stall_seconds += time.perf_counter() - start

    def install(self, block: BlockState) -> None:
        """Move the state of leaving channels to the host and of arriving ones to the device, and show their plain masters."""
        for state in block.weights:
            half, host = state.selected, state.host
            if half.handover is None:
                continue
            split, moved = half.handover
            places = moved.nonzero().flatten()
            arriving = self.link.fetch(split.selected[places])
            if half.installed.selected.numel():
                leaving = self.link.fetch(half.installed.selected[places])
                for ours, theirs in state.halves():
                    theirs[leaving] = self.link.fetch(ours[places]).to(theirs.dtype)
            for ours, theirs in state.halves():
                ours[places] = self.link.send(theirs[arriving].to(ours.dtype))
            half.installed, half.handover = split, None
            host.deferred = self.link.fetch(split.deferred)
            self.kernel.scatter(state.weight.rows, split.selected[places], half.master[places])

    def _finish_call(self) -> None:
        for state in self.weights.values():
            if state.passes_seen:
                state.passes_expected = state.passes_seen
            state.passes_seen = 0
            if state.staged is not None:
                state.staged.consumed = True
                del state.staged.selected
                state.staged = None
            state.restored = None
        self.mark_written()
        self.meter.finish_call()

    def mark_written(self) -> None:
        """What the weights hold now was written by this engine."""
        for param, state in self.weights.items():
            state.seen = written(param)
        for param in self.residents:
            self.resident_seen[param] = written(param)

    # Refusals and the end

    def check_usable(self) -> None:
        if self.failed is not None:
            raise RuntimeError(
                "an earlier step failed, and the optimizer's state is not whole; resume from a checkpoint"
            ) from self.failed
        if self.paused is not None:
            raise RuntimeError(self.paused)

    def refuse_early(self, what: str) -> None:
        if any(state.early is not None for state in self.weights.values()):
            raise RuntimeError(
                f"{what} between backward and step() is not possible with update_in_backward; call it after step()"
            )

    def close(self) -> None:
        """Finish host work, end the threads, remove the hooks. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        while self._hooks:
            self._hooks.pop().remove()
        self.worker.close()
        self.link.close()
        self.paused = "the optimizer was closed"


def check_gradient(param: Tensor, grad: Tensor, name: Callable[[], str]) -> None:
    """Refuse a gradient that cannot be staged."""
    if grad.layout != torch.strided:
        raise TypeError(
            f"the gradient of {_label(param, name())} is {grad.layout}; only dense ones work (nn.Embedding(sparse=False))"
        )
    if grad.shape != param.shape:
        raise RuntimeError(
            f"{_label(param, name())} was resized after the optimizer was built; build the optimizer after resizing the model"
        )


def _label(param: Tensor, name: str) -> str:
    return name or f"a parameter of shape {tuple(param.shape)}"
