# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launching a Triton kernel again and again with other integers, without triton's search for the code at every launch.

`kernel[grid](...)` binds, types and hashes all arguments to find compiled code. Compiled code can be launched itself,
`compiled[grid](...)`, if it is right for every value of the arguments. Triton's code is not, by default: it is specialized
on integers' sizes, on 1 and on multiples of 16, and inside tuples `do_not_specialize` does not prevent that. So it is
compiled here for integers that invite no specialization, and looked at before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from stallfree.kernels import driver

PLAIN = 2**40 + 1  # takes 64 bits; no multiple of 16


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
        self.code: Code | None = None  # for the driver itself

    def __call__(self, *integers: int | tuple[int, ...]) -> None:
        if self._run is None:
            self._run = self._prepared(integers)
        self._run(*integers, *self._constants)

    def _prepared(self, integers: tuple[int | tuple[int, ...], ...]) -> Callable[..., Any]:
        compiled = self._compiled(integers)
        if compiled is None:
            launch, options = self._kernel[self._grid], self._options
            return lambda *arguments: launch(*arguments, **options)
        self.is_direct = True
        direct: Callable[..., Any] = compiled[self._grid]  # loads
        count = sum(len(entry) if isinstance(entry, tuple) else 1 for entry in integers)
        self.code = code_of(compiled, self._grid[0], count)
        return direct

    def _compiled(self, integers: tuple[int | tuple[int, ...], ...]) -> Any:
        """None if this version of triton has no such code, or if the code is not right for all integers."""
        if not hasattr(self._kernel, "device_caches"):  # interpreted
            return None
        plain = [(PLAIN,) * len(entry) if isinstance(entry, tuple) else PLAIN for entry in integers]
        compiled = self._kernel.warmup(*plain, *self._constants, grid=self._grid, **self._options)
        return compiled if takes_any_integers(compiled, len(integers)) else None


class Code(NamedTuple):
    """Loaded code, as the driver launches it."""

    function: int
    programs: int
    threads: int
    shared: int  # bytes
    scratch: tuple[int, ...]  # addresses that follow the integers: of memory that it does not use

    def command(self, stream: int, integers: tuple[int, ...]) -> driver.Command:
        return driver.launch(self.function, self.programs, self.threads, self.shared, stream, integers + self.scratch)


def launch_all(*launches: tuple[Launch, tuple[int | tuple[int, ...], ...]]) -> None:
    """Several launches, each with its integers: in one call of the driver, if it can launch all of them."""
    codes = [launch.code for launch, _ in launches]
    if all(codes):
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        driver.run(*(code.command(stream, _flat(entry)) for code, (_, entry) in zip(codes, launches, strict=True) if code))
    else:
        for launch, integers in launches:
            launch(*integers)


def _flat(integers: tuple[int | tuple[int, ...], ...]) -> tuple[int, ...]:
    flat: list[int] = []
    for entry in integers:
        if isinstance(entry, tuple):
            flat += entry
        else:
            flat.append(entry)
    return tuple(flat)


def code_of(compiled: Any, programs: int, integers: int) -> Code | None:
    """What the driver needs to launch loaded code with so many integers; None if it needs more than this."""
    metadata, function = getattr(compiled, "metadata", None), getattr(compiled, "function", None)
    shared, warps = (getattr(metadata, name, None) for name in ("shared", "num_warps"))
    unusual = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "tensordesc_meta")
    if not (isinstance(function, int) and isinstance(shared, int) and isinstance(warps, int)):
        return None
    if any(getattr(metadata, name, None) for name in unusual) or getattr(metadata, "num_ctas", 1) != 1:
        return None
    sizes = driver.parameter_sizes(function)
    if sizes is None or set(sizes) != {8} or not integers <= len(sizes) <= min(integers + 2, driver.MOST_PARAMETERS):
        return None
    return Code(function, programs, 32 * warps, shared, (0,) * (len(sizes) - integers))


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
