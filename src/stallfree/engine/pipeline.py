"""One training step, in the order data flows: gradients -> slots -> host -> publish -> weights.

The order inside a call is the update rule's: judge the gradients, publish what is due and install arriving channels, update
residents and selected channels, close windows. Nothing here decides by timing; waiting is the only thing that timing may cause.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from stallfree.config import ZenFlowConfig
from stallfree.engine import joining, weights
from stallfree.engine.channels import Channels
from stallfree.engine.device import Layouts
from stallfree.engine.device_link import link_to
from stallfree.engine.hooks import Hooks
from stallfree.engine.host import HostWorker
from stallfree.engine.judge import Judge
from stallfree.engine.ledger import Ledger
from stallfree.engine.publishing import Publishing
from stallfree.engine.residents import ResidentGroup, ResidentState
from stallfree.engine.schedule import Clock
from stallfree.engine.selected import SelectedGradients
from stallfree.engine.sending import Sending
from stallfree.engine.settings import Hypers, Settings
from stallfree.engine.sharding import Agreement, RankSums, directly
from stallfree.engine.slots import SlotPool, gives_at_close
from stallfree.engine.staging import Staging
from stallfree.engine.tuner import IntervalTuner
from stallfree.engine.uninterrupted import NOWHERE, uninterrupted
from stallfree.engine.window import BlockState, CollectedCall, Early, WeightState, Window
from stallfree.kernels import block_kernel
from stallfree.kernels.block import Update
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.queue import FORKED
from stallfree.kernels.replay import ReplayJob
from stallfree.kernels.windows import Call, HostExchange, WindowWork
from stallfree.telemetry.meter import Meter

FRUITLESS = 3  # calls without a gradient after which somebody should know

logger = logging.getLogger("stallfree")


class Engine:
    """Everything behind `ZenFlowAdamW`. Owns the state of all parameters; knows the optimizer only through three callbacks."""

    def __init__(
        self,
        device: torch.device,
        config: ZenFlowConfig,
        read_settings: Callable[[], Settings],
        read_params: Callable[[], list[nn.Parameter]],
        read_name: Callable[[nn.Parameter], str],
    ) -> None:
        self.device, self.config = device, config
        self.read_settings, self.read_params, self.read_name = read_settings, read_params, read_name
        self.kernel = block_kernel(self.device)
        self.link = link_to(self.device)
        self.worker = HostWorker(config, self.link.host, on_gpu=self.device.type != "cpu")
        self.link.wait_for_host = self.worker.wait
        self.pool = SlotPool(self.link.host_memory)
        self.clock = Clock.of(config)
        self.tuner = IntervalTuner(config)
        self.meter = Meter(self.link)
        self.channels = Channels(self.device)
        self.selected = SelectedGradients(self.link)
        self.sending = Sending(self.link)
        self.staging = Staging(self)
        self.judge = Judge(self)
        self.publishing = Publishing(self.link, self.kernel)
        self.residents: dict[nn.Parameter, ResidentState] = {}
        self.weights: dict[nn.Parameter, WeightState] = {}
        self.ids: list[int] = []  # of these, by key
        self.blocks: list[BlockState] = []
        self.turns = 0  # blocks staged since the last call
        self.ledger = Ledger()  # of all parameters
        self.resident_params: list[nn.Parameter] = []
        self.resident_forms: list[object] = []  # of their gradients
        self.exact_at = 0  # the call after which the weights were those of a flush
        self.paused: str | None = None  # why step() is refused now
        self.written: list[WeightState] = []  # that outside writes have kept from training, until step() refuses them
        self.failed: BaseException | None = None
        self.closed = False
        self.groups: list[ResidentGroup] = []
        self.kinds: list[tuple[str, ...]] = []  # of parameters: of each norm that a call is judged by
        self.layouts: Layouts = {}
        self.sums = RankSums([], device)  # squares of channels, and then the sums of a verdict
        self.agreement = Agreement([])
        self.adamw: Update | None = None  # of all that the device updates; None: to be planned
        on_gradient = weakref.WeakMethod(self.staging.on_gradient)
        self.hooks = Hooks(lambda state: None if (alive := on_gradient()) is None else alive(state))
        self._process = os.getpid()
        self.lock = threading.RLock()  # of whoever stages gradients, or reads or changes state
        joining.OPEN.add(self)

    @property
    def delay(self) -> Callable[[str], float] | None:
        """Asked at the host's work, at copies and in hooks how many seconds to lose: for tests."""
        return self.link.delay

    @delay.setter
    def delay(self, seconds: Callable[[str], float] | None) -> None:
        self.link.delay = seconds

    def lose_time(self, where: str) -> None:
        if self.delay:
            time.sleep(self.delay(where))

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Whatever reads or changes state or weights does so inside, `step()` too."""
        with uninterrupted(self.lock), self.link.device_guard() if self.belongs_here else NOWHERE:
            if self.belongs_here:
                self.link.join_showing()
            yield

    # One call

    @torch.no_grad()
    def step(self) -> None:
        self.check_usable()
        with NOWHERE if self.agreement.mesh is None else directly():
            self._step(*self.read_settings())

    def _step(self, hypers: Hypers, lr: float) -> None:
        self.staging.collect(hypers.keys())
        weights.notice_writes(self)
        weights.refuse_steady_writes(self)
        self.clock.tick(lr)
        try:
            self._update(hypers)
            self.tuner.after_call(self)
            measured = self.clock.warming or self.tuner.measures(self.clock)
            self.worker.keep_pace(self.link.waited(), self.clock.interval, measured)
        except BaseException as error:
            self.failed = error
            raise

    def _update(self, hypers: Hypers) -> None:
        self.link.begin_call(at_once=self.config.lag == 0)
        staged = [gradient for block in self.blocks for gradient in block.staged]
        present = [group.gather() for group in self.groups]
        if self.clock.call == FRUITLESS and not any(map(any, present)) and all(gradient is None for gradient in staged):
            logger.warning(
                "no parameter of this optimizer has a gradient in call %d: was it built before fully_shard, or before "
                "something else that replaced the model's parameters? Build it afterwards, from model.named_parameters()",
                FRUITLESS,
            )
        skip, factors, record = self.judge(staged, self.sums)
        settings = _settings(self.ids, staged, hypers)
        self.publishing.publish_due(self.blocks, self.clock.call)
        self._step_device(settings, present, hypers, factors, skip)
        for block in self.blocks:
            first = block.block.weights[0].key
            self._add_to_window(block, tuple(settings[first : first + len(block.weights)]), record)
        closing = [(block, self._close(block)) for block in self._in_turn() if block.schedule.closes(self.clock)]
        self._replay(closing)
        self.publishing.publish_due([block for block, _ in closing], self.clock.call)
        self._finish_call()

    def _step_device(
        self,
        settings: Sequence[Hyper | None],
        present: Sequence[Sequence[bool]],
        hypers: Hypers,
        factors: Tensor,
        skip: Tensor,
    ) -> None:
        """AdamW of selected channels and residents.

        settings: by weight, None for those without a gradient; present: by group of residents, which have one.
        """
        if self.adamw is None:
            parts = [block.half.planned for block in self.blocks] + [group.planned for group in self.groups]
            self.adamw = self.kernel.plan(parts)
        steps = [*settings]
        for block in self.blocks:
            if not block.half.installed.divided:
                first, count = block.block.weights[0].key, len(block.weights)
                steps[first : first + count] = [None] * count
        for group, some in zip(self.groups, present, strict=True):
            steps += _settings(group.ids, some, hypers)
        self.adamw.step(steps, factors, skip, self.selected.memory)
        for group in self.groups:
            group.scatter()

    def _in_turn(self) -> list[BlockState]:
        """Blocks in the order of the backward pass: the next one needs them so."""
        return sorted(self.blocks, key=lambda block: block.turn)

    def _finish_call(self) -> None:
        self.turns = 0
        self.selected.let_go()
        self.staging.handles.after_call()
        for block in self.blocks:
            block.expect()
            self.hooks.after_call(block)
            block.finish()
        self.ledger.mark()
        self.expect_windows()
        self.meter.finish_call()

    # Slots -> host

    def _add_to_window(self, block: BlockState, present: tuple[Hyper | None, ...], record: Tensor) -> None:
        """Put this call's gradients into the block's window."""
        slot, block.filling = block.filling, None
        if slot is not None and not any(present):  # what was staged has been discarded
            block.give_back([slot])
            slot = None
        memory = slot.rows(block.block.dtype, block.half.division.layout.deferred_numel) if slot else None
        block.open.append(CollectedCall(self.clock.call, record, present, slot, memory))

    def _close(self, block: BlockState) -> Window:
        selects = block.schedule.wants_selection(self.clock, self.config.select_interval)
        due = block.schedule.close(self.clock, self.config.lag)
        calls, block.open = [collected for collected in block.open if collected.slot is not None] or block.open[:1], []
        if calls[0].slot is None:  # no gradient in the whole window; its masters are published all the same
            memory = block.take_slot()
            assert block.filling is not None
            self.link.hold_gates([claim.point for claim in block.filling.after])  # the host is the first to write it
            block.sent = self.link.sent()
            calls = [CollectedCall(calls[0].call, calls[0].record, calls[0].hypers, block.filling, memory)]
            block.filling = None
        lookahead, division = self.config.lookahead_at(block.schedule.interval), block.half.installed
        window = Window(calls, due, lookahead, division, block.pieces(division, calls[0]))
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
        self.meter.reselections += 1
        assert half.handover is not None
        rounds = window.due > self.clock.call + 1  # lag > 1: whether anyone moves decides when the window is due
        if rounds and not bool(half.handover.moved.any()):
            half.follow(half.installed)
            return
        assert block.exchange is not None
        window.hands_over, window.exchange = True, block.exchange.send()
        window.due = min(window.due, self.clock.call + 1)  # who moves must be there when the device updates next

    def _replay(self, closing: Sequence[tuple[BlockState, Window]]) -> None:
        """Give the host the windows that close in this call, all at once: large ones in portions, one after the other."""
        works: list[WindowWork] = []
        ends: list[list[int]] = []  # of each window's portions
        for block, window in closing:
            *others, last = block.portions(window.division)
            ends.append([upto for _, upto in (*others, last)])
            early, block.early, places = block.early, None, None
            if early is not None:
                places = tuple(set(range(len(block.weights))) - early.places)
                window.dropped |= early.dropped
            calls = tuple(self._call(block, collected) for collected in window.calls)
            work = partial(self.host_work, block, calls, window.division.divided, lookahead=window.lookahead, places=places)
            works += [work(span=span) for span in others]
            works.append(work(span=last, exchange=window.exchange))
        points = iter(self.worker.submit(works))
        for (block, window), upto in zip(closing, ends, strict=True):
            window.replayed = [(end, next(points)) for end in upto]
            block.work = window.work
            if gives_at_close(self.config):
                block.give_read(window)

    def replay_early(self, block: BlockState, places: Sequence[int]) -> None:
        """Begin the host's update of what has been staged during backward, if the number of backward passes is known."""
        self.sending.finish()
        if any(block.passes_expected[place] is None for place in places):
            return
        weights.notice_writes(self)
        hypers = self.read_settings().hypers
        ids = [id(state.weight.param) for state in block.weights]
        settings = tuple(hypers[name] if place in places else None for place, name in enumerate(ids))
        call = Call(block.take_slot(), None, block.scaled(settings))
        work = self.host_work(block, (call,), block.half.division.divided, lookahead=0.0, places=tuple(places))
        block.work = self.worker.submit([work])[0]
        block.early = Early(frozenset(places))

    def _call(self, block: BlockState, collected: CollectedCall) -> Call:
        assert collected.memory is not None
        return Call(collected.memory, collected.record, block.scaled(collected.hypers))

    def host_work(
        self,
        block: BlockState,
        calls: tuple[Call, ...],
        divided: bool,
        *,
        lookahead: float,
        places: tuple[int, ...] | None,
        span: tuple[int, int] | None = None,
        exchange: HostExchange | None = None,
    ) -> WindowWork:
        pause = self.delay("worker") if self.delay else 0.0
        gates = self.link.gates(None if exchange is not None else block.sent)
        return WindowWork(block.host, calls, divided, lookahead, True, block.names, gates, places, span, exchange, pause)

    def run(self, state: WeightState, job: ReplayJob) -> None:
        """Do one job now, after whatever the host has still to do."""
        self.worker.run(job, state.block.names)

    # Host -> publish -> weights

    def expect_windows(self) -> None:
        """Expect what is due in the next call."""
        self.publishing.expect(self._in_turn(), self.clock.call + 1)

    def see(self, param: nn.Parameter) -> None:
        """A parameter as it is now, wherever it is, is what this engine has written."""
        if self.ledger.see(param):
            self.adamw = None

    @property
    def device_nbytes(self) -> int:
        """Memory on the device from call to call: state, and room for copies under way."""
        state = sum(block.half.nbytes for block in self.blocks) + sum(group.nbytes for group in self.groups)
        return state + self.link.staging_nbytes

    # Refusals and the end

    def check_usable(self) -> None:
        if not self.belongs_here:
            raise RuntimeError(FORKED)
        if self.failed is not None:
            raise RuntimeError(
                "an earlier call failed, and the optimizer's state is not whole; resume from a checkpoint"
            ) from self.failed
        if self.paused is not None:
            raise RuntimeError(self.paused)
        if self.worker.error is not None:
            self.failed = self.worker.error
            raise self.worker.error

    def check_unmoved(self, param: nn.Parameter) -> None:
        """Refuse a gradient of a parameter that is another one than it was."""
        if not self.ledger.in_place(param):
            weights.check_unmoved(self, param)

    def refuse_early(self, what: str) -> None:
        if any(block.early is not None for block in self.blocks):
            raise RuntimeError(
                f"{what} between backward and step() is not possible with update_in_backward; call it after step()"
            )

    def refuse_sharded(self, what: str) -> None:
        if self.agreement.mesh is not None:
            raise TypeError(
                f"{what} is for one process; save and load sharded parameters with torch.distributed.checkpoint (docs/fsdp.md)"
            )

    @property
    def belongs_here(self) -> bool:
        """Whether this process built it: a forked child has the memory, but no threads."""
        return os.getpid() == self._process

    def close(self, why: str = "the optimizer was closed: build a new one, and load a checkpoint into it") -> None:
        """Finish host work, end the threads, remove the hooks. Idempotent; does nothing in a forked child."""
        if self.closed or not self.belongs_here:
            return
        self.closed = True
        joining.OPEN.discard(self)
        self.hooks.close()
        self.sending.forget()
        try:
            self.link.wait_down()  # the host waits for what is on its way down
            self.worker.finish()
        finally:
            self.worker.close()
            self.link.close()
            self.selected.close()
        self.paused = why
        self.ledger.clear()


def _settings(ids: Sequence[int], present: Sequence[object], hypers: Hypers) -> list[Hyper | None]:
    """The settings of parameters that have a gradient: that are `present`; None for the others."""
    if all(present):
        return [*map(hypers.__getitem__, ids)]
    return [hypers[name] if there else None for name, there in zip(ids, present, strict=True)]
