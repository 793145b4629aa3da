"""Whatever happens to a process that saves, or to the files it saved: the state is right, or refused.

`--seed N` repeats the random choices. STALLFREE_FAULTS=20 does twenty times as much.
"""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest
from histories import Player
from saved_runs import CALLS, resumed, save_and_die, save_for_ever, saved, small_history, state_of

from stallfree import CheckpointError, load_checkpoint

MORE = int(os.environ.get("STALLFREE_FAULTS", "1"))
KILLS, CORRUPTIONS = 80 * MORE, 600 * MORE
ENOUGH = 0.02  # seconds, in which a process saves a few times


@pytest.fixture(scope="module")
def processes():
    """New ones in some milliseconds: forks of a process that has imported what they need, and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["saved_runs"])
    with pytest.MonkeyPatch.context() as patch:  # the server finds what it is to import by this
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


@pytest.fixture(scope="module")
def states():
    """Of the undisturbed run, by call."""
    player = Player(small_history())
    found = [state_of(player)]
    while player.t < CALLS:
        player.step()
        found.append(state_of(player))
    player.close()
    return found


def assert_newest_is_right(directory: Path, states: list[str], at_least: int) -> int:
    player = resumed(directory, small_history())
    assert state_of(player) == states[player.t], f"the state of call {player.t} is not what it was"
    assert player.t >= at_least, f"call {at_least} had been saved, and the newest is of call {player.t}"
    player.close()
    return player.t


@pytest.mark.timeout(120 * MORE)
def test_killed_at_random_moments_a_run_goes_on_exactly(processes, states, tmp_path, seed):
    """kill -9, load, compare every bit, go on from there; again and again, to the end of the run."""
    moments, reached, torn = random.Random(seed), 0, 0
    print(f"--seed {seed}")
    for kill in range(KILLS):
        process = processes.Process(target=save_for_ever, args=(str(tmp_path),))
        before = set(tmp_path.glob("checkpoint-*"))
        process.start()
        try:
            while set(tmp_path.glob("checkpoint-*")) <= before:  # until it is at work
                assert process.is_alive(), f"--seed {seed}: process {kill} ended by itself"
                time.sleep(0.001)
            time.sleep(moments.uniform(0, ENOUGH))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        torn += any(tmp_path.glob(".saving-*"))
        reached = assert_newest_is_right(tmp_path, states, reached)
    assert torn > KILLS // 20, f"only {torn} of {KILLS} kills fell into a save"
    assert reached > CALLS // 2


def test_death_at_any_moment_of_a_save_leaves_the_old_or_the_new(processes, states, tmp_path):
    """One process for each thing that a save does to a file: it dies at that moment."""
    player = Player(small_history())
    player.play(20)
    for _ in range(2):  # so that an old one is removed too
        saved(player, tmp_path / "before")
    player.close()
    outcomes = []
    for moment in itertools.count(1):
        directory = tmp_path / str(moment)
        shutil.copytree(tmp_path / "before", directory)
        process = processes.Process(target=save_and_die, args=(str(directory), moment))
        process.start()
        process.join()
        outcomes.append(assert_newest_is_right(directory, states, 20))
        after = resumed(directory, small_history())
        saved(after, directory)  # whatever was left is in nobody's way
        assert len(list(directory.iterdir())) == 3, sorted(directory.iterdir())
        after.close()
        if process.exitcode == 0:
            break
        assert process.exitcode == 9
    assert outcomes == sorted(outcomes), "once the new one is there it stays"
    assert outcomes.count(20) > 9
    assert outcomes.count(21) > 2


# Corrupted files


def a_file(directory: Path, choice: random.Random) -> Path:
    return choice.choice(sorted(path for path in directory.iterdir() if path.is_file()))


def truncate(directory: Path, choice: random.Random) -> None:
    path = a_file(directory, choice)
    os.truncate(path, choice.randrange(path.stat().st_size))


def flip(directory: Path, choice: random.Random) -> None:
    path = a_file(directory, choice)
    content = bytearray(path.read_bytes())
    for _ in range(choice.choice([1, 1, 2, 100])):
        content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
    path.write_bytes(content)


def overwrite(directory: Path, choice: random.Random) -> None:
    """A run of zeros or noise, as where a sector was lost."""
    path = a_file(directory, choice)
    content = bytearray(path.read_bytes())
    start = choice.randrange(len(content))
    length = min(512, len(content) - start)
    content[start : start + length] = choice.choice([bytes(length), choice.randbytes(length)])
    path.write_bytes(content)


def append(directory: Path, choice: random.Random) -> None:
    with a_file(directory, choice).open("ab") as file:
        file.write(choice.randbytes(choice.randrange(1, 20)))


def delete(directory: Path, choice: random.Random) -> None:
    a_file(directory, choice).unlink()


def rename(directory: Path, choice: random.Random) -> None:
    path = a_file(directory, choice)
    path.rename(path.with_name(choice.choice(["tensors-00007.safetensors", "x", path.name + "~"])))


def swap(directory: Path, choice: random.Random) -> None:
    first, second = a_file(directory, choice), a_file(directory, choice)
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    second.write_bytes(content[0])


def from_another_checkpoint(directory: Path, choice: random.Random) -> None:
    other = next(path for path in directory.parent.glob("checkpoint-*") if path != directory)
    path = a_file(directory, choice)
    path.write_bytes((other / path.name).read_bytes())


def foreign(directory: Path, choice: random.Random) -> None:
    path = choice.choice([a_file(directory, choice), directory / "core", directory / "tensors-00003.safetensors"])
    path.write_bytes(choice.choice([b"", b"{}", b"[1, 2", b"null", choice.randbytes(300), b"\x80\x04cos\nsystem\n."]))


def directory_in_place(directory: Path, choice: random.Random) -> None:
    path = a_file(directory, choice)
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable] = [
    truncate,
    flip,
    flip,
    flip,
    overwrite,
    append,
    delete,
    rename,
    swap,
    from_another_checkpoint,
    foreign,
    directory_in_place,
]


@pytest.mark.timeout(120 * MORE)
def test_a_corrupted_checkpoint_is_refused_or_harmless(tmp_path, seed):
    history, pristine = small_history(), tmp_path / "pristine"
    player = Player(history)
    for t in (19, 20):
        player.play(t)
        saved(player, pristine)
    expected = state_of(player)
    player.close()
    fresh = Player(history)
    untouched, refused = state_of(fresh), 0
    for number in range(CORRUPTIONS):
        choice = random.Random(f"{seed} {number}")
        damage = DAMAGES[number % len(DAMAGES)]
        what = f"--seed {seed}, corruption {number} ({damage.__name__})"
        directory = tmp_path / "damaged"
        shutil.copytree(pristine, directory)
        damage(directory / "checkpoint-00000002", choice)
        message = ""
        try:
            load_checkpoint(directory, fresh.optimizer)
        except CheckpointError as error:
            message = str(error)
        if message:
            refused += 1
            assert str(directory / "checkpoint-00000001") in message, what
            assert state_of(fresh) == untouched, f"{what}: refused, and something was changed"
        else:
            assert state_of(fresh) == expected, f"{what}: loaded, and not what was saved"
            fresh.close()
            fresh = Player(history)
        shutil.rmtree(directory)
    fresh.close()
    print(f"--seed {seed}: {refused} of {CORRUPTIONS} refused, the others harmless")
    assert refused > CORRUPTIONS * 0.7
