"""What is in flight: the gradient of the current call, a block's open window, and windows on their way to the publish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stallfree.config import ZenFlowConfig
from stallfree.engine.blocks import STATE, Block, Weight, describe
from stallfree.engine.device import Division, SelectedState
from stallfree.engine.exchange import Exchange
from stallfree.engine.gradient import Staged, StagedCall
from stallfree.engine.host import HostState
from stallfree.engine.schedule import BlockSchedule
from stallfree.engine.sharding import FORM, OwnGradients, is_sharded
from stallfree.engine.slots import Slot, SlotPool, Until
from stallfree.engine.streams import Point
from stallfree.engine.transfer import Arrival, Link
from stallfree.kernels.block import BlockLayout
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.replay import SlotGradient
from stallfree.kernels.windows import HostBlock, HostExchange


class WeightState:
    """One weight's place in its block, and its host half. What changes in every call is in lists of its block."""

    def __init__(self, weight: Weight, block: BlockState, place: int, config: ZenFlowConfig) -> None:
        self.weight, self.block, self.place = weight, block, place
        self.host = HostState(weight, config)
        self.stream: int | None = None  # that its gradient was computed on, when it was watched last
        self.writes: list[int] = []  # the last calls after which a write from outside took the place of updates

    @property
    def staged(self) -> Staged | None:
        return self.block.staged[self.place]

    @property
    def early(self) -> bool:
        """Whether the host has begun its update, during backward."""
        early = self.block.early
        return early is not None and self.place in early.places

    def halves(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The device's and the host's tensor of each part of the state, in the same order."""
        half, host = self.block.half, self.host
        flats = tuple((half.rows(getattr(half, name), self.place), getattr(host, name)) for name in STATE)
        return (*flats, (half.installed.layout.places_of(half.steps, self.place), host.steps))

    def gradients(self, calls: Sequence[CollectedCall], division: Division) -> Iterator[SlotGradient]:
        """The collected gradients of this weight that count, oldest first. They and their records have come down."""
        for collected in calls:
            hyper = collected.hypers[self.place]
            if hyper is not None and not collected.skipped:
                assert collected.memory is not None
                rows = division.layout.deferred_rows(collected.memory, self.place)
                yield SlotGradient(rows, *self.host.scaled(hyper), collected.factor(self.weight.key))


@dataclass(frozen=True, slots=True)
class CollectedCall:
    """A call in a block's window."""

    call: int
    record: Tensor  # host memory, [1 + weights] fp32: whether the device skipped the call, gradients' factors by weight.key
    hypers: tuple[Hyper | None, ...]  # by weight of the block; None: no gradient in that call
    slot: Slot | None  # None: no gradient at all
    memory: Tensor | None  # the slot's content: the block's deferred rows

    @property
    def skipped(self) -> bool:
        return bool(self.record[0])

    def factor(self, key: int) -> float:
        return float(self.record[1 + key])

    def without(self, place: int) -> CollectedCall:
        """The same, with one weight's gradient taken out."""
        hypers = tuple(None if other == place else hyper for other, hyper in enumerate(self.hypers))
        return CollectedCall(self.call, self.record, hypers, self.slot, self.memory)


@dataclass(frozen=True, slots=True)
class Early:
    """Host work that began during backward."""

    places: frozenset[int]  # the weights that it updates
    dropped: set[int] = field(default_factory=set)  # of these, those that were written from outside since


@dataclass(eq=False, slots=True)
class Piece:
    """Deferred rows of a window that come up in one copy."""

    low: int  # the place of their first element among the block's
    values: Tensor  # host memory
    arrival: Arrival | None = None  # on their way up already


PORTIONS = 2  # of a window for the host, at most
LEAST_PORTION = 1 << 24  # elements, below which nobody gains by hearing of it earlier


def portions_of(layout: BlockLayout) -> Sequence[tuple[int, int]]:
    """In which the host gets a window: elements from, to."""
    numel = layout.deferred_numel
    count = min(PORTIONS, max(1, numel // LEAST_PORTION))
    return layout.runs(numel * part // count for part in range(1, count))


@dataclass(eq=False, slots=True)
class Window:
    """What a block collected, from the close to the publish."""

    calls: list[CollectedCall]  # with a slot that is not given back yet; what is published takes the first one's place
    due: int
    lookahead: float
    division: Division  # of its gradients; it publishes the deferred channels
    pieces: list[Piece]  # of what it publishes, those that are not shown yet, in order
    exchange: HostExchange | None = None  # the channels that change hands after its replay
    hands_over: bool = False  # with its publish, channels arrive on the device
    replayed: Sequence[tuple[int, Point]] = ()  # up to which of its elements the host is done, and when, in order; none: it is
    read: Point | None = None  # when what is on its way up has left host memory
    dropped: set[int] = field(default_factory=set)  # weights whose publish an outside write made void

    @property
    def work(self) -> Point | None:
        """Its replay; None: done."""
        return self.replayed[-1][1] if self.replayed else None

    def replay_of(self, piece: Piece) -> Point | None:
        """When the host is done with a piece of what is published; None: it is."""
        end = piece.low + piece.values.numel()
        return next((point for upto, point in self.replayed if upto >= end), self.work)

    @property
    def shown(self) -> bool:
        """Whether it is published, or there is nothing left to publish."""
        return not self.pieces

    @property
    def arrives(self) -> bool:
        """Whether the next piece is on its way up already."""
        return bool(self.pieces) and self.pieces[0].arrival is not None

    @property
    def published(self) -> Tensor:
        """Host memory of the deferred rows that are to be shown."""
        assert self.calls[0].memory is not None
        return self.calls[0].memory

    @property
    def slots(self) -> list[Slot]:
        return [collected.slot for collected in self.calls if collected.slot is not None]


class BlockState:
    """A block: both halves, its schedule, its open window and those on their way to the publish."""

    def __init__(self, block: Block, half: SelectedState, link: Link, pool: SlotPool, config: ZenFlowConfig) -> None:
        self.block, self.half, self.link, self.pool = block, half, link, pool
        self.scale = config.deferred_lr_scale
        self.names = ", ".join(describe(weight.name, weight.param) for weight in block.weights)  # for messages
        self.weights = [WeightState(weight, self, place, config) for place, weight in enumerate(block.weights)]
        self.params = block.params
        self.sharded = any(map(is_sharded, self.params))
        self.forms = [FORM(weight.shard.detach()) for weight in block.weights]  # of gradients, as they mostly are
        self.residents: list[OwnGradients] = []  # of sharded ones of the same layers
        self.exchange = Exchange(half, link, pool) if half.chosen.places else None
        self.host = HostBlock(
            weights=tuple(state.host.kept for state in self.weights),
            record_start=1 + block.weights[0].key,
            rule=config.rule,
            dtype=block.dtype,
        )
        self.schedule = BlockSchedule(block.phase)
        self.filling: Slot | None = None  # the slot of the call under way
        self.sent: Point | None = None  # when the gradients staged last have come down; None: with everything else
        self.turn = 0  # when it was staged, among the blocks of a call
        self.open: list[CollectedCall] = []
        self.queue: list[Window] = []
        self.work: Point | None = None  # the last that the host was given; it works in order
        self.early: Early | None = None
        self._portions: dict[BlockLayout, Sequence[tuple[int, int]]] = {}
        # By weight. Mostly all weights of a block are alike, and a list is asked, and set, at once.
        self.call: StagedCall | None = None  # that gradients are staged for; None: none is
        self.staged: list[Staged | None] = [None] * len(self.weights)
        self.handles: list[Tensor | None] = [None] * len(self.weights)  # that stood in `.grad` for what was staged last
        self.ready = [False] * len(self.weights)  # no further pass is expected before the next call
        self.expected = [True] * len(self.weights)  # a gradient is: there was one in the last call
        self.passes_seen = [0] * len(self.weights)  # backward passes since the last call
        self.passes_expected: list[int | None] = [None] * len(self.weights)  # learned from the last call that had any
        self.restored: dict[int, Tensor] = {}  # by place: what load_state_dict wrote, until the next call
        self.missing = len(self.weights)  # weights whose gradients are expected and not ready
        self.surprised = False  # in the call under way, more or fewer gradients have come than were expected
        self.regular = False  # nothing of that kind happened in the last call
        self.last: WeightState | None = None  # whose gradient completed the block, in the call under way
        self.last_before: WeightState | None = None  # and in the one before
        self.alike = 0  # calls in which that was the same one
        self.watched: WeightState | None = None  # the only one that calls back; None: all do (`Hooks`)

    @property
    def phase(self) -> int:
        return self.schedule.phase

    @property
    def host_nbytes(self) -> int:
        """Of the state; slots are the pool's."""
        return sum(state.host.nbytes for state in self.weights)

    def take_slot(self) -> Tensor:
        """Room for the deferred rows of the call under way."""
        if self.filling is None:
            nbytes = self.half.division.layout.deferred_numel * self.block.dtype.itemsize
            self.filling = self.pool.take(self.block, nbytes)
        return self.filling.rows(self.block.dtype, self.half.division.layout.deferred_numel)

    def pieces(self, division: Division, first: CollectedCall) -> list[Piece]:
        """What a window publishes in the place of its first gradients."""
        assert first.memory is not None
        return [Piece(low, values) for low, values in self.half.pieces(division.layout, first.memory)]

    def portions(self, division: Division) -> Sequence[tuple[int, int]]:
        """In which the host gets a window: elements from, to. What it has begun in backward is not worth two."""
        layout = division.layout
        if self.early is not None:
            return ((0, layout.deferred_numel),)
        if layout not in self._portions:
            self._portions[layout] = portions_of(layout)
        return self._portions[layout]

    def give_back(self, slots: Sequence[Slot], read: Point | None = None) -> None:
        """Nobody needs what these slots hold, once it has come up to the device."""
        self.pool.give(slots, read)

    def give_read(self, window: Window) -> None:
        """Once the host has done a window's work, all that anybody needs of its slots is what it publishes."""
        read, window.calls = window.calls[1:], window.calls[:1]
        until = [Until(upto * self.block.dtype.itemsize, point) for upto, point in window.replayed]
        self.pool.give([collected.slot for collected in read if collected.slot is not None], until)

    def scaled(self, hypers: tuple[Hyper | None, ...]) -> tuple[Hyper | None, ...]:
        """A call's settings as deferred channels have them."""
        if self.scale == 1:
            return hypers
        return tuple(None if hyper is None else self.weights[0].host.scaled(hyper) for hyper in hypers)

    def reset(self) -> None:
        """As at construction, from the weights as they are now."""
        self.half.reset()
        if self.exchange:
            self.exchange.selected.fill_(-1)
        for state in self.weights:
            state.host.reset()
        self.passes_expected = [None] * len(self.weights)

    def settle(self) -> None:
        """Wait for host work, and bring the halves up to date with it. The weights stay as they are.

        Also for that of windows which have been published: where the device waits, the launching thread is ahead of it.
        """
        if self.work is not None:
            self.link.wait(self.work)
        self.link.wait_down()
        if self.half.handover is not None:
            assert self.exchange is not None
            self.exchange.receive(None)

    @property
    def on_one_stream(self) -> bool:
        """Whether all gradients were computed on the same stream: who waits for one has waited for all."""
        return len({state.stream for state in self.weights}) == 1

    @property
    def finished(self) -> bool:
        """Whether this backward pass has no more use for the weights: as far as can be known, from a call without surprises."""
        return self.regular and not self.surprised and all(self.staged)

    def due(self, call: int) -> list[Window]:
        """What is published in a call, in order: a window that is due takes earlier ones with it."""
        last = max((place for place, window in enumerate(self.queue) if window.due <= call), default=-1)
        return self.queue[: last + 1]

    def clear(self) -> None:
        """Let go of what has been collected."""
        for window in self.queue:
            self.forget(window)
        self.give_back([collected.slot for collected in self.open if collected.slot is not None])
        self.open, self.queue = [], []

    def forget(self, window: Window) -> None:
        """Nothing of a window will be published."""
        if not window.shown:
            for piece in window.pieces:
                if piece.arrival is not None:
                    piece.arrival.forget()
            window.pieces.clear()
            self.give_back(window.slots, window.read)

    def staged_call(self, call: int) -> StagedCall:
        """What gradients are staged for now."""
        if self.call is None:
            self.call = StagedCall(call)
        return self.call

    def expect(self) -> None:
        """After a call: begin to wait for the gradients of the next one, of those weights that had one in this call."""
        if self.watched is not None:  # the others have not been counted
            seen = self.passes_seen[self.watched.place]
            if self.passes_seen.count(seen) < len(self.weights):
                self.passes_seen = [max(passes, seen) for passes in self.passes_seen]
        if any(self.staged):
            self.expected = list(map(bool, self.staged))
        self.ready = [False] * len(self.weights)
        self.missing = sum(self.expected)
        self.regular, self.surprised = not self.surprised, False

    def finish(self) -> None:
        """After a call, which has applied what was staged."""
        seen: list[int | None] = list(self.passes_seen)
        if 0 in seen:
            seen = [passes or before for passes, before in zip(seen, self.passes_expected, strict=True)]
        self.passes_expected = seen
        self.let_go()

    def let_go(self) -> None:
        """Of what was staged: it has been applied, or given up."""
        if self.call is not None:
            self.call.consumed, self.call = True, None
        self.staged, self.passes_seen = [None] * len(self.weights), [0] * len(self.weights)
        self.restored = {}
