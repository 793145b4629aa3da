"""AdamW of all selected and resident channels in Triton: a few launches per step, however many blocks there are.

Everything that stays where it is, weights included, is named by device tables. Which weights take a step travels as kernel
arguments, words of a bit mask. So does the address of the memory that gradients of blocks are in: a table says which gradient
has its place there, and which an address of its own. And so does a `Hyper`, of which there are few: one launch for each
advances counts and works out coefficients; then one launch for each kind of weight (dtype, axis, alignment) does AdamW.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from stallfree.kernels import driver
from stallfree.kernels.block import Part, Segment
from stallfree.kernels.checks import Planned, check_step
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.triton_functions import adamw_kernel, count_kernel
from stallfree.kernels.triton_launch import Launch, launch_all
from stallfree.kernels.triton_tables import LANGUAGE_DTYPES, Table, Tile, Tiling, programs, table

COUNT_PLACES = 128  # the share of one program
SETTINGS = 8  # room for a weight's coefficients; two for each of its places follow
WORD, WORDS = 60, 8  # weights in a word of the mask; words in a launch
REGISTERS = 128  # for aligned weights: with the compiler's own 164, a multiprocessor would hold 3 programs instead of 4
EMPTY = 1 << 62 | 1  # a word without weights: whatever weights it gets, it takes 64 bits and is no multiple of 16
PATTERNS = 64  # of present weights and shared settings that are remembered

Mask = tuple[int, ...]


class _Kind(NamedTuple):
    """What compiles to different code."""

    dtype: torch.dtype
    columns: bool
    aligned: bool  # moves 16 bytes at a time

    @property
    def unit(self) -> int:
        return 8 if self.aligned else 1

    def tile(self, tiling: Tiling) -> Tile:
        return tiling.column_state if self.columns else tiling.row_state


class _Weight(NamedTuple):
    """A weight with selected channels. From `channel_of` on: addresses."""

    number: int  # among all of the update
    segment: Segment
    kind: _Kind
    channel_of: int
    steps: int
    elements: tuple[int, ...]  # of master, exp_avg, exp_avg_sq, gradient, weight
    moves: bool  # the gradient's is a place in each step's memory


def _weight(number: int, part: Part, index: int) -> _Weight:
    layout, weight = part.layout, part.weights[index]
    segment, item = layout.segments[index], weight.dtype.itemsize
    place, element = layout.place_starts[index], layout.selected_starts[index]
    channel_of, steps = (flat.data_ptr() + 4 * place for flat in (part.channels, part.steps))
    state = [flat.data_ptr() + 4 * element for flat in (part.master, part.exp_avg, part.exp_avg_sq)]
    moves = isinstance(part.grad, int)  # from an address that is a multiple of what is asked here
    first, shown = part.grad if isinstance(part.grad, int) else part.grad.data_ptr(), weight.data_ptr()
    grad = first + item * element
    columns = segment.channel_dim == 1
    rounded = [grad] if columns else [grad, shown]  # moved 4 elements at a time, as the state; columns are written singly
    aligned = segment.length % 8 == 0 and all(address % 16 == 0 for address in state)
    aligned = aligned and all(address % (4 * item) == 0 for address in rounded)
    return _Weight(number, segment, _Kind(weight.dtype, columns, aligned), channel_of, steps, (*state, grad, shown), moves)


class _Portion:
    """As many weights as one launch has mask bits for, and the launches that step them."""

    def __init__(self, weights: Sequence[_Weight], settings: Sequence[int], tiling: Tiling, device: torch.device) -> None:
        """settings: the addresses of the weights' coefficients."""
        self._bits = {weight.number: bit for bit, weight in enumerate(weights)}
        self._words = triton.next_power_of_2(triton.cdiv(len(weights), WORD))  # few lengths, few compilations
        counts: list[Tensor] = []
        rows: dict[_Kind, list[Tensor]] = defaultdict(list)
        numbers: dict[_Kind, list[int]] = defaultdict(list)
        for bit, (weight, address) in enumerate(zip(weights, settings, strict=True)):
            segment, kind = weight.segment, weight.kind
            place = bit // WORD * 64 + bit % WORD + 1
            inner = triton.cdiv(segment.selected, COUNT_PLACES)
            counts.append(programs(place, inner, 1, segment.selected, weight.number, weight.steps, address))
            tile = kind.tile(tiling)
            grid = (triton.cdiv(segment.selected, tile.channels), triton.cdiv(segment.length, tile.length))
            geometry = (segment.length // kind.unit, segment.channels, segment.selected)
            rows[kind].append(programs(place, *grid, *geometry, weight.channel_of, address, *weight.elements, weight.moves))
            numbers[kind].append(weight.number)
        self.count_table = table(counts, device)
        self.count = Launch(count_kernel, self.count_table.programs, (COUNT_PLACES,), 4)
        self.states: list[tuple[Launch, Table, Mask]] = []  # by kind, with the weights of that kind
        for kind, mine in rows.items():
            tiles, tile = table(mine, device), kind.tile(tiling)
            constants = (LANGUAGE_DTYPES[kind.dtype], kind.aligned, kind.columns, kind.unit, tile.channels, tile.length)
            launch = Launch(adamw_kernel, tiles.programs, constants, tile.warps, REGISTERS if kind.aligned else None)
            self.states.append((launch, tiles, self.mask(numbers[kind])))

    def mask(self, numbers: Iterable[int]) -> Mask:
        """The mask of those of these weights that are here."""
        words = [EMPTY] * self._words
        for bit in map(self._bits.get, numbers):
            if bit is not None:
                words[bit // WORD] |= 2 << bit % WORD
        return tuple(words)


class _Arrangement(NamedTuple):
    """The launches of a step whose present weights share their settings in some way."""

    counts: tuple[tuple[Launch, int, int, Mask], ...]  # with the table's address and the place of its settings
    states: tuple[tuple[Launch, int, Mask], ...]


@lru_cache(maxsize=1024)
def _bits(hyper: Hyper) -> tuple[int, ...]:
    """The bits of each setting as a double: as floating-point arguments they would arrive in fp32."""
    return struct.unpack("5q", struct.pack("5d", *hyper))


class TritonUpdate:
    """`Update` in Triton. Steps must be ordered on the device: coefficients pass through scratch memory.

    Weights are found by their addresses of when this was built, and kept alive. A step that arranges present weights and
    shared settings as a recent one did costs no more than its launches.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device, tiling: Tiling) -> None:
        self._planned = Planned.of(parts)
        if self._planned.device not in (None, device):
            raise ValueError(f"the parts are on {parts[0].layout.device}, the kernel on {device}")
        self._parts, self._device = tuple(parts), device
        pairs = [(part, index) for part in parts for index in range(len(part.weights))]
        weights = [_weight(number, *pair) for number, pair in enumerate(pairs)]
        weights = [weight for weight in weights if weight.segment.selected]
        ends = list(accumulate((SETTINGS + 2 * weight.segment.selected for weight in weights), initial=0))
        self._coefficients = torch.zeros(max(ends[-1], 1), dtype=torch.float32, device=device)
        settings = [self._coefficients.data_ptr() + 4 * end for end in ends[:-1]]
        size = WORD * WORDS
        starts = range(0, len(weights), size)
        self._portions = [_Portion(weights[i : i + size], settings[i : i + size], tiling, device) for i in starts]
        self._patterns: dict[tuple[int, ...], _Arrangement] = {}
        self._pattern: tuple[int, ...] = ()  # of the last step: of each weight the place of its settings, -1: takes no step
        self._firsts: list[int] = []  # of each place the first weight
        self._hypers: list[Hyper | None] = []
        self._settings: list[tuple[int, ...]] = []
        self._arrangement = _Arrangement((), ())
        self._load()

    def step(self, hypers: Sequence[Hyper | None], factors: Tensor, skip: Tensor, memory: Tensor | None = None) -> None:
        check_step(self._planned, hypers, factors, skip, memory)
        hypers = list(hypers)
        if hypers != self._hypers:  # quick where they are the same objects
            self._arrange(hypers)
        factor, flag, settings = factors.data_ptr(), skip.data_ptr(), self._settings
        base = 0 if memory is None else memory.data_ptr()
        counts, states = self._arrangement
        launches: list[tuple[Launch, tuple[int | Mask, ...]]] = [
            (launch, (tiles, factor, flag, *settings[place], mask)) for launch, tiles, place, mask in counts
        ]
        launches += [(launch, (tiles, base, flag, mask)) for launch, tiles, mask in states]
        if launches:
            with driver.current_device(self._device):
                launch_all(*launches)

    def _load(self) -> None:
        """Compile and load, by launches in which no weight is present."""
        flag = self._coefficients.data_ptr()  # read whatever the step
        with driver.current_device(self._device):
            for portion in self._portions:
                nobody = portion.mask(())
                portion.count(portion.count_table.address, 0, flag, *_bits(Hyper(0.0, 0.0, 0.0, 0.0, 0.0)), nobody)
                for launch, tiles, _ in portion.states:
                    launch(tiles.address, 0, flag, nobody)

    def _arrange(self, hypers: list[Hyper | None]) -> None:
        """Prepare steps with these settings."""
        shared = [hyper for hyper in map(hypers.__getitem__, self._firsts) if hyper is not None]
        if len(shared) == len(self._firsts) and [*map([*shared, None].__getitem__, self._pattern)] == hypers:  # -1: None
            self._hypers, self._settings = hypers, [*map(_bits, shared)]  # arranged as before
            return
        names = list(map(id, hypers))
        objects = dict(zip(names, hypers, strict=True))  # few: mostly one for each group of parameters
        places: dict[Hyper, int] = {}
        place_of = {name: -1 if hyper is None else places.setdefault(hyper, len(places)) for name, hyper in objects.items()}
        pattern = tuple(map(place_of.__getitem__, names))
        arrangement = self._patterns.get(pattern)
        if arrangement is None:
            if len(self._patterns) >= PATTERNS:
                self._patterns.clear()
            arrangement = self._patterns[pattern] = self._arrangement_of(pattern)
        self._pattern, self._firsts = pattern, [pattern.index(place) for place in range(len(places))]
        self._hypers, self._arrangement, self._settings = hypers, arrangement, [_bits(hyper) for hyper in places]

    def _arrangement_of(self, pattern: tuple[int, ...]) -> _Arrangement:
        counts, states = [], []
        numbers = defaultdict(list)
        for number, place in enumerate(pattern):
            if place >= 0:
                numbers[place].append(number)
        for portion in self._portions:
            nobody = portion.mask(())
            present = nobody
            for place, mine in numbers.items():
                mask = portion.mask(mine)
                if mask != nobody:
                    counts.append((portion.count, portion.count_table.address, place, mask))
                    present = tuple(word | more for word, more in zip(present, mask, strict=True))
            for launch, tiles, members in portion.states:
                if any(word & member != EMPTY for word, member in zip(present, members, strict=True)):
                    states.append((launch, tiles.address, present))
        return _Arrangement(tuple(counts), tuple(states))
