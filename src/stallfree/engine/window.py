"""What is in flight: the gradient of the current call, a block's open window, and windows on their way to the publish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor, nn

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import Block, Weight
from stallfree.engine.device import SelectedState
from stallfree.engine.gradient import Staged
from stallfree.engine.host import HostState
from stallfree.engine.schedule import BlockSchedule
from stallfree.engine.transfer import Link, Ready, Slots
from stallfree.kernels.device import DeviceKernel, Hyper
from stallfree.kernels.replay import SlotGradient

STATE = ("master", "exp_avg", "exp_avg_sq", "steps")


class WeightState:
    """Both halves of one weight, its slots, and the gradient of the call that is under way."""

    def __init__(self, weight: Weight, kernel: DeviceKernel, link: Link, config: ZenFlowConfig) -> None:
        self.weight = weight
        self.selected = SelectedState(weight, kernel, config)
        self.host = HostState(weight, config)
        self.slots = Slots(weight, link, config)
        self.staged: Staged | None = None
        self.passes_seen = 0  # backward passes since the last call
        self.passes_expected: int | None = None  # learned from the last call that had any
        self.early: Future[None] | None = None  # host work that began during backward
        self.seen = written(weight.param)
        self.restored: Tensor | None = None  # what load_state_dict wrote, until the next call

    def halves(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The device's and the host's tensor of each part of the state, in the same order."""
        return tuple((getattr(self.selected, name), getattr(self.host, name)) for name in STATE)

    def reset(self) -> None:
        """As at construction, from the weights as they are now."""
        self.selected.reset()
        self.host.reset()
        self.passes_expected = None

    def gradients(self, calls: Sequence[CollectedCall], place: int) -> Iterator[SlotGradient]:
        """The collected gradients of this weight that count, oldest first. Waits for their copies."""
        for collected in calls:
            hyper = collected.hypers[place]
            if hyper is not None and not collected.record.skipped:
                yield self.gradient(collected.call, hyper, collected.record.factor(self.weight.key))

    def gradient(self, call: int, hyper: Hyper, factor: float) -> SlotGradient:
        """The deferred gradient of one call. Waits for its copy."""
        self.slots.wait(call)
        lr = hyper.lr * self.host.config.deferred_lr_scale
        rows = self.slots.rows(call, len(self.host.deferred))
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
    hypers: tuple[Hyper | None, ...]  # by weight of the block; None: no gradient in that call

    def without(self, place: int) -> CollectedCall:
        """The same, with one weight's gradient taken out."""
        hypers = tuple(None if other == place else hyper for other, hyper in enumerate(self.hypers))
        return CollectedCall(self.call, self.record, hypers)


@dataclass(slots=True)
class Window:
    """What a block collected, from the close to the publish."""

    calls: list[CollectedCall]
    due: int
    lookahead: float
    deferred: list[Tensor]  # by weight: the channels it publishes, on the device
    hands_over: bool = False
    jobs: list[Future[None]] = field(default_factory=list)  # by weight
    dropped: set[int] = field(default_factory=set)  # weights whose publish an outside write made void


class BlockState:
    """A block's schedule, its open window and those on their way to the publish."""

    def __init__(self, block: Block, weights: list[WeightState]) -> None:
        self.block, self.weights = block, weights
        self.schedule = BlockSchedule(block.phase)
        self.open: list[CollectedCall] = []
        self.queue: list[Window] = []

    @property
    def phase(self) -> int:
        return self.schedule.phase

    @property
    def params(self) -> list[nn.Parameter]:
        return self.block.params


def written(param: Tensor) -> tuple[int, int]:
    """Changes whenever somebody writes the parameter in a way that torch notices."""
    return param.data_ptr(), param._version
