"""What is in flight: the gradient of the current call, a block's open window, and windows on their way to the publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor, nn

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import STATE, Block, Weight
from stallfree.engine.device import Division, SelectedState
from stallfree.engine.exchange import Exchange
from stallfree.engine.gradient import Staged
from stallfree.engine.host import HostState
from stallfree.engine.ring import Arrival
from stallfree.engine.schedule import BlockSchedule
from stallfree.engine.transfer import HostWork, Link, Ready, Slots
from stallfree.kernels.device import Hyper
from stallfree.kernels.replay import SlotGradient


class WeightState:
    """One weight's place in its block, its host half, and the gradient of the call that is under way."""

    def __init__(self, weight: Weight, block: BlockState, place: int, config: ZenFlowConfig) -> None:
        self.weight, self.block, self.place = weight, block, place
        self.host = HostState(weight, config)
        self.staged: Staged | None = None
        self.ready = False  # no further pass is expected before the next call
        self.expected = True  # a gradient is: there was one in the last call
        self.passes_seen = 0  # backward passes since the last call
        self.passes_expected: int | None = None  # learned from the last call that had any
        self.restored: Tensor | None = None  # what load_state_dict wrote, until the next call
        self.writes: list[int] = []  # the last calls after which a write from outside took the place of updates

    def halves(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The device's and the host's tensor of each part of the state, in the same order."""
        half, host = self.block.half, self.host
        flats = tuple((half.rows(getattr(half, name), self.place), getattr(host, name)) for name in STATE)
        return (*flats, (half.installed.layout.places_of(half.steps, self.place), host.steps))

    def gradients(self, calls: Sequence[CollectedCall], division: Division) -> Iterator[SlotGradient]:
        """The collected gradients of this weight that count, oldest first. Waits for their copies."""
        for collected in calls:
            hyper = collected.hypers[self.place]
            if hyper is not None and not collected.record.skipped:
                collected.arrived()
                yield self.gradient(collected.call, division, hyper, collected.record.factor(self.weight.key))

    def gradient(self, call: int, division: Division, hyper: Hyper, factor: float) -> SlotGradient:
        """The deferred gradient of one call, which has arrived."""
        lr = hyper.lr * self.host.config.deferred_lr_scale
        rows = self.block.slots.rows(call, division.layout, self.place)
        return SlotGradient(rows, lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, factor)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What the host learns of a call: whether the device skipped it, and each weight's gradient factor."""

    values: Tensor  # [1 + weights] fp32: the skip flag, the factors by weight.key
    ready: Ready

    @property
    def skipped(self) -> bool:
        self.ready()
        return bool(self.values[0])

    def factor(self, key: int) -> float:
        return float(self.values[1 + key])


@dataclass(frozen=True, slots=True)
class CollectedCall:
    """A call in a block's window."""

    call: int
    record: CallRecord
    arrived: Ready  # the slot's: as of this call, because the slot may have been filled again when the worker asks
    hypers: tuple[Hyper | None, ...]  # by weight of the block; None: no gradient in that call

    def without(self, place: int) -> CollectedCall:
        """The same, with one weight's gradient taken out."""
        hypers = tuple(None if other == place else hyper for other, hyper in enumerate(self.hypers))
        return CollectedCall(self.call, self.record, self.arrived, hypers)


@dataclass(frozen=True, slots=True)
class Early:
    """Host work that began during backward."""

    places: frozenset[int]  # the weights that it updates
    done: Future[None]


@dataclass(slots=True)
class Window:
    """What a block collected, from the close to the publish."""

    calls: list[CollectedCall]
    due: int
    lookahead: float
    division: Division  # of its gradients; it publishes the deferred channels
    hands_over: bool = False  # its publish shows the channels that have arrived on the device
    merge: Callable[[], None] | None = None  # what the worker does about them after the replay
    work: HostWork = field(default_factory=HostWork)  # its replay
    ahead: Arrival | None = None  # what it publishes, on its way up already
    dropped: set[int] = field(default_factory=set)  # weights whose publish an outside write made void

    def forget(self) -> None:
        """Nothing of it will be published."""
        if self.ahead is not None:
            self.ahead.forget()


class BlockState:
    """A block: both halves, its slots and flag, its schedule, its open window and those on their way to the publish."""

    def __init__(self, block: Block, half: SelectedState, link: Link, config: ZenFlowConfig) -> None:
        self.block, self.half, self.link = block, half, link
        self.weights = [WeightState(weight, self, place, config) for place, weight in enumerate(block.weights)]
        hosts = [state.host for state in self.weights]
        self.exchange = Exchange(half, hosts, link) if half.chosen.places else None
        self.slots, self.flag = Slots(block, link, config), link.flag()
        self.schedule = BlockSchedule(block.phase)
        self.open: list[CollectedCall] = []
        self.queue: list[Window] = []
        self.work = HostWork()  # the last that the worker was given; it works in order
        self.early: Early | None = None
        self.missing = len(self.weights)  # weights whose gradients are expected and not ready

    @property
    def phase(self) -> int:
        return self.schedule.phase

    @property
    def params(self) -> list[nn.Parameter]:
        return self.block.params

    @property
    def host_nbytes(self) -> int:
        exchange = self.exchange.nbytes if self.exchange else 0
        return sum(state.host.nbytes for state in self.weights) + self.slots.nbytes + exchange

    def reset(self) -> None:
        """As at construction, from the weights as they are now."""
        self.half.reset()
        if self.exchange:
            self.exchange.selected = []
        for state in self.weights:
            state.host.reset()
            state.passes_expected = None

    def settle(self) -> None:
        """Wait for host work, and bring the halves up to date with it. The weights stay as they are.

        Also for that of windows which have been published: where the device waits, the launching thread is ahead of it.
        """
        self.link.wait(self.work)
        if self.half.handover is not None:
            assert self.exchange is not None
            self.exchange.receive(HostWork())

    def clear(self) -> None:
        """Let go of what has been collected."""
        for window in self.queue:
            window.forget()
        self.open, self.queue = [], []

    def expect(self) -> None:
        """Begin to wait for the gradients of the next call: of those weights that had one in this call."""
        if any(state.staged is not None for state in self.weights):
            for state in self.weights:
                state.expected = state.staged is not None
        for state in self.weights:
            state.ready = False
        self.missing = sum(state.expected for state in self.weights)


@dataclass(slots=True)
class Written:
    """A parameter as it was seen last. Holding its memory keeps the allocator from giving the address to other contents."""

    memory: Tensor
    address: int
    version: int

    def moved(self, param: Tensor) -> bool:
        """Whether the parameter's memory is other memory now, or is read with other strides."""
        return param.data_ptr() != self.address or not param.is_set_to(self.memory)

    def holds(self, param: Tensor) -> bool:
        """Whether nobody has written it since, in a way that torch notices."""
        return param._version == self.version and not self.moved(param)


def written(param: Tensor) -> Written:
    """What to compare a parameter with later."""
    return Written(param.detach(), param.data_ptr(), param._version)
