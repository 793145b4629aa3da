"""The device half's arithmetic: the interface of multi-tensor kernels, which `torch_block.py` defines in torch operations.

Gradients are taken apart and weights published a block at a time; calls are judged (`judging.py`), and AdamW steps taken,
for all blocks and residents together. A block's
weights are segments of flat buffers, so that a call costs a few launches however many weights there are:

    squares     [sum of channels] fp32                      squared norm of each channel's gradient
    selected    [sum of selected * length]                  selected rows, channel-major, in the order of places
    deferred    [sum of (channels - selected) * length]     deferred rows, channel-major, in ascending channel order
    steps       [sum of selected] int32                     AdamW steps that each place has taken

Deferred rows may come in pieces, so that the memory they pass through need not hold a block of any size: a piece is a range of
`deferred` that begins and ends where rows do.

Nothing here reads a value back to the launching thread: a skipped call is a flag on the device.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from stallfree.kernels.hyper import Hyper

if TYPE_CHECKING:
    from stallfree.kernels.judging import Evidence, Judging, Policy

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: what a thread moves at a time
FIRST = 4  # how many times smaller the first piece of a large block is


@dataclass(frozen=True)
class Segment:
    """One weight of a block, and its gradient: contiguous memory of `channels * length` elements.

    channel_dim 1: `[length, channels]` (out x in), a channel is a column; 0: `[channels, length]`, a channel is a row.
    """

    channels: int
    length: int
    channel_dim: int
    selected: int = 0  # how many channels the device holds; 0 before the first selection

    def __post_init__(self) -> None:
        if self.channel_dim not in (0, 1):
            raise ValueError(f"channel_dim must be 0 or 1, not {self.channel_dim}")
        if not (0 < self.channels < 2**30 and 0 < self.length < 2**30 and 0 <= self.selected <= self.channels):
            raise ValueError(f"channels and length must be in [1, 2^30) and selected in [0, channels]: {self}")

    @property
    def deferred(self) -> int:
        return self.channels - self.selected

    @property
    def numel(self) -> int:
        return self.channels * self.length

    def rows(self, tensor: Tensor) -> Tensor:
        """The weight or gradient viewed as `[channels, length]`."""
        flat = tensor.detach()
        return flat.view(self.channels, self.length) if self.channel_dim == 0 else flat.view(self.length, self.channels).t()


def pieces(layout: BlockLayout, numel: int) -> tuple[tuple[int, int], ...]:
    """Cut a block's deferred rows into pieces of about equal size, each of at most `numel` elements and a row: from, to.

    Of more than two the first is smaller: computation waits for memory that it can be written to, and for no other's.
    """
    most, total = max([numel, *(segment.length for segment in layout.segments)]), layout.deferred_numel
    first = numel // FIRST if total > 2 * most else 0
    count = -(-(total - first) // most)
    return layout.runs(first + (total - first) * number // count for number in range(count))


class BlockLayout:
    """Where each weight's part lies in a block's flat buffers. Hashed by identity: kernels keep their tables by layout.

    Blocks of equal geometry on one device may share a layout.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str) -> None:
        self.segments = tuple(segments)
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.channel_starts, self.channels = _starts(segment.channels for segment in self.segments)
        self.place_starts, self.places = _starts(segment.selected for segment in self.segments)
        self.row_starts, self.deferred_channels = _starts(segment.deferred for segment in self.segments)
        self.selected_starts, self.selected_numel = _starts(segment.selected * segment.length for segment in self.segments)
        self.deferred_starts, self.deferred_numel = _starts(segment.deferred * segment.length for segment in self.segments)
        # Of each place and each deferred row: its number in its weight, and the first channel of its weight.
        selected = [segment.selected for segment in self.segments]
        deferred = [segment.deferred for segment in self.segments]
        self.place_numbers, self.row_numbers = (_counted(sizes).to(self.device) for sizes in (selected, deferred))
        self.first_channel_of_place = _repeated(self.channel_starts, selected).to(self.device)
        self.first_channel_of_row = _repeated(self.channel_starts, deferred).to(self.device)

    def channels_of(self, flat: Tensor, index: int) -> Tensor:
        """Segment `index` of a `[sum of channels]` buffer: `[channels]`."""
        return flat.narrow(0, self.channel_starts[index], self.segments[index].channels)

    def places_of(self, flat: Tensor, index: int) -> Tensor:
        """Segment `index` of a `[sum of selected]` buffer: `[selected]`."""
        return flat.narrow(0, self.place_starts[index], self.segments[index].selected)

    def selected_rows(self, flat: Tensor, index: int) -> Tensor:
        """Segment `index` of a buffer of selected rows: `[selected, length]`."""
        segment = self.segments[index]
        numel = segment.selected * segment.length
        return flat.narrow(0, self.selected_starts[index], numel).view(segment.selected, segment.length)

    def deferred_rows(self, flat: Tensor, index: int, low: int = 0) -> Tensor:
        """Segment `index` of a buffer of deferred rows: `[channels - selected, length]`; of a piece from `low` on, its rows."""
        rows, length = self.rows_between(index, low, low + flat.numel()), self.segments[index].length
        start = self.deferred_starts[index] + rows.start * length - low if rows else 0
        return flat.narrow(0, start, len(rows) * length).view(len(rows), length)

    def rows_between(self, index: int, low: int, high: int) -> range:
        """The deferred rows of segment `index` that lie between two places of the flat buffer."""
        start, segment = self.deferred_starts[index], self.segments[index]
        first, last = (min(max((place - start) // segment.length, 0), segment.deferred) for place in (low, high))
        return range(first, last)

    def runs(self, goals: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """The flat buffer of deferred rows in runs of whole rows, cut at or before these places: from, to."""
        ends = sorted({0, *map(self.row_before, goals), self.deferred_numel})
        return tuple(pairwise(ends)) or ((0, 0),)

    def row_before(self, place: int) -> int:
        """The last place, up to this one (0 or more), at which a piece of the flat buffer of deferred rows may end."""
        if place >= self.deferred_numel:
            return self.deferred_numel
        index = bisect(self.deferred_starts, place) - 1  # of equal starts the last: the others have no rows
        return place - (place - self.deferred_starts[index]) % self.segments[index].length

    def begins_row(self, place: int) -> bool:
        """Whether a piece of the flat buffer of deferred rows may begin or end there."""
        return place >= 0 and self.row_before(place) == place


class Targets(NamedTuple):
    """A division of a block's channels, on the device; all int32."""

    rows: Tensor  # [sum of channels] a channel's place among its weight's selected ones, or -1 - its deferred row
    selected: Tensor  # [sum of selected] the channel of each place
    deferred: Tensor  # [sum of (channels - selected)] the channel of each deferred row


def targets(layout: BlockLayout, selected: Sequence[Tensor], deferred: Sequence[Tensor]) -> Targets:
    """The division that these channel numbers make, without waiting for the device.

    selected, deferred: for each weight int64 `[selected]` in the order of places and `[channels - selected]` ascending,
    which together name every channel once (not checked: that would wait).
    """
    for index, segment in enumerate(layout.segments):
        if selected[index].shape != (segment.selected,) or deferred[index].shape != (segment.deferred,):
            raise ValueError(
                f"weight {index} divides its {segment.channels} channels into {segment.selected} selected and "
                f"{segment.deferred} deferred, not {tuple(selected[index].shape)} and {tuple(deferred[index].shape)}"
            )
    nothing = torch.empty(0, dtype=torch.int64, device=layout.device)
    places, rows = torch.cat([nothing, *selected]), torch.cat([nothing, *deferred])
    return block_targets(layout, places + layout.first_channel_of_place, rows + layout.first_channel_of_row)


def block_targets(layout: BlockLayout, places: Tensor, rows: Tensor) -> Targets:
    """The same from int64 `[places]` and `[deferred channels]`: channels by number in the block, weight by weight."""
    where = torch.empty(layout.channels, dtype=torch.int32, device=layout.device)
    where.index_copy_(0, places, layout.place_numbers).index_copy_(0, rows, -1 - layout.row_numbers)
    return Targets(where, (places - layout.first_channel_of_place).int(), (rows - layout.first_channel_of_row).int())


class Part(NamedTuple):
    """A block's selected channels, or a group of residents, as AdamW steps them. Everything stays where it is in memory, but
    gradients that are in the memory that each step names: at a multiple of `ALIGNMENT` from where that begins."""

    layout: BlockLayout
    channels: Tensor  # [places] int32: the channel of each place, as `Targets.selected`; may name others at each step
    weights: Sequence[Tensor]  # all present
    master: Tensor  # [selected_numel] fp32, selected rows, as the next two
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor  # [places] int32
    grad: Tensor | int  # [selected_numel] in the weights' dtype, as `split` makes them; or where in each step's memory: bytes


class Update(Protocol):
    """AdamW of the parts that it was planned for."""

    def step(self, hypers: Sequence[Hyper | None], factors: Tensor, skip: Tensor, memory: Tensor | None = None) -> None:
        """One step of torch.optim.AdamW for the selected channels, unless `skip`, and the new masters into the weights.

        hypers: one for each weight of all parts in order, None where a weight takes no step: everything of it stays as it
        is; factors: fp32 `[weights]`, multiplied into the gradients first; skip: bool scalar. memory: uint8, of gradients
        that have their place in it; begins at a multiple of `ALIGNMENT`, and may be elsewhere in each step; None: of weights
        with such gradients none takes a step. Masters are rounded to the weights' dtype, ties to even. Only enqueues work
        on the current stream, and gives the same bits every time.

        With n = steps + 1, corrections in fp64 (their relative error stays below 1e-12), the rest in fp32:

            exp_avg    = beta1 exp_avg    + (1 - beta1) grad
            exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) grad^2
            direction  = exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^n) + eps)
            master     = (1 - lr weight_decay) master - lr / (1 - beta1^n) direction

        Raises:
            ValueError: arguments of other sizes or dtypes. Nothing has been enqueued.
        """
        ...


class Publisher(Protocol):
    """What `BlockKernel` says of arguments and errors holds here."""

    def publish(
        self, layout: BlockLayout, targets: Targets, weights: Sequence[Tensor | None], values: Tensor, low: int = 0
    ) -> None:
        """Write deferred rows, in the weights' dtype, into the deferred channels. Selected channels are not touched.

        values: of all deferred rows, or of a piece that begins at `low`.
        """
        ...


class BlockKernel(Publisher, Protocol):
    """What a step does on the device.

    Weights and gradients of one call have one dtype (fp32, bf16 or fp16), are contiguous and on the layout's device; flat
    buffers have exactly the layout's sizes. None stands for a weight that has no gradient in this call: its parts of all
    buffers stay as they are. Every method only enqueues work on the current stream, and gives the same bits every time.

    Raises:
        ValueError: tensors that contradict the layout. Nothing has been enqueued.
    """

    def warm_up(self, layout: BlockLayout, dtype: torch.dtype) -> None:
        """Build, compile and load everything that calls with this layout and dtype need. May wait for the device."""
        ...

    def split(
        self,
        layout: BlockLayout,
        targets: Targets,
        grads: Sequence[Tensor | None],
        squares: Tensor,
        selected: Tensor,
        deferred: Tensor,
        low: int = 0,
    ) -> None:
        """One pass over a block's gradients, into squares, selected and deferred (the gradients' dtype). NaN and inf pass.

        deferred: all of it, or a piece that begins at `low`. Squares and selected rows are written with the first piece, and
        only with it; others are written from what they need of the gradients.
        """
        ...

    def judging(self, evidence: Evidence, policy: Policy) -> Judging:
        """Judge calls by all this together. Builds, compiles and loads what that needs; may wait for the device."""
        ...

    def plan(self, parts: Sequence[Part]) -> Update:
        """AdamW of all these parts together. Builds, compiles and loads what its steps need; may wait for the device."""
        ...


def _starts(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    ends = tuple(accumulate(sizes))
    return (0, *ends[:-1])[: len(ends)], ends[-1] if ends else 0


def _counted(sizes: Sequence[int]) -> Tensor:
    """0, 1, 2, ... for each size: int32."""
    nobody = torch.empty(0, dtype=torch.int32, device="cpu")
    return torch.cat([nobody, *(torch.arange(size, dtype=torch.int32, device="cpu") for size in sizes)])


def _repeated(values: Sequence[int], times: Sequence[int]) -> Tensor:
    """Each value so many times: int64."""
    counts = torch.tensor(times, dtype=torch.int64, device="cpu")
    return torch.repeat_interleave(torch.tensor(values, dtype=torch.int64, device="cpu"), counts)
