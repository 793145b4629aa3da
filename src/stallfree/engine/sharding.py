"""Parameters spread over ranks (DTensors, as `fully_shard` makes them): this rank's part, and numbers summed over ranks.

The engine trains a rank's shard as if it were the whole parameter. Three things are different, and all of them are here: the
shard and its gradient lie inside DTensors, norms and scores are sums over the ranks that hold the other parts, and state is
saved as DTensors of the parameter's placements. Of a parameter that is no DTensor, everything here is the parameter itself.

Collectives run on the parameters' device only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from sys import getrefcount
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

Param = Any  # a parameter, which may be a DTensor: type checkers would not follow is_sharded()
Groups = tuple[Any, ...]  # process groups of a mesh's dimensions, one after the other

PLAIN = {Tensor, nn.Parameter}  # asked for first: hooks and step() come by for every parameter

# Of many tensors, one after the other, without a line of Python for each: map(LOCAL, tensors).
GRAD, LOCAL, SPEC, BASE, VERSION = map(attrgetter, ("grad", "_local_tensor", "_spec", "_base", "_version"))
DTYPE_SHAPE, LAYOUT_SHAPE = attrgetter("dtype", "shape"), attrgetter("layout", "shape")
FORM = attrgetter("dtype", "layout", "requires_grad", "device", "shape")

# Inside, nobody asks DTensors whether they answer for themselves, which they do not: their attributes are as quick as others'.
directly = torch._C.DisableTorchFunctionSubclass
storage_uses = torch._C._storage_Use_Count  # tensors that view a storage are counted nowhere else

_sharded_types: dict[type, bool] = dict.fromkeys(PLAIN, False)  # whether a type is DTensor's: asked all the time
_stand_ins: Any = WeakIdKeyDictionary()  # by parameter


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, which this asks without importing what would define it."""
    return _is_sharded_type(type(tensor))


def _is_sharded_type(kind: type) -> bool:
    answer = _sharded_types.get(kind)
    if answer is None:
        answer = _sharded_types[kind] = hasattr(kind, "device_mesh")
    return answer


def shard_of(param: Param) -> Tensor:
    """The rank's part of a parameter, in the parameter's own memory.

    Of a part without elements, a stand-in that nobody reads: one row (or column) of zeros. So every rank has the same weights
    and blocks, and takes part in the same sums.
    """
    if type(param) in PLAIN or not is_sharded(param):
        plain: Tensor = param
        return plain
    local: Tensor = param._local_tensor
    return local if local.numel() or not param.numel() else _stand_in(param, local)


def part_in(param: Param) -> Tensor:
    """The rank's part as it is, be it without elements."""
    local: Tensor = param._local_tensor if is_sharded(param) else param
    return local


def _stand_in(param: Param, local: Tensor) -> Tensor:
    held: Tensor | None = _stand_ins.get(param)
    if held is None or held.device != local.device or held.dtype != local.dtype:
        held = _stand_ins[param] = local.new_zeros([max(size, 1) for size in local.shape])
    return held


def is_stand_in(param: Param) -> bool:
    return is_sharded(param) and bool(param.numel()) and not param._local_tensor.numel()


def version_of(param: Param) -> int:
    """Grows with every write that torch counts: through the DTensor, or into the rank's part."""
    version: int = param._version
    return version if type(param) in PLAIN or not is_sharded(param) else version + param._local_tensor._version


def gradient_of(param: Param) -> Tensor | None:
    """What `.grad` holds of the rank's part."""
    grad = param.grad
    if grad is None or type(param) in PLAIN or not is_sharded(param):
        plain: Tensor | None = grad
        return plain
    if grad._spec is not param._spec and grad.placements != param.placements:
        grad = param.grad = grad.redistribute(placements=param.placements)
    local: Tensor = grad._local_tensor
    if type(local) is not Tensor and hasattr(local, "wait"):  # a collective is under way
        local = local.wait()
    if type(local) is Tensor and not local.numel() and is_stand_in(param):
        return torch.zeros_like(shard_of(param))
    return local


def gradients_of(params: Sequence[Param]) -> list[Tensor | None]:
    """What `gradient_of` gives for each, in one go where nothing is out of the ordinary."""
    grads: list[Any] = list(map(GRAD, params))
    kinds = set(map(type, grads))
    if not any(map(_is_sharded_type, kinds)):
        return grads
    if len(kinds) == 1 and all(map(is_, map(SPEC, grads), map(SPEC, params))):
        parts: list[Any] = list(map(LOCAL, grads))
        if set(map(type, parts)) == {Tensor} and all(map(Tensor.numel, parts)):
            return parts
    return [gradient_of(param) for param in params]


def _references(held: Sequence[Any]) -> int:
    return max(map(getrefcount, held), default=0)


ALONE = _references([object()])  # what Python counts for what nothing but one list holds


def are_alone(held: Sequence[Any], lists: int = 1) -> bool:
    """Whether nobody has any of these but so many lists or attributes."""
    # CPython (3.11 to 3.13) counts lists and attributes that hold an object; torch has one object for each tensor that is held.
    return _references(held) < ALONE + lists and not any(map(getweakrefcount, held))


def memory_of(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Tensors with all the memory of these: what they are views of, once, where they share it as fully_shard's gradients do."""
    there = [tensor for tensor in tensors if tensor is not None]
    bases = list(map(BASE, there))
    distinct = dict(zip(map(id, bases), bases, strict=True))
    own = [tensor for tensor, base in zip(there, bases, strict=True) if base is None] if id(None) in distinct else []
    return own + [base for base in distinct.values() if base is not None]


class OwnGradients:
    """Copies small gradients out of the buffers that they share with all others of their groups, so that these are free.

    fully_shard relies on gradients to outlive backward: their memory belongs to the stream of the reduce-scatter, which would
    use it again at once.

    The copies are written to where the last ones were, and what stands in `.grad` is what did then, if nobody has kept any of
    it: then both are as good as new.
    """

    def __init__(self, params: Sequence[Param]) -> None:
        self.params = [param for param in params if not is_stand_in(param)]  # of one dtype
        self._flat: Tensor | None = None  # the memory of the last copies
        self._uses = 0  # of it, if nobody else has any
        self._places: list[int] = []  # of those that had a gradient then
        self._kinds: list[Any] = []  # their gradients'
        self._parts: list[Tensor] = []  # their copies
        self._wholes: list[Tensor] = []  # what stands in `.grad` for these

    @classmethod
    def of(cls, params: Sequence[Param]) -> list[OwnGradients]:
        """One for each dtype."""
        dtypes = dict.fromkeys(param.dtype for param in params)
        return [cls([param for param in params if param.dtype is dtype]) for dtype in dtypes]

    def take(self) -> None:
        """Let what stands in `.grad` own its memory."""
        grads = gradients_of(self.params)
        places = [place for place, grad in enumerate(grads) if grad is not None]
        there = [grad for grad in grads if grad is not None]
        if not there:
            return
        if there[0].is_cuda:
            stream = torch.cuda.current_stream(there[0].device)
            for memory in memory_of(there):
                memory.record_stream(stream)
        kinds = list(map(DTYPE_SHAPE, there))
        flats = there if set(map(Tensor.dim, there)) == {1} else [grad.reshape(-1) for grad in there]
        if places == self._places and kinds == self._kinds and self._is_alone() and not any(map(is_, there, self._parts)):
            torch.cat(flats, out=self._flat)
        else:
            self._flat = torch.cat(flats)
            self._places, self._kinds = places, kinds
            parts = self._flat.split([grad.numel() for grad in there])
            self._parts = [part.view(grad.shape) for part, grad in zip(parts, there, strict=True)]
            self._wholes = [whole(self.params[place], part) for place, part in zip(places, self._parts, strict=True)]
            del parts
            self._uses = _uses(self._flat)
        for place, mine in zip(places, self._wholes, strict=True):
            self.params[place].grad = mine

    def _is_alone(self) -> bool:
        """Whether nobody has kept what stood in `.grad` last, or memory of it."""
        return are_alone(self._wholes) and are_alone(self._parts, 2) and _uses(self._flat) == self._uses


def _uses(tensor: Tensor | None) -> int:
    """Grows with each tensor that shares its memory, and with each holder of its storage, which Python has one object for."""
    if tensor is None:
        return 0
    storage = tensor.untyped_storage()
    return int(storage_uses(storage._cdata)) + getrefcount(storage)


def whole(param: Param, local: Tensor) -> Tensor:
    """The parameter-shaped tensor of which `local`, shaped like the rank's part, is the rank's part."""
    if not is_sharded(param):
        return local
    shape = part_in(param).shape
    if local.shape != shape:  # of a stand-in
        local = local[tuple(slice(size) for size in shape)]
    return _dtensor(param._spec, local, param.shape)


def whole_channels(param: Param, channels: tuple[int, int], local: Tensor) -> Tensor:
    """Likewise for one number per channel of the rank's part: in the shape of the rows' axes, or of the others.

    channels: `channel_dim`, and how many axes number the rows.
    """
    if not is_sharded(param):
        return local
    from torch.distributed.tensor import DTensor, Replicate

    part: DTensor = param._local_tensor
    channel_dim, rows = channels
    shape, mine = (size[:rows] if channel_dim == 0 else size[rows:] for size in (param.shape, part.shape))
    placements = []
    for placement in param.placements:
        axis = getattr(placement, "dim", None)
        if axis is None or (axis < rows) != (channel_dim == 0):
            placements.append(Replicate())
        else:
            placements.append(_moved(placement, axis - channel_dim * rows))
    spec = type(param._spec)(param.device_mesh, tuple(placements))
    return _dtensor(spec, local[: mine.numel()].view(mine), shape)


def _moved(placement: Any, axis: int) -> Any:
    """A sharded placement on another axis."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(axis) if factor is None else type(placement)(axis, split_factor=factor)


def _dtensor(spec: Any, local: Tensor, shape: torch.Size) -> Tensor:
    """As fully_shard makes them: unlike DTensor.from_local, this leaves host memory where it is."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    meta = spec.tensor_meta
    if meta is None or meta.shape != shape or meta.dtype != local.dtype:  # seldom of a gradient
        stride = torch.empty(shape, device="meta").stride()
        spec = replace(spec, tensor_meta=TensorMeta(shape, stride, local.dtype))
    tensor: Tensor = DTensor(local, spec, requires_grad=False)
    return tensor


def part_of(param: Param, saved: Any) -> Any:
    """The inverse: this rank's part of a tensor shaped like a parameter or its channels; zeros for a stand-in."""
    if not is_sharded(saved):
        return saved
    local = saved._local_tensor
    if local.numel() or not is_stand_in(param):
        return local
    return local.new_zeros([max(size, 1) for size in local.shape])


def of_this_rank(param: Param, entry: dict[str, Any]) -> dict[str, Any]:
    """State that is no part of something whole, by names that no other rank has."""
    return {f"{name}.{rank_in(param)}": (value,) for name, value in entry.items()} if is_sharded(param) else entry


def here(param: Param, saved: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter as this rank holds it: its parts of what is whole, and what it saved as its own."""
    entry = {name: part_of(param, value) for name, value in saved.items()}
    if is_sharded(param):
        mine = f".{rank_in(param)}"
        own = {name.removesuffix(mine): value[0] for name, value in saved.items() if name.endswith(mine)}
        entry = {name: value for name, value in entry.items() if "." not in name} | own
    return entry


# Layout


def layout_of(param: Param) -> str:
    """How a parameter is spread over ranks, for comparison; empty if it is not."""
    return f"{tuple(param.device_mesh.shape)} {param.placements}" if is_sharded(param) else ""


def rank_in(param: Param) -> int:
    """This rank's number among those that hold the parameter."""
    mesh = param.device_mesh
    number = 0
    for place, size in zip(mesh.get_coordinate(), mesh.shape, strict=True):
        number = number * size + place
    return number


def groups_of(param: Param, channels: tuple[int, int] | None = None) -> Groups:
    """The groups over which numbers of the parts add up: of the parameter, or of one of its channels (`whole_channels`)."""
    if not is_sharded(param):
        return ()
    groups = []
    for dim, placement in enumerate(param.placements):
        axis = getattr(placement, "dim", None)
        splits = axis is not None and (channels is None or (axis < channels[1]) == (channels[0] == 1))
        if splits and param.device_mesh.size(dim) > 1:
            groups.append(param.device_mesh.get_group(dim))
    return tuple(groups)


def check_sharding(param: Param, label: str) -> None:
    """Refuse DTensors that the optimizer cannot train."""
    if not is_sharded(param):
        return
    mesh, local = param.device_mesh, param._local_tensor
    if any(placement.is_partial() for placement in param.placements):
        raise TypeError(f"{label} has a partial placement, {param.placements}; its sum has to be made before it can be trained")
    if local.device.type not in (mesh.device_type, "meta"):
        raise TypeError(
            f"{label} is sharded over {mesh.device_type} devices and held in {local.device.type} memory (CPUOffloadPolicy?): "
            "the optimizer keeps its own state in host memory; use fully_shard without an offload_policy"
        )


# Numbers that add up


class RankSums:
    """Adds numbers up over ranks: one flat all-reduce for each set of groups, in the same order on every rank.

    runs: for neighbouring numbers, the groups over which they add up, and how many they are.
    """

    def __init__(self, runs: Sequence[tuple[Groups, int]], device: torch.device) -> None:
        members: dict[Groups, list[tuple[int, int]]] = {}
        start = 0
        for groups, count in runs:
            if groups:
                ranges = members.setdefault(groups, [])
                first = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
                ranges.append((first, start + count))
            start += count
        self._members: list[tuple[Groups, Tensor | None]] = []
        for groups, ranges in members.items():
            if ranges == [(0, start)]:
                self._members.append((groups, None))
            else:
                numbers = torch.cat([torch.arange(first, last, device=device) for first, last in ranges])
                self._members.append((groups, numbers))

    @property
    def needed(self) -> bool:
        return bool(self._members)

    def __call__(self, values: Tensor) -> Tensor:
        """values: one per number. In place, and returned."""
        for groups, numbers in self._members:
            part = values if numbers is None else values[numbers]
            for group in groups:
                torch.distributed.all_reduce(part, group=group)
            if numbers is not None:
                values[numbers] = part
        return values


class Agreement:
    """Makes all ranks of some parameters' meshes agree, where the sums leave room for a difference."""

    def __init__(self, params: Iterable[Param]) -> None:
        meshes = {param.device_mesh: None for param in params if is_sharded(param)}
        self.mesh: Any = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self.mixed = len({mesh.size() for mesh in meshes}) > 1

    @property
    def several(self) -> bool:
        return self.mesh is not None and self.mesh.size() > 1

    @property
    def _groups(self) -> Groups:
        return () if self.mesh is None else tuple(self.mesh.get_group(dim) for dim in range(self.mesh.ndim))

    def mean(self, number: Tensor) -> Tensor:
        """The same bits on all ranks. A parameter on a smaller mesh is there several times, and its copies may differ."""
        if self.mixed:
            assert self.mesh is not None
            number = number.clone()
            for group in self._groups:
                torch.distributed.all_reduce(number, group=group)
            number = number / self.mesh.size()
        return number

    def least(self, number: int, device: torch.device) -> int:
        """The least of all ranks' numbers. Waits for the device."""
        if not self.several:
            return number
        value = torch.tensor(number, dtype=torch.int64, device=device)
        for group in self._groups:
            torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN, group=group)
        return int(value)
