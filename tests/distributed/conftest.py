"""Ranks for the tests of this directory."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def one():
    ranks = Ranks(1)
    yield ranks
    ranks.close()
