"""Calls of the driver are packed and unpacked faithfully, with functions in the driver's place that note what they get."""

import ctypes

import pytest

from stallfree.kernels import driver
from stallfree.kernels.native import load_library

VOID, U64, U32, SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
WRITE = ctypes.CFUNCTYPE(ctypes.c_int, VOID, U64, U32, U32)
COPY = ctypes.CFUNCTYPE(ctypes.c_int, U64, U64, SIZE, VOID)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, VOID, *[U32] * 7, VOID, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)), VOID)


class Driver:
    """Notes calls; the call number `fails_at` fails."""

    def __init__(self) -> None:
        self.calls, self.fails_at = [], None
        self.functions = [
            WRITE(lambda *a: self.note("write", *a)),
            WRITE(lambda *a: self.note("wait", *a)),
            COPY(lambda *a: self.note("copy", *a)),
            LAUNCH(self.launch),
        ]
        self.table = (VOID * 4)(*[ctypes.cast(function, VOID).value for function in self.functions])

    def note(self, *call) -> int:
        self.calls.append(call)
        return 719 if len(self.calls) - 1 == self.fails_at else 0

    def launch(self, function, x, y, z, bx, by, bz, shared, stream, parameters, extra) -> int:
        assert (y, z, by, bz, extra) == (1, 1, 1, 1, None)
        return self.note("launch", function, x, bx, shared, stream, *(parameters[i][0] for i in range(3)))


@pytest.fixture
def fake(monkeypatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "_runner", lambda: (driver.runs_commands(load_library()), made.table))
    monkeypatch.setattr(driver, "functions", lambda: {"cuGetErrorString": lambda status, text: 1})
    return made


BIG = (1 << 47) + 24
COMMANDS = [
    driver.write_value(BIG, BIG + 4, (1 << 32) - 1),
    driver.wait_value(8, 16, 0),
    driver.launch(BIG, 70_000, 128, 49_152, 8, (BIG, -1, 3)),
    driver.copy(BIG, 32, 1 << 33, 8),
]
CALLS = [
    ("write", BIG, BIG + 4, (1 << 32) - 1, 0),
    ("wait", 8, 16, 0, 0),
    ("launch", BIG, 70_000, 128, 49_152, 8, BIG, -1, 3),
    ("copy", BIG, 32, 1 << 33, 8),
]


def test_commands_arrive_as_they_were_given(fake):
    driver.run(*COMMANDS)
    assert fake.calls == CALLS
    driver.run()
    assert len(fake.calls) == 4


@pytest.mark.parametrize("place", range(4))
def test_the_first_that_fails_is_the_last_and_is_named(fake, place):
    fake.fails_at = place
    name = ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2", "cuLaunchKernel", "cuMemcpyAsync")[place]
    with pytest.raises(RuntimeError, match=rf"{name} failed: .* \(719\)"):
        driver.run(*COMMANDS)
    assert fake.calls == CALLS[: place + 1]


@pytest.mark.parametrize(
    "command", [(9, 0, 0, 0), (0, 1), (3, 1, 1, 1, 1, 1, 5, 0), (3, 1, 1, 1, 1, 1, -1), (3, 1, 1, 1, 1, 1, 129)]
)
def test_what_is_no_command_is_refused(fake, command):
    with pytest.raises((RuntimeError, IndexError)):
        driver.run(command)
    assert not fake.calls
