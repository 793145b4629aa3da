"""A new checkpoint is there at once or never, its older ones stay or go, and what is committed is reported as saved."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from saved_runs import names, saved

from stallfree import CheckpointError, load_checkpoint
from stallfree.checkpoints.commit import sync


def test_the_last_good_ones_are_kept(player, tmp_path):
    for _ in range(4):
        saved(player, tmp_path, keep=2)
    assert names(tmp_path) == [".lock", "checkpoint-00000003", "checkpoint-00000004"]
    (tmp_path / "checkpoint-00000004" / "contents.json").write_text("{}")
    saved(player, tmp_path, keep=2)
    saved(player, tmp_path, keep=1)
    assert names(tmp_path) == [".lock", "checkpoint-00000004", "checkpoint-00000006"]  # damaged: not counted, not removed
    with pytest.raises(ValueError, match="keep"):
        saved(player, tmp_path, keep=0)


def test_what_a_dead_process_left_is_removed_and_never_loaded(player, tmp_path):
    shutil.copytree(saved(player, tmp_path), tmp_path / ".saving-00000009")
    (tmp_path / ".removing-checkpoint-00000001").mkdir()
    (tmp_path / "notes").mkdir()
    player.step()
    saved(player, tmp_path)
    assert names(tmp_path) == [".lock", "checkpoint-00000001", "checkpoint-00000002", "notes"]


def test_two_processes_do_not_save_into_one_directory(player, tmp_path):
    saved(player, tmp_path)
    with (tmp_path / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is saving into"):
            saved(player, tmp_path)
    saved(player, tmp_path)
    assert names(tmp_path) == [".lock", "checkpoint-00000001", "checkpoint-00000002"]


@pytest.mark.parametrize("fails", ["write.write_tensors", "write.write_file", "commit.sync"])
def test_a_failing_disk_leaves_the_older_ones(player, tmp_path, monkeypatch, fails):
    saved(player, tmp_path)

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(f"stallfree.checkpoints.{fails}", fail)
        with pytest.raises(CheckpointError, match=r"no checkpoint could be written into .*Input/output error"):
            saved(player, tmp_path)
    assert names(tmp_path) == [".lock", "checkpoint-00000001"]
    player.step()
    saved(player, tmp_path)


def failing(function, when):
    """The same, with an error of the disk where an argument is said to have one."""

    def maybe(*args, **options):
        if when(*args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*args, **options)

    return maybe


def test_an_old_one_that_cannot_be_renamed_is_a_warning(player, tmp_path, monkeypatch):
    saved(player, tmp_path, keep=1)
    monkeypatch.setattr(Path, "rename", failing(Path.rename, lambda path, _: path.name == "checkpoint-00000001"))
    with pytest.warns(UserWarning, match=r"checkpoint-00000001 is no longer needed and cannot be removed \(Input/output error"):
        assert saved(player, tmp_path, keep=1) == tmp_path / "checkpoint-00000002"
    assert names(tmp_path) == [".lock", "checkpoint-00000001", "checkpoint-00000002"]


def test_what_cannot_be_removed_does_not_stop_the_next_saves(player, tmp_path, monkeypatch):
    saved(player, tmp_path, keep=1)
    monkeypatch.setattr(shutil, "rmtree", failing(shutil.rmtree, lambda path, *_: path.name.startswith(".removing")))
    for number in (2, 3):
        with pytest.warns(UserWarning, match=r"\.removing-checkpoint-0000000\d is no longer needed and cannot be removed"):
            saved(player, tmp_path, keep=1)
        assert f"checkpoint-0000000{number}" in names(tmp_path)
    monkeypatch.undo()
    saved(player, tmp_path, keep=1)
    assert names(tmp_path) == [".lock", "checkpoint-00000004"]


def test_what_has_its_name_is_saved_though_the_disk_does_not_say_so(player, tmp_path, monkeypatch):
    """The older ones stay: after a loss of power one of them may be the newest."""
    saved(player, tmp_path, keep=1)
    player.step()
    monkeypatch.setattr("stallfree.checkpoints.commit.sync", failing(sync, lambda path: path == tmp_path))
    with pytest.warns(UserWarning, match=r"checkpoint-00000002 is saved, but .* \(Input/output error\): .*older ones are kept"):
        assert saved(player, tmp_path, keep=1) == tmp_path / "checkpoint-00000002"
    assert names(tmp_path) == [".lock", "checkpoint-00000001", "checkpoint-00000002"]
    assert load_checkpoint(tmp_path, player.optimizer)["t"] == player.t


def test_no_room_is_said_and_leaves_the_older_ones(tmp_path):
    """A real limit: files may not grow beyond 3000 bytes."""
    program = """
import resource, sys
from pathlib import Path
from saved_runs import names, Player, saved, small_history, state_of, resumed
from stallfree import CheckpointError
player = Player(small_history())
player.play(5)
saved(player, Path(sys.argv[1]))
then = state_of(player)
player.step()
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    saved(player, Path(sys.argv[1]))
except CheckpointError as error:
    assert "no checkpoint could be written into" in str(error) and "File too large" in str(error), error
    assert state_of(resumed(Path(sys.argv[1]), small_history())) == then
    print("refused")
"""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "refused\n", done.stderr
    assert names(tmp_path) == [".lock", "checkpoint-00000001"]


def test_files_are_on_the_disk_before_the_name_is(player, tmp_path, monkeypatch):
    """Every file is synced, then the directory, then it is renamed, then its parent is synced."""
    done, sync, rename = [], os.fsync, Path.rename

    def record_sync(file):
        done.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        return sync(file)

    def record_rename(self, target):
        done.append(f"{self.name} -> {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    path = saved(player, tmp_path)
    assert sorted(done[:-4]) == sorted(set(names(path)) - {"manifest.json"})
    aside = ".saving-00000001"
    assert done[-4:] == ["manifest.json", aside, f"{aside} -> {path.name}", tmp_path.name]
