"""All parameters as this engine wrote them last: whoever else writes one is noticed by its address and its version.

Asked in each call about every parameter: all are looked at together, without a line of Python for each, and one by one only if
something is not as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Sequence
from operator import add

import torch
from torch import Tensor, nn

from stallfree.engine.sharding import LOCAL, VERSION, Param, is_sharded, part_in, shard_of, version_of


class Written:
    """A parameter as it was seen last. Holding its memory keeps the allocator from giving the address to other contents."""

    __slots__ = ("address", "memory", "param", "place", "plain")

    def __init__(self, param: nn.Parameter, place: int) -> None:
        shard = shard_of(param)
        self.param: Param = param
        self.place = place  # in the ledger's lists
        self.memory, self.address = shard.detach(), shard.data_ptr()
        self.plain = shard.is_contiguous() and shard is part_in(param)  # address and contiguity of the part say where it is

    def moved(self) -> bool:
        """Whether the parameter's memory is other memory now, or is read with other strides."""
        shard: Tensor = shard_of(self.param)
        return shard.data_ptr() != self.address or not shard.is_set_to(self.memory)


class Ledger:
    """What this engine wrote last, by parameter."""

    def __init__(self) -> None:
        self._entries: dict[int, Written] = {}  # by id: tensors are slow to look up
        # Of all of them, in order:
        self._params: list[Param] = []
        self._versions: list[int] = []
        self._addresses: list[int] = []  # of the rank's parts
        self._contiguous: list[bool] = []  # likewise
        self._odd: list[Written] = []  # of which address and contiguity do not say where they are
        self._some_sharded = self._some_plain = False  # whether there are DTensors among them, and others

    def __contains__(self, param: nn.Parameter) -> bool:
        return id(param) in self._entries

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._params)

    @property
    def ids(self) -> KeysView[int]:
        return self._entries.keys()

    def see(self, param: nn.Parameter) -> bool:
        """A parameter, as and where it is now, is as this engine wrote it. Returns whether it was elsewhere before."""
        before = self._entries.get(id(param))
        place = len(self._params) if before is None else before.place
        entry = self._entries[id(param)] = Written(param, place)
        part, here = part_in(param), slice(place, place + 1)  # the end, if it is new
        self._params[here], self._versions[here] = [param], [version_of(param)]
        self._addresses[here], self._contiguous[here] = [part.data_ptr()], [part.is_contiguous()]
        self._odd = [odd for odd in self._odd if odd is not before] + ([] if entry.plain else [entry])
        sharded = is_sharded(param)
        self._some_sharded, self._some_plain = self._some_sharded or sharded, self._some_plain or not sharded
        return before is not None and before.moved()

    def mark(self, params: Sequence[nn.Parameter] | None = None) -> None:
        """What all or some hold now was written by this engine since they were looked at."""
        if params is None:
            self._versions = self._versions_of(self._params, self._parts(self._params))
        else:
            versions = self._versions_of(params, self._parts(params))
            for param, version in zip(params, versions, strict=True):
                self._versions[self._entries[id(param)].place] = version

    def untouched(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether nobody else has written these since, in a way that torch notices, or put them elsewhere."""
        entries = [self._entries[id(param)] for param in params]
        return self._as_before(params, [entry.place for entry in entries]) and not any(
            entry.moved() for entry in entries if not entry.plain
        )

    def touched(self) -> list[nn.Parameter]:
        """Those that somebody else has written since, or put elsewhere."""
        if self._as_before(self._params):
            return [odd.param for odd in self._odd if odd.moved()]
        seen = zip(self._entries.values(), self._versions, strict=True)
        return [entry.param for entry, version in seen if version != version_of(entry.param) or entry.moved()]

    def _as_before(self, params: Sequence[Param], places: Sequence[int] | None = None) -> bool:
        """Whether all, or those in some places, are as they were seen, as far as version, address and contiguity say."""
        versions, addresses, contiguous = self._versions, self._addresses, self._contiguous
        if places is not None:
            versions = [versions[place] for place in places]
            addresses = [addresses[place] for place in places]
            contiguous = [contiguous[place] for place in places]
        parts = self._parts(params)
        return (
            versions == self._versions_of(params, parts)
            and addresses == list(map(Tensor.data_ptr, parts))
            and contiguous == list(map(Tensor.is_contiguous, parts))
        )

    def _parts(self, params: Sequence[Param]) -> Sequence[Tensor]:
        """The rank's."""
        if self._some_sharded and self._some_plain:
            return list(map(part_in, params))
        return list(map(LOCAL, params)) if self._some_sharded else params

    def _versions_of(self, params: Sequence[Param], parts: Sequence[Tensor]) -> list[int]:
        if self._some_sharded and self._some_plain:
            return list(map(version_of, params))
        own = map(VERSION, params)
        return list(map(add, own, map(VERSION, parts)) if self._some_sharded else own)

    def in_place(self, param: nn.Parameter) -> bool:
        """Whether a parameter's memory is where it was."""
        return self._entries[id(param)].address == shard_of(param).data_ptr()

    def clear(self) -> None:
        """Let go of the memory, of a model that may move from now on."""
        for of_all in (self._entries, self._params, self._versions, self._addresses, self._contiguous, self._odd):
            of_all.clear()
        self._some_sharded = self._some_plain = False


def adopt_weights(master: Tensor, weights: Tensor) -> None:
    """Take weights as the new masters, except where a master still rounds to its weight and so knows it better."""
    master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights.to(torch.float32)))
