"""Ranks for the tests of this directory."""

import pytest
from ranks import DEVICE, MOST, Ranks


def started(world):
    if world > MOST:
        pytest.skip(f"{world} ranks on {DEVICE} devices: there are {MOST}")
    ranks = Ranks(world)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two():
    yield from started(2)


@pytest.fixture(scope="session")
def four():
    yield from started(4)


@pytest.fixture(scope="session")
def one():
    yield from started(1)


@pytest.fixture
def route(request, one, two):
    """Numbers of ranks that one run goes through: 1 -> 2 -> 4 -> 1, or as far as there are GPUs."""
    return (one, two, request.getfixturevalue("four") if MOST >= 4 else one, one if MOST >= 4 else two)
