"""Random histories, saved and killed and resumed at random, end bit for bit as if nothing had happened.

`pytest tests/checkpoints/test_campaign.py -k 'dropped and [17]' --seed 3` repeats history 17 of seed 3.
STALLFREE_FAULTS=20 plays twenty times as many.
"""

import multiprocessing
import os
import random
import sys
import time
from multiprocessing import forkserver

import pytest
from campaign import disturbed, play_in_process, random_history, undisturbed

MORE = int(os.environ.get("STALLFREE_FAULTS", "1"))
DROPPED, KILLED = 200 * MORE, 24 * MORE
KILLS = 3  # of a process that plays a history
WHILE = 0.03  # seconds, in which a process plays about half of it


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["campaign"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


@pytest.mark.parametrize("number", range(DROPPED))
def test_dropped_and_resumed_a_history_ends_as_if_undisturbed(tmp_path, seed, number):
    name = f"{seed} {number}"
    print(f"history {number} of --seed {seed}")
    history = random_history(random.Random(name))
    found, kills = disturbed(history, tmp_path, random.Random(f"{name} events"))
    assert found == undisturbed(history), f"--seed {seed}, history {number}, after {kills} kills: {history}"


@pytest.mark.parametrize("number", range(KILLED))
def test_killed_and_resumed_a_history_ends_as_if_undisturbed(processes, tmp_path, seed, number):
    """kill -9 of a process that trains and saves; a new one goes on."""
    name = f"{seed} {DROPPED + number}"
    print(f"history {number} of --seed {seed}")
    moments = random.Random(f"{name} moments")
    for life in range(KILLS + 1):
        ours, theirs = multiprocessing.Pipe()
        process = processes.Process(target=play_in_process, args=(str(tmp_path), name, life, theirs))
        process.start()
        theirs.close()
        ours.recv()  # it has begun
        if life < KILLS:
            time.sleep(moments.uniform(0, WHILE))
            process.kill()  # unless it has come to the end
        else:
            found = ours.recv()
        process.join()
        ours.close()
    assert process.exitcode == 0
    assert found == undisturbed(random_history(random.Random(name))), f"--seed {seed}, history {number}"


def test_histories_hold_what_can_happen(seed):
    """So that a change of the generator does not leave something out unnoticed."""
    drawn = [random_history(random.Random(f"{seed} {number}")) for number in range(DROPPED)]
    calls = [call for history in drawn for call in history.calls]
    for share, count in (
        (0.1, sum(call.bad is not None for call in calls) / len(calls)),
        (0.1, sum(bool(call.missing) for call in calls) / len(calls)),
        (0.1, sum(call.before is not None for call in calls) / len(calls)),
        (0.5, sum(call.lr_factor < 1 for call in calls) / len(calls)),
        (0.4, sum(history.config.topk_ratio > 0 and len(history.calls) > 8 for history in drawn) / len(drawn)),
    ):
        assert count > share
