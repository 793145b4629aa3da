"""The device half of a block: fp32 state of its selected channels, on the parameters' device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stallfree.engine import selection
from stallfree.engine.blocks import Block, aligned
from stallfree.engine.channels import Channels
from stallfree.engine.ledger import adopt_weights
from stallfree.engine.selected import SelectedGradients
from stallfree.kernels.block import BlockKernel, BlockLayout, Part, Segment, Targets, block_targets, pieces, targets

Layouts = dict[tuple[Segment, ...], BlockLayout]


@dataclass(frozen=True, eq=False, slots=True)
class Division:
    """Who owns which channels of a block's weights."""

    layout: BlockLayout
    targets: Targets
    selected: tuple[Tensor, ...]  # by weight: [places] int64, the channel of each place
    deferred: tuple[Tensor, ...]  # by weight: [channels - places] int64, ascending

    @property
    def divided(self) -> bool:
        """Whether the device holds any channels."""
        return self.layout.places > 0

    @classmethod
    def of(cls, layout: BlockLayout, selected: Sequence[Tensor], deferred: Sequence[Tensor]) -> Division:
        return cls(layout, targets(layout, selected, deferred), tuple(selected), tuple(deferred))

    @classmethod
    def of_block(cls, layout: BlockLayout, places: Tensor, rows: Tensor) -> Division:
        """places, rows: int64, channels by number in the block."""
        selected = (places - layout.first_channel_of_place).split([segment.selected for segment in layout.segments])
        deferred = (rows - layout.first_channel_of_row).split([segment.deferred for segment in layout.segments])
        return cls(layout, block_targets(layout, places, rows), selected, deferred)


@dataclass(eq=False, slots=True)
class Handover:
    """Channels on the move between a selection and the next call, in places of the device state that change hands."""

    division: Division  # from the next gradient on
    moved: Tensor  # [places] bool

    def write_numbers(self, out: Tensor) -> None:
        """As the host wants to know it: channels of places, channels of rows, and which places change hands; int32."""
        who = self.division.targets
        torch.cat([who.selected, who.deferred, self.moved.int()], out=out)


class SelectedState:
    """AdamW of a block's selected channels: flat buffers, in the order of the division's layout."""

    def __init__(
        self,
        block: Block,
        channels: Channels,
        gradients: SelectedGradients,
        kernel: BlockKernel,
        layouts: Layouts,
        piece_bytes: int,
    ) -> None:
        self.block, self.channels, self.gradients, self.kernel = block, channels, gradients, kernel
        self.device = block.shards[0].device
        known = len(layouts)  # blocks of a geometry that is known need no rehearsal
        self.nobody = self._layout([0] * len(block.weights), layouts)
        self.chosen = self._layout([weight.selected_count for weight in block.weights], layouts)
        self._cuts: dict[BlockLayout, tuple[tuple[int, int], ...]] = {}
        for layout in {self.nobody, self.chosen}:
            self._cuts[layout] = pieces(layout, piece_bytes // block.dtype.itemsize)
            kernel.warm_up(layout, block.dtype)
        self._stride = aligned(self.chosen.selected_numel)
        self.memory = torch.zeros(block.state_numel, dtype=torch.float32, device=self.device)
        self.master, self.exp_avg, self.exp_avg_sq, self.steps = self.parts(self.memory)
        numbers = 2 * self.chosen.places + self.chosen.deferred_channels if self.chosen.places else 0
        self.numbers = torch.empty(numbers, dtype=torch.int32, device=self.device)  # of a hand-over, on their way down
        self._place = gradients.add(self.chosen.selected_numel * block.dtype.itemsize)
        self.nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        sizes, counts = [weight.channels for weight in block.weights], [weight.selected_count for weight in block.weights]
        self._geometry = selection.Geometry.of(sizes, counts, self.device)
        self.held = torch.zeros(self.chosen.places, dtype=torch.int32, device=self.device)  # the channel of each place
        self._squares: tuple[Tensor, Tensor] | None = None  # all there are, and the block's
        self.reset()
        if known < len(layouts):
            self._rehearse()

    def _layout(self, selected: Sequence[int], layouts: Layouts) -> BlockLayout:
        segments = tuple(weight.segment(count) for weight, count in zip(self.block.weights, selected, strict=True))
        if segments not in layouts:  # blocks of equal geometry share one
            layouts[segments] = BlockLayout(segments, self.device)
        return layouts[segments]

    def parts(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Master, exp_avg, exp_avg_sq (flat, fp32) and steps (int32) in memory of the state's form."""
        numel, stride = self.chosen.selected_numel, self._stride
        first, second, third, steps = memory.split([stride, stride, stride, self.chosen.places])
        return first[:numel], second[:numel], third[:numel], steps.view(torch.int32)

    def reset(self) -> None:
        """As at construction: every channel is deferred."""
        every = [torch.arange(weight.channels, dtype=torch.int64, device=self.device) for weight in self.block.weights]
        self.retention: list[Tensor | None] = [None] * len(every)
        self.score.zero_()
        self.follow(Division.of(self.nobody, [self.nothing] * len(every), every))

    def follow(self, installed: Division, handover: Handover | None = None) -> None:
        """Adopt a division: whose state is here, and who is on the move."""
        self.installed, self.handover = installed, handover
        if installed.divided:
            self.held.copy_(installed.targets.selected)
        self.division = handover.division if handover else installed  # which gradients follow
        self.channels.of(self.channels.deferred, *self._ends).copy_(self.division.targets.rows < 0)

    @property
    def _ends(self) -> tuple:
        return self.block.weights[0], self.block.weights[-1]

    @property
    def squares(self) -> Tensor:
        if self._squares is None or self._squares[0] is not self.channels.squares:  # more weights have joined
            self._squares = self.channels.squares, self.channels.of(self.channels.squares, *self._ends)
        return self._squares[1]

    @property
    def score(self) -> Tensor:
        return self.channels.of(self.channels.score, *self._ends)

    def rows(self, flat: Tensor, place: int) -> Tensor:
        """A weight's part of `master`, `exp_avg` or `exp_avg_sq`: `[places, length]`; empty before a selection."""
        return self.installed.layout.selected_rows(flat, place)

    @property
    def gradient(self) -> Tensor:
        """The selected rows of what is staged, or about to be: flat, by the division's layout."""
        return self.gradients.part(self._place, self.division.layout.selected_numel, self.block.dtype)

    def pieces(self, layout: BlockLayout, deferred: Tensor) -> list[tuple[int, Tensor]]:
        """A buffer of deferred rows in the pieces that are copied at a time: where each begins, and its part of the buffer."""
        cuts = self._cuts[layout]
        if len(cuts) == 1:
            return [(0, deferred)]
        return [(low, deferred[low:high]) for low, high in cuts]

    def split(self, grads: Sequence[Tensor | None], deferred: Tensor, low: int) -> None:
        """Take gradients apart: norms and selected rows stay here, a piece of the deferred rows goes to `deferred`."""
        layout = self.division.layout
        self.kernel.split(layout, self.division.targets, grads, self.squares, self.gradient, deferred, low)
        self.channels.changed()

    @property
    def planned(self) -> Part:
        """The selected channels as AdamW steps them."""
        params = [shard.detach() for shard in self.block.shards]
        state = (self.master, self.exp_avg, self.exp_avg_sq, self.steps)
        return Part(self.chosen, self.held, params, *state, self._place)

    def show(self) -> None:
        """Write the masters of selected channels into the parameters."""
        if self.installed.layout.places:
            values = self.master.to(self.block.dtype)
            for place, weight in enumerate(self.block.weights):
                rows = self.installed.layout.segments[place].rows(weight.shard)
                rows.index_copy_(0, self.installed.selected[place], self.rows(values, place))

    def select(self) -> None:
        """Choose the channels of the next window; state moves at the next call (`Exchange`)."""
        handover, kept = self._choose(self.installed.targets if self.installed.divided else None)
        self.retention = [None] * len(self.block.weights) if kept is None else [*kept.unbind()]
        self.follow(self.installed, handover)

    def _choose(self, held: Targets | None) -> tuple[Handover, Tensor | None]:
        """The best channels by score; and by weight, which share of those that the device holds is chosen again."""
        layout = self.chosen
        numbers = None if held is None else held.selected + layout.first_channel_of_place
        places, rows, moved, kept = selection.select(self.score, self._geometry, numbers)
        return Handover(Division.of_block(layout, places, rows), moved), kept

    def _rehearse(self) -> None:
        """Load what selections launch: the first use of a kernel may wait for the device, and take tens of milliseconds."""
        if self.chosen.places:
            first, _ = self._choose(None)
            then, _ = self._choose(first.division.targets)
            then.write_numbers(self.numbers)
            place, row = self.nothing.new_zeros(1), self.master[:1].view(1, 1).to(self.block.dtype)
            row.clone().index_copy_(0, place, row)

    def read_weights(self, place: int) -> None:
        """Take a parameter, written from outside, as the new masters of its selected channels."""
        if self.installed.layout.places:
            rows = self.installed.layout.segments[place].rows(self.block.weights[place].shard)
            adopt_weights(self.rows(self.master, place), rows[self.installed.selected[place]])

    @property
    def nbytes(self) -> int:
        flats = (self.memory, self.squares, self.score)
        return sum(flat.nbytes for flat in flats)
