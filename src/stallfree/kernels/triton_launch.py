# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launching a Triton kernel again and again with other integers, without triton's search for the code at every launch.

`kernel[grid](...)` binds, types and hashes all arguments to find compiled code. Compiled code can be launched itself,
`compiled[grid](...)`, if it is right for every value of the arguments. Triton's code is not, by default: it is specialized
on integers' sizes, on 1 and on multiples of 16, and inside tuples `do_not_specialize` does not prevent that. So it is
compiled here for integers that invite no specialization, and looked at before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

PLAIN = 2**40 + 1  # takes 64 bits; no multiple of 16


NOTHING = nullcontext()


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which launches go to this device."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device(device)


class Launch:
    """One grid of one kernel: called with the kernel's integers (and tuples of integers), constants left out.

    The first call compiles and loads. Integers are taken as int64. The device must be current.
    """

    def __init__(self, kernel: Any, programs: int, constants: tuple, warps: int, registers: int | None = None) -> None:
        """registers: that a thread may have at most."""
        self._kernel, self._grid, self._constants = kernel, (programs, 1, 1), constants
        self._options = {"num_warps": warps, "maxnreg": registers}
        self._run: Callable[..., Any] | None = None
        self.is_direct = False  # until the first call

    def __call__(self, *integers: int | tuple[int, ...]) -> None:
        if self._run is None:
            direct = self._direct(integers)
            self.is_direct = direct is not None
            self._run = direct or self._ordinary()
        self._run(*integers, *self._constants)

    def _direct(self, integers: tuple[int | tuple[int, ...], ...]) -> Callable[..., Any] | None:
        """None if this version of triton has no such code, or if the code is not right for all integers."""
        if not hasattr(self._kernel, "device_caches"):  # interpreted
            return None
        plain = [(PLAIN,) * len(entry) if isinstance(entry, tuple) else PLAIN for entry in integers]
        compiled = self._kernel.warmup(*plain, *self._constants, grid=self._grid, **self._options)
        return compiled[self._grid] if takes_any_integers(compiled, len(integers)) else None

    def _ordinary(self) -> Callable[..., Any]:
        launch, options = self._kernel[self._grid], self._options
        return lambda *arguments: launch(*arguments, **options)


def takes_any_integers(compiled: object, integers: int) -> bool:
    """Whether compiled code takes its first arguments as int64 or tuples of them, and assumes nothing about their values."""
    source = getattr(compiled, "src", None)
    signature, attributes = getattr(source, "signature", None), getattr(source, "attrs", None)
    if not (isinstance(signature, dict) and isinstance(attributes, dict) and hasattr(compiled, "__getitem__")):
        return False
    types = list(signature.values())
    leaves = [leaf for entry in types[:integers] for leaf in (entry if isinstance(entry, tuple) else (entry,))]
    return (
        all(leaf == "i64" for leaf in leaves)
        and all(entry == "constexpr" for entry in types[integers:])
        and not any(attributes.values())
    )
