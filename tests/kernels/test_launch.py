"""Compiled kernels are launched directly only where that is right for every integer."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from stallfree.kernels.driver import current_device
from stallfree.kernels.triton_launch import Launch, takes_any_integers


class Kernel:
    """Compiles to code with this signature; notes launches."""

    def __init__(self, signature, attributes=None):
        self.calls, self.device_caches = [], {}
        self.src = SimpleNamespace(signature=signature, attrs=attributes or {})

    def warmup(self, *arguments, grid, **options):
        self.calls.append(("compiled", grid, arguments))
        return Code(self)

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append(("ordinary", grid, arguments))


class Code:
    def __init__(self, kernel):
        self.kernel, self.src = kernel, kernel.src

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.calls.append(("direct", grid, arguments))


@pytest.mark.parametrize(
    "signature, attributes, expected",
    [
        (("i64", ("i64", "i64"), "constexpr"), {}, True),
        (("i64", ("i64", "i64"), "constexpr"), {(0,): []}, True),
        (("i64", ("i64", "i64"), "constexpr"), {(1, 0): [["tt.divisibility", 16]]}, False),
        (("i64", ("i64", "constexpr"), "constexpr"), {}, False),  # a 1 became a constant
        (("i64", ("i64", "i32"), "constexpr"), {}, False),  # room for a small number only
        (("i32", ("i64", "i64"), "constexpr"), {}, False),
        (("i64", ("i64", "i64"), "i64"), {}, False),
    ],
)
def test_specialized_code_is_not_for_all_integers(signature, attributes, expected):
    code = Code(Kernel(dict(zip("abc", signature, strict=True)), attributes))
    assert takes_any_integers(code, integers=2) == expected


def test_code_that_cannot_be_looked_at_is_not_used():
    assert not takes_any_integers(None, 1)
    assert not takes_any_integers(SimpleNamespace(src=SimpleNamespace()), 1)
    assert not takes_any_integers(SimpleNamespace(src=SimpleNamespace(signature={"a": "i64"}, attrs={})), 1)


def test_direct_launches_pass_everything_and_compile_once_for_neutral_integers():
    kernel = Kernel({"a": "i64", "b": ("i64", "i64"), "C": "constexpr"})
    launch = Launch(kernel, 5, ("constant",), warps=4)
    launch(1, (16, 2**40))
    launch(3, (0, 1))
    (kind, grid, (a, b, constant)), *calls = kernel.calls
    assert (kind, grid, constant) == ("compiled", (5, 1, 1), "constant")
    assert all(number % 16 and 2**31 <= number < 2**63 for number in (a, *b))
    assert calls == [("direct", grid, (1, (16, 2**40), "constant")), ("direct", grid, (3, (0, 1), "constant"))]


def test_other_versions_of_triton_launch_as_usual():
    for kernel in (Kernel({"a": "i32", "C": "constexpr"}), Kernel({"a": "i64"}, {(0,): ["divisible"]})):
        Launch(kernel, 5, ("constant",), warps=4)(7)
        assert kernel.calls[-1] == ("ordinary", (5, 1, 1), (7, "constant"))


@pytest.mark.gpu
def test_this_triton_launches_directly():
    """The library's kernels are compiled for all integers: nothing compiles when addresses are aligned otherwise."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from stallfree.kernels.triton_functions import INTERPRETED, publish_kernel
    from stallfree.kernels.triton_tables import LANGUAGE_DTYPES

    if INTERPRETED:
        pytest.skip("the triton that is imported here runs on the CPU")
    device = torch.device("cuda", torch.cuda.current_device())
    constants = (LANGUAGE_DTYPES[torch.float32], False, False, 1, 16, 16, 16)
    tiles = torch.zeros(9, dtype=torch.int64, device=device)
    tiles[3] = tiles[4] = 4  # channels, length
    targets = torch.full((4,), -1, dtype=torch.int32, device=device)
    values = torch.arange(8.0, device=device)
    launch = Launch(publish_kernel, 1, constants, warps=4)
    with current_device(device):
        for offset in range(4):
            weight = torch.zeros(20, device=device)
            address = weight[offset:].data_ptr()
            launch(tiles.data_ptr(), targets.data_ptr(), values[offset:].data_ptr(), 0, 16, 1, (address, 1))
            assert weight[offset : offset + 4].tolist() == [offset + index for index in range(4)]
    assert launch.is_direct
    assert launch.code is not None, "the driver cannot launch it"
