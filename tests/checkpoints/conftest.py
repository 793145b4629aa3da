"""A run that has something to save."""

import pytest
from histories import Player
from saved_runs import small_history


@pytest.fixture
def player():
    player = Player(small_history())
    player.play(20)
    yield player
    player.close()
