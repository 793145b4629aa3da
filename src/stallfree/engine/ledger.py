"""All parameters as this engine wrote them last: whoever else writes one is noticed by its address and its version.

Asked several times per call about every parameter, which is why plain ones are compared here and now, attribute by attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from stallfree.engine.sharding import PLAIN, Param, part_in, shard_of, version_of


class Written:
    """A parameter as it was seen last. Holding its memory keeps the allocator from giving the address to other contents."""

    __slots__ = ("address", "memory", "param", "part", "plain", "version")

    def __init__(self, param: nn.Parameter) -> None:
        shard = shard_of(param)
        self.param: Param = param
        self.memory = shard.detach()
        self.address, self.version = shard.data_ptr(), version_of(param)
        self.part: Tensor | None = None if type(param) in PLAIN else part_in(param)  # in a DTensor
        self.plain = shard.is_contiguous() and (self.part is None or shard is self.part)

    def touched(self) -> bool:
        """Whether somebody else has written it since, or put it elsewhere."""
        param, part = self.param, self.part
        if not self.plain or (part is not None and param._local_tensor is not part):
            return self.version != version_of(param) or self.moved()
        if part is None:
            return self.version != param._version or self.address != param.data_ptr() or not param.is_contiguous()
        return self.version != param._version + part._version or self.address != part.data_ptr() or not part.is_contiguous()

    def moved(self) -> bool:
        """Whether the parameter's memory is other memory now, or is read with other strides."""
        shard: Tensor = shard_of(self.param)
        return shard.data_ptr() != self.address or not shard.is_set_to(self.memory)


class Ledger:
    """What this engine wrote last, by parameter."""

    def __init__(self) -> None:
        self._entries: dict[int, Written] = {}  # by id: tensors are slow to look up

    def __contains__(self, param: nn.Parameter) -> bool:
        return id(param) in self._entries

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (entry.param for entry in self._entries.values())

    def see(self, param: nn.Parameter) -> bool:
        """A parameter, as and where it is now, is as this engine wrote it. Returns whether it was elsewhere before."""
        before = self._entries.get(id(param))
        self._entries[id(param)] = Written(param)
        return before is not None and before.moved()

    def mark(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """What all or some hold now was written by this engine since they were looked at."""
        some = self._entries.values() if params is None else [self._entries[id(param)] for param in params]
        for entry in some:
            if entry.plain:
                entry.version = entry.param._version + (0 if entry.part is None else entry.part._version)
            else:
                entry.version = version_of(entry.param)

    def untouched(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether nobody else has written these since, in a way that torch notices, or put them elsewhere."""
        return not any(self._entries[id(param)].touched() for param in params)

    def touched(self) -> list[nn.Parameter]:
        """Those that somebody else has written since, or put elsewhere."""
        return [entry.param for entry in self._entries.values() if entry.touched()]

    def in_place(self, param: nn.Parameter) -> bool:
        """Whether a parameter's memory is where it was."""
        entry = self._entries[id(param)]
        return entry.address == (param if entry.part is None else shard_of(param)).data_ptr()

    def clear(self) -> None:
        """Let go of the memory, of a model that may move from now on."""
        self._entries.clear()
