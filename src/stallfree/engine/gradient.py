"""What stands in `.grad` once a gradient has been staged: a handle without memory that still answers for it.

`torch.nn.utils.clip_grad_norm_` skips parameters whose `.grad` is None, in silence. The handle lets unmodified training
code clip exactly: norms come from the channel sums that staging made, scaling is kept as a factor, and a further backward
pass adds to what is staged. Whatever it cannot answer raises and names the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from stallfree.engine.blocks import Weight, describe
from stallfree.engine.sharding import is_sharded

aten = torch.ops.aten


class Owner(Protocol):
    """The engine, as a staged gradient sees it."""

    def norm(self, staged: Staged) -> Tensor:
        """L2 norm before `factor`: a scalar on the device."""
        ...

    def scaled(self, factor: Tensor | None, by: Tensor | float) -> Tensor:
        """The product, a scalar on the device."""
        ...

    def check_scalable(self, staged: Staged) -> None: ...

    def cleared(self) -> None:
        """Some handle has become zero."""
        ...

    def restage(self, staged: Staged, grad: Tensor | float, alpha: float) -> None: ...

    def full_gradient(self, staged: Staged) -> Tensor: ...


class StagedCall:
    """The call that a block's gradients are staged for: they are consumed together."""

    __slots__ = ("consumed", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.consumed = False  # applied by step(); only zero_grad() may follow


class Staged:
    """One weight's gradient of one call: selected rows on the device, deferred rows in a slot."""

    __slots__ = ("_owner", "call", "factor", "weight", "zero")

    def __init__(self, weight: Weight, call: StagedCall, owner: Owner) -> None:
        self.weight, self.call, self._owner = weight, call, owner
        self.factor: Tensor | None = None  # what user code multiplied the gradient by since
        self.zero = False  # zeroed by user code, and nothing added since

    @property
    def consumed(self) -> bool:
        return self.call.consumed

    def leave(self) -> None:
        """Another gradient takes its place, or none: it will not be consumed with those of its call."""
        self.call = StagedCall(self.call.number)

    def norm(self) -> Tensor:
        """L2 norm of the whole gradient: fp32 scalar on the device."""
        if self.zero:
            return torch.zeros((), dtype=torch.float32, device=self.weight.shard.device)
        norm = self._owner.norm(self)
        return norm if self.factor is None else norm * self.factor.abs()

    def scale(self, factor: Tensor | float) -> None:
        self._owner.check_scalable(self)
        if isinstance(factor, Tensor) and factor.numel() != 1:
            raise RuntimeError(_way_out(self, "scaling by anything but a single number"))
        self.factor = self._owner.scaled(self.factor, factor)

    def add(self, grad: Tensor | float, alpha: float) -> None:
        if isinstance(grad, Tensor) and grad.numel() == 0:  # of a shard without elements
            grad = 0.0
        self._owner.restage(self, grad, alpha)

    def clear(self) -> None:
        self.zero, self.factor = True, None
        self._owner.cleared()

    def full(self) -> Tensor:
        return self._owner.full_gradient(self)


class StagedGradient(torch.Tensor):
    """A tensor of the parameter's shape, dtype and device that owns no memory; see the module's docstring.

    Of a sharded parameter it stands for the rank's part, inside the DTensor that is `.grad`: what DTensor works out from parts
    (norms, scaling, accumulation by fully_shard) works out from handles.
    """

    staged: Staged

    @staticmethod
    def __new__(cls, staged: Staged, dtype: torch.dtype | None = None, device: torch.device | None = None) -> StagedGradient:
        shape, strides, own_dtype, own_device = staged.weight.form
        handle = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype or own_dtype, device=device or own_device
        )
        handle.staged = staged
        return handle

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StagedGradient({self.staged.weight.name or tuple(self.shape)}, call {self.staged.call.number})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(_way_out(self.staged, "saving or copying"))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = ANSWERS.get(func)
        if answer is None:
            handle = next(arg for arg in _flat(args) + _flat(tuple((kwargs or {}).values())) if isinstance(arg, StagedGradient))
            raise RuntimeError(_way_out(handle.staged, str(func)))
        return answer(*args, **(kwargs or {}))


def _way_out(staged: Staged, what: str) -> str:
    name = describe(staged.weight.name, staged.weight.param)
    replicas = torch.distributed.is_available() and torch.distributed.is_initialized() and not is_sharded(staged.weight.param)
    if replicas and what == "aten.mul.out":
        return (
            f"DistributedDataParallel cannot be used, which computes with gradients of its own ({what} on that of {name}): "
            "shard the model with fully_shard before the optimizer is built (docs/fsdp.md), or use stallfree finetune --nproc"
        )
    if "clamp" in what:
        return (
            f"{what} is not possible on the gradient of {name}, whose deferred part is in host memory: clip by norm instead "
            "(clip_grad_norm_, or max_grad_norm of the optimizer)"
        )
    return (
        f"{what} is not possible on the gradient of {name}: it is staged, with its deferred part in host memory. Norms, "
        "clipping by norm and scaling by a number work as usual; for the plain tensor call optimizer.full_gradient(param)"
    )


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]


# What a handle can answer


def _vector_norm(
    self: StagedGradient, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if ord != 2 or dim is not None or keepdim:
        raise RuntimeError(_way_out(self.staged, f"a norm of order {ord}, or along one dimension,"))
    norm = self.staged.norm()
    return norm if dtype is None else norm.to(dtype)


def _foreach(one: Callable[..., Any], plain: Callable[..., Any], in_place: bool = True) -> Callable[..., Any]:
    """Answer a list operation handle by handle, and the plain tensors in the list as usual."""

    def answer(tensors: list[Tensor], second: Any = None, *rest: Any, **kwargs: Any) -> list[Any] | None:
        results = []
        for place, tensor in enumerate(tensors):
            value = second[place] if isinstance(second, (list, tuple)) else second
            args = (tensor,) if second is None else (tensor, value)
            results.append((one if isinstance(tensor, StagedGradient) else plain)(*args, *rest, **kwargs))
        return None if in_place else results

    return answer


def _mul_(self: StagedGradient, other: Tensor | float) -> StagedGradient:
    self.staged.scale(other)
    return self


def _div_(self: StagedGradient, other: Tensor | float) -> StagedGradient:
    inverse = torch.as_tensor(other, dtype=torch.float32, device=None if isinstance(other, Tensor) else "cpu").reciprocal()
    self.staged.scale(inverse if isinstance(other, Tensor) else inverse.item())
    return self


def _add_(self: Tensor, other: Any, alpha: float = 1) -> Tensor:
    if not isinstance(self, StagedGradient):
        raise RuntimeError(_way_out(other.staged, "adding it to a tensor"))
    self.staged.add(other, alpha)
    return self


def _sub_(self: Tensor, other: Any, alpha: float = 1) -> Tensor:
    return _add_(self, other, -alpha)


def _unscale_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """What torch.amp.GradScaler asks: undo the scaling of the loss, and note on the device whether anything is not finite."""
    handles = [grad for grad in grads if isinstance(grad, StagedGradient)]
    norms = torch.stack([handle.staged.norm() for handle in handles])
    for handle in handles:
        handle.staged.scale(inv_scale)
    found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(norms)).any()))
    plain = [grad for grad in grads if not isinstance(grad, StagedGradient)]
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)


def _to_copy(
    self: StagedGradient, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> StagedGradient:
    """What model.to() asks of every gradient. An applied one has nothing left to convert."""
    if not self.staged.consumed:
        raise RuntimeError(_way_out(self.staged, "converting or moving (zero_grad() before model.to() avoids it)"))
    return StagedGradient(self.staged, dtype or self.dtype, device or self.device)


def _zero_(self: StagedGradient) -> StagedGradient:
    self.staged.clear()
    return self


ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach(_vector_norm, torch.linalg.vector_norm, in_place=False),
    aten.mul_.Tensor: _mul_,
    aten.mul_.Scalar: _mul_,
    aten.div_.Tensor: _div_,
    aten.div_.Scalar: _div_,
    aten._foreach_mul_.Scalar: _foreach(_mul_, torch.Tensor.mul_),
    aten._foreach_mul_.Tensor: _foreach(_mul_, torch.Tensor.mul_),
    aten._foreach_mul_.ScalarList: _foreach(_mul_, torch.Tensor.mul_),
    aten._foreach_div_.Scalar: _foreach(_div_, torch.Tensor.div_),
    aten._foreach_div_.Tensor: _foreach(_div_, torch.Tensor.div_),
    aten._foreach_div_.ScalarList: _foreach(_div_, torch.Tensor.div_),
    aten.add_.Tensor: _add_,  # what another backward pass calls
    aten.add_.Scalar: _add_,
    aten.sub_.Tensor: _sub_,
    aten.sub_.Scalar: _sub_,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale_,
    aten._to_copy.default: _to_copy,
    aten.zero_.default: _zero_,
    aten._foreach_zero_.default: _foreach(_zero_, torch.Tensor.zero_),
    aten.detach.default: lambda self: StagedGradient(self.staged),
    aten.detach_.default: lambda self: self,
}
