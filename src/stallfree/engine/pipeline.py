"""One training step, in the order data flows: gradients -> slots -> host -> publish -> weights.

The order inside a call is the update rule's: judge the gradients, publish what is due and install arriving channels, update
residents and selected channels, close windows. Nothing here decides by timing; waiting is the only thing that timing may cause.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from stallfree import planner
from stallfree.config import ZenFlowConfig
from stallfree.engine import weights
from stallfree.engine.blocks import Block, Resident, build_blocks, check_trainable, classify
from stallfree.engine.channels import Channels
from stallfree.engine.device import Layouts, SelectedState
from stallfree.engine.host import HostWorker, Task, host_cores
from stallfree.engine.residents import ResidentGroup, ResidentState, resident_groups
from stallfree.engine.schedule import Clock, publishing_calls, slots_needed
from stallfree.engine.staging import Staging, label
from stallfree.engine.transfer import HostWork, link_to
from stallfree.engine.uninterrupted import uninterrupted
from stallfree.engine.window import BlockState, CallRecord, CollectedCall, WeightState, Window, Written, written
from stallfree.kernels import block_kernel, host_kernel
from stallfree.kernels.device import Hyper
from stallfree.kernels.replay import ReplayJob
from stallfree.telemetry.meter import Meter

Hypers = dict[nn.Parameter, Hyper]
_open: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines that have not been closed


class Engine:
    """Everything behind `ZenFlowAdamW`. Owns the state of all parameters; knows the optimizer only through two callbacks."""

    def __init__(
        self,
        device: torch.device,
        config: ZenFlowConfig,
        read_hypers: Callable[[], Hypers],
        read_name: Callable[[nn.Parameter], str],
    ) -> None:
        self.device, self.config, self.read_hypers, self.read_name = device, config, read_hypers, read_name
        self.kernel = block_kernel(self.device)
        self.link = link_to(self.device, config)
        threads, cores = host_cores(config, on_gpu=self.device.type != "cpu")
        self.worker = HostWorker(host_kernel(config.host_kernel, threads, cores), config.overlap_step, self.link)
        self.clock = Clock.of(config)
        self.meter = Meter(self.link)
        self.channels = Channels(self.device)
        self.staging = Staging(self)
        self.residents: dict[nn.Parameter, ResidentState] = {}
        self.weights: dict[nn.Parameter, WeightState] = {}
        self.blocks: list[BlockState] = []
        self.managed: dict[nn.Parameter, int] = {}  # place in `seen`
        self.seen: list[Written] = []  # when this engine wrote last
        self.exact_at = 0  # the call after which the weights were those of a flush
        self.paused: str | None = None  # why step() is refused now
        self.failed: BaseException | None = None
        self.closed = False
        self.groups: list[ResidentGroup] = []
        self._layouts: Layouts = {}
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._records: tuple[Tensor, Tensor] | None = None  # by call: skip flag and factors; on the device, the host
        self._process = os.getpid()
        self._lock = threading.RLock()
        _open.add(self)

    # Construction

    def adopt(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Take parameters under management: at construction, with a new group, or when a frozen one starts to train.

        Raises:
            TypeError, ValueError, MemoryError, RuntimeError: before anything is changed.
        """
        self.check_joining(named)
        residents, split = classify(named, self.config, first_key=len(self.weights))
        for resident in residents:
            if not resident.contiguous and resident.param.dim() > 1 and resident.param.numel() >= self.config.min_numel:
                warnings.warn(
                    f"{resident.name or tuple(resident.shape)} is not contiguous and is updated whole on the device, "
                    "for 12 bytes per element; call .contiguous() on it before building the optimizer",
                    stacklevel=2,
                )
        self.take(resident_groups(residents), build_blocks(split, self.config))

    def check_joining(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Refuse more parameters that cannot be trained, or not here, or that there is no memory for."""
        check_trainable(named, self.device)
        planner.check_fits(planner.plan(named, self.config))

    def take(self, residents: Sequence[Sequence[Resident]], blocks: Sequence[Block]) -> None:
        """The same, with residents and weights grouped already, and the weights' keys in the order of the blocks."""
        groups = [ResidentGroup(group, self.kernel) for group in residents]
        split = [weight for block in blocks for weight in block.weights]
        self.groups.extend(groups)
        self.residents.update({state.resident.param: state for group in groups for state in group.states})
        if split:
            self.channels.extend(split)
        halves = [SelectedState(block, self.channels, self.kernel, self._layouts) for block in blocks]
        self.link.reserve([half.copied_bytes for half in halves], publishing_calls(self.config))
        for block, half in zip(blocks, halves, strict=True):
            self.blocks.append(BlockState(block, half, self.link, self.config))
            self.weights.update({state.weight.param: state for state in self.blocks[-1].weights})
        trained = [*(resident.param for group in residents for resident in group), *(weight.param for weight in split)]
        self._take_over(trained)
        for param in trained:
            self.managed[param] = len(self.seen)
            self.seen.append(written(param))
        staging = weakref.ref(self.staging)
        for weight in split:

            def arrived(param: Tensor, state: WeightState = self.weights[weight.param]) -> None:
                if (alive := staging()) is not None:
                    alive.on_gradient(state)

            trains = weight.param.requires_grad
            self._hooks.append(weight.param.requires_grad_().register_post_accumulate_grad_hook(arrived))
            weight.param.requires_grad_(trains)  # torch refuses hooks of frozen parameters, but keeps them
        # Records of earlier calls keep their memory. A row is used again when its call's windows have been published.
        shape = (slots_needed(self.config) + 1, 1 + len(self.weights))
        on_device = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._records = (on_device, self.link.host_empty(shape, torch.float32))

    @property
    def delay(self) -> Callable[[str], None] | None:
        """Called at the worker, at copies and in hooks: a place for tests to lose time in."""
        return self.link.delay

    @delay.setter
    def delay(self, sleep: Callable[[str], None] | None) -> None:
        self.link.delay = self.worker.delay = sleep

    def uninterrupted(self) -> AbstractContextManager[None]:
        """Whatever reads or changes state between calls does so inside."""
        return uninterrupted(self._lock)

    # One call

    @torch.no_grad()
    def step(self) -> None:
        self.check_usable()
        hypers = self.read_hypers()
        self.staging.collect(hypers)
        weights.notice_writes(self)
        weights.refuse_steady_writes(self)
        self.clock.tick(max(hyper.lr for hyper in hypers.values()))
        try:
            with self.link.device_guard():
                self._update(hypers)
        except BaseException as error:
            self.failed = error
            raise

    def _update(self, hypers: Hypers) -> None:
        dense = [[resident.param.grad for resident in group.residents] for group in self.groups]
        skip, clip, factors, record = self._judge([grad for grads in dense for grad in grads if grad is not None])
        for block in self.blocks:
            self._publish_due(block)
        clips = clip.repeat(max((len(grads) for grads in dense), default=0))
        for group, grads in zip(self.groups, dense, strict=True):
            group.step(grads, [hypers.get(resident.param) for resident in group.residents], clips, skip)
        closing: list[tuple[BlockState, Window]] = []
        for block in self.blocks:
            present = tuple(hypers[state.weight.param] if state.staged is not None else None for state in block.weights)
            first = block.weights[0].weight.key
            block.half.step(present, factors[first : first + len(present)], skip)
            block.open.append(CollectedCall(self.clock.call, record, block.slots.arrival(self.clock.call), present))
            if block.schedule.closes(self.clock):
                closing.append((block, self._close(block)))
        self._replay(closing)
        for block, _ in closing:
            self._publish_due(block)
        self._finish_call()

    def _judge(self, dense: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, CallRecord]:
        """Skip flag and clip factor of this call, and by weight what its gradient is multiplied by, all on the device.

        dense: the gradients of residents. The record is the host's copy of what it needs to know.
        """
        channels = self.channels
        staged = [state.staged for state in self.weights.values() if state.staged is not None]
        present = tuple(gradient.weight.key for gradient in staged)
        scales = self._scales()
        parts = [torch.stack(torch._foreach_norm(dense, 2, torch.float32))] if dense else []
        if staged:
            norms = channels.norms() if scales is None else channels.norms() * scales.abs()
            some = len(staged) < len(self.weights)
            parts.append(torch.where(channels.masks(present)[0], norms, 0.0) if some else norms)
        norm = torch.linalg.vector_norm(torch.cat(parts)) if parts else torch.zeros((), dtype=torch.float32, device=self.device)
        finite = torch.isfinite(norm)
        skip = torch.zeros_like(finite) if self.config.update_in_backward else ~finite
        clip = self._one
        if self.config.max_grad_norm is not None:
            clip = torch.where(finite, (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0), clip)
        factors = clip if scales is None else clip * scales
        assert self._records is not None
        values, slot = (records[self.clock.call % len(records)] for records in self._records)
        torch.cat([skip.float().view(1), factors.expand(len(self.weights))], out=values)
        if staged and self.config.topk_ratio:
            channels.update_scores(scales, present, self.config.score_decay, skip)
        self.meter.judge(norm, skip, [gradient.weight for gradient in staged], channels)
        return skip, clip, values[1:], CallRecord(slot, self.link.down(values, slot))

    def _scales(self) -> Tensor | None:
        """What user code multiplied gradients by: a scalar where it is one number for all, else `[weights]`."""
        factors = [None if state.staged is None else state.staged.factor for state in self.weights.values()]
        distinct = {id(state.staged.factor): state.staged.factor for state in self.weights.values() if state.staged is not None}
        if all(factor is None for factor in distinct.values()):
            return None
        if len(distinct) == 1:
            return next(iter(distinct.values()))
        return torch.stack([self._one if factor is None else factor for factor in factors])

    def _finish_call(self) -> None:
        for block in self.blocks:
            block.expect()
            for state in block.weights:
                if state.passes_seen:
                    state.passes_expected = state.passes_seen
                    state.passes_seen = 0
                if state.staged is not None:
                    state.staged.consumed = True
                    state.staged = None
                state.restored = None
        self.mark_written()
        self.meter.finish_call()

    # Slots -> host

    def _close(self, block: BlockState) -> Window:
        selects = block.schedule.wants_selection(self.clock, self.config.select_interval)
        due = block.schedule.close(self.clock, self.config.lag)
        window = Window(block.open, due, self.config.lookahead_at(block.schedule.interval), block.half.installed)
        block.open = []
        if selects:
            self._select(block, window)
        block.queue.append(window)
        return window

    def _select(self, block: BlockState, window: Window) -> None:
        block.schedule.last_selection = self.clock.call
        half = block.half
        if not half.chosen.places:
            return
        half.select()
        assert half.handover is not None
        rounds = window.due > self.clock.call + 1  # lag > 1: whether anyone moves decides when the window is due
        if rounds and not any(bool(moved.any()) for moved in half.handover.moved):
            half.follow(half.installed)
            return
        assert block.exchange is not None
        window.hands_over, window.merge = True, block.exchange.send()
        window.due = min(window.due, self.clock.call + 1)  # who moves must be there when the device updates next

    def _replay(self, closing: Sequence[tuple[BlockState, Window]]) -> None:
        """Give the worker the windows that close in this call, all at once."""
        tasks: list[Task] = []
        for block, window in closing:
            early, block.early = block.early, None
            window.work = HostWork([] if early is None else [early.done], block.flag, block.flag.next() if block.flag else 0)
            block.work = window.work
            states = [state for state in block.weights if early is None or state.place not in early.places]
            work = partial(self._replay_window, window, states)
            tasks.append(Task(label(block), work, window.work.flag, window.work.value))
        for (block, window), done in zip(closing, self.worker.submit(tasks) if tasks else (), strict=True):
            window.work.done.append(done)
            if window.due > self.clock.call:
                source = block.slots.flat(window.calls[0].call, window.division.layout)
                window.ahead = self.link.send_ahead(source, window.work)

    def _replay_window(self, window: Window, states: Sequence[WeightState]) -> None:
        first, layout = window.calls[0].call, window.division.layout
        for state in states:
            gradients = tuple(state.gradients(window.calls, window.division))
            out = state.block.slots.rows(first, layout, state.place)
            self.worker.kernel.replay(state.host.job(gradients, window.lookahead, out))
        if window.merge is not None:
            window.merge()

    def run(self, state: WeightState, job: ReplayJob) -> None:
        """Do one job now, after whatever the worker has still to do."""
        (done,) = self.worker.submit([Task(state.weight.name, lambda: self.worker.kernel.replay(job))])
        done.result()

    # Host -> publish -> weights

    def _publish_due(self, block: BlockState) -> None:
        """In order; a window that is due takes earlier ones with it."""
        last = max((place for place, window in enumerate(block.queue) if window.due <= self.clock.call), default=-1)
        for _ in range(last + 1):
            window = block.queue.pop(0)
            division, calls = window.division, [collected.call for collected in window.calls]
            if len(window.dropped) < len(block.weights):
                params = [None if place in window.dropped else param for place, param in enumerate(block.params)]
                source = block.slots.flat(calls[0], division.layout)
                with self.link.up(source, window.work, window.ahead) as (values, arrived):
                    self.kernel.publish(division.layout, division.targets, params, values)
                block.slots.free(calls, arrived)
            else:
                window.forget()
            if window.hands_over:
                if block.half.handover is not None:
                    assert block.exchange is not None
                    block.exchange.receive(window.work)
                block.half.show()

    def mark_written(self) -> None:
        """What the weights hold now was written by this engine."""
        for param, place in self.managed.items():
            seen = self.seen[place]
            if seen.moved(param):
                self.seen[place] = written(param)
            else:
                seen.version = param._version

    # Refusals and the end

    def check_usable(self) -> None:
        if self.failed is not None:
            raise RuntimeError(
                "an earlier step failed, and the optimizer's state is not whole; resume from a checkpoint"
            ) from self.failed
        if self.paused is not None:
            raise RuntimeError(self.paused)
        if self.worker.error is not None:
            self.failed = self.worker.error
            raise self.worker.error

    def check_unmoved(self, param: nn.Parameter) -> None:
        """Refuse a gradient of a parameter that is another one than it was."""
        if self.seen[self.managed[param]].moved(param):
            weights.check_unmoved(self, param)

    def refuse_early(self, what: str) -> None:
        if any(block.early is not None for block in self.blocks):
            raise RuntimeError(
                f"{what} between backward and step() is not possible with update_in_backward; call it after step()"
            )

    def _take_over(self, params: Sequence[nn.Parameter]) -> None:
        """Close other optimizers of these parameters: of two, each would take gradients that are for the other."""
        for other in list(_open):
            if other is not self and other.belongs_here and any(param in other.managed for param in params):
                other.close("the optimizer was closed when a newer ZenFlowAdamW took over its parameters")

    @property
    def belongs_here(self) -> bool:
        """Whether this process built it: a forked child has the memory, but no threads."""
        return os.getpid() == self._process

    def close(self, why: str = "the optimizer was closed") -> None:
        """Finish host work, end the threads, remove the hooks. Idempotent; does nothing in a forked child."""
        if self.closed or not self.belongs_here:
            return
        self.closed = True
        _open.discard(self)
        while self._hooks:
            self._hooks.pop().remove()
        self.worker.close()
        self.link.close()
        self.paused = why
        self.seen.clear()  # memory of a model that may move now
