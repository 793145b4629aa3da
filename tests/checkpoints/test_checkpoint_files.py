"""What save_checkpoint writes and refuses, and what load_checkpoint gives back."""

import json
import math
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from histories import Player
from safetensors import safe_open
from saved_runs import resumed, saved, small_history, state_of
from torch import nn

from stallfree import CheckpointError, NoCheckpointError, ZenFlowAdamW, load_checkpoint, save_checkpoint
from stallfree.checkpoints.layout import Manifest
from stallfree.checkpoints.tensors import FileSum, write_tensors


def test_what_is_loaded_is_what_was_saved(player, tmp_path):
    path = saved(player, tmp_path)
    assert path == tmp_path / "checkpoint-00000001"
    again = resumed(tmp_path, player.history)
    assert again.t == 20
    assert state_of(again) == state_of(player)
    again.close()


def test_saving_changes_nothing(player, tmp_path):
    before = state_of(player)
    saved(player, tmp_path)
    assert state_of(player) == before
    undisturbed = Player(small_history())
    undisturbed.play(40)
    while player.t < 40:
        player.step()
        saved(player, tmp_path)
    assert state_of(player) == state_of(undisturbed)
    undisturbed.close()


def test_extra_comes_back_with_its_types(player, tmp_path):
    extra = {
        "text": "schön",
        3: [1, 2.5, None, True, (1, (2,)), []],
        "numbers": {"big": 2**80, "small": 1e-320, "third": 1 / 3, "inf": -math.inf, "nan": math.nan},
        (1.5): torch.tensor(4, dtype=torch.int16),
        False: {},
        "rng": torch.get_rng_state(),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        "spread": torch.ones(1).expand(3),
        "gaps": torch.arange(12).view(3, 4)[:, ::2],
        "half": torch.tensor([1.0], dtype=torch.bfloat16),
    }
    save_checkpoint(tmp_path, player.optimizer, extra=extra)
    shutil.copytree(tmp_path, tmp_path / "elsewhere")
    back = load_checkpoint(tmp_path / "elsewhere", player.optimizer)
    shutil.rmtree(tmp_path / "elsewhere")  # what came back needs no file
    assert list(back) == list(extra)
    assert repr(back) == repr(extra)


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"a": [object()]}, "extra/a/0 is a object"),
        (lambda: 0, "extra is a function"),
        ({"a": {(1, 2): 3}}, "extra/a has a key of type tuple"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "extra/a is of torch.complex64"),
        ({"a": torch.zeros(2, device="meta")}, "only plain tensors"),
        ({"a": torch.eye(2).to_sparse()}, "only plain tensors"),
        (torch.float32, "extra is a dtype"),
    ],
)
def test_what_is_not_data_is_refused_before_anything_is_written(player, tmp_path, extra, message):
    with pytest.raises(TypeError, match=message):
        save_checkpoint(tmp_path / "new", player.optimizer, extra=extra)
    assert not (tmp_path / "new").exists()


def test_other_programs_can_read_the_files(player, tmp_path):
    """They are safetensors; what the host holds channel by channel lies there as in memory."""
    path = saved(player, tmp_path)
    state = player.optimizer.state_dict()["state"]
    with safe_open(path / "tensors-00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("optimizer/state/0/exp_avg").t(), state[0]["exp_avg"])
        assert torch.equal(file.get_tensor("optimizer/state/0/published"), state[0]["published"])


def test_a_weight_that_the_model_shares_is_stored_once(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    optimizer = ZenFlowAdamW(model.named_parameters(), min_numel=0)
    with_model = save_checkpoint(tmp_path / "a", optimizer, model=model)
    without = save_checkpoint(tmp_path / "b", optimizer)
    sizes = [sum(file.stat().st_size for file in path.glob("tensors-*")) for path in (with_model, without)]
    assert sizes[0] - sizes[1] < 64 * 64 * 4
    other = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model[1].running_mean.fill_(7)
    save_checkpoint(tmp_path / "a", optimizer, model=model)
    load_checkpoint(tmp_path / "a", ZenFlowAdamW(other.named_parameters(), min_numel=0), model=other)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


def test_another_model_is_refused_before_anything_is_changed(tmp_path):
    model, other, third = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 9)
    optimizers = [ZenFlowAdamW(module.named_parameters(), min_numel=0) for module in (model, other, third)]
    save_checkpoint(tmp_path, optimizers[0], model=model)
    for module, optimizer in ((other, optimizers[1]), (third, optimizers[2])):
        before = module.weight.detach().clone()
        for how in ({"model": module}, {}):
            with pytest.raises(ValueError, match="another model"):
                load_checkpoint(tmp_path, optimizer, **how)
        assert torch.equal(module.weight, before)
    save_checkpoint(tmp_path, optimizers[0])
    with pytest.raises(CheckpointError, match="saved without a model"):
        load_checkpoint(tmp_path, optimizers[0], model=model)


class Unloadable(nn.Module):
    """With state of its own that can be saved."""

    def __init__(self, loads: bool) -> None:
        super().__init__()
        self.linear, self.loads = nn.Linear(8, 8), loads

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        if not self.loads:
            raise KeyError(state)


class Expanded(nn.Module):
    """With a buffer that can be saved, and not written: its elements share one place in memory."""

    def __init__(self, loads: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(3) if loads else torch.ones(1).expand(3))


@pytest.mark.parametrize("kind", [Unloadable, Expanded])
def test_a_model_that_cannot_load_its_state_is_said_to_be_half_loaded(tmp_path, kind):
    """Only its own code can know, and that runs when the optimizer is loaded."""
    model, other = kind(loads=True), kind(loads=False)
    optimizers = [ZenFlowAdamW(module.named_parameters(), min_numel=0) for module in (model, other)]
    model.linear(torch.ones(1, 8)).sum().backward()
    optimizers[0].step()
    save_checkpoint(tmp_path, optimizers[0], model=model)
    with pytest.raises(RuntimeError, match=r"(?s)optimizer is loaded, and the model only in part .*build both anew"):
        load_checkpoint(tmp_path, optimizers[1], model=other)
    assert torch.equal(other.linear.weight, model.linear.weight)
    for optimizer in optimizers:
        optimizer.close()


def test_extra_that_cannot_be_copied_leaves_everything_as_it_was(player, tmp_path, monkeypatch):
    saved(player, tmp_path)
    player.step()
    before = state_of(player)

    def no_room(value):
        raise MemoryError

    monkeypatch.setattr("stallfree.checkpoints.read._copied", no_room)
    with pytest.raises(MemoryError):
        load_checkpoint(tmp_path, player.optimizer)
    assert state_of(player) == before


def test_a_damaged_newest_is_refused_and_the_newest_good_one_is_named(player, tmp_path):
    for _ in range(3):
        saved(player, tmp_path, keep=3)
    for number in (3, 2):
        os.truncate(tmp_path / f"checkpoint-0000000{number}" / "tensors-00000.safetensors", 10)
    with pytest.raises(CheckpointError, match=r"00000003 is refused: tensors-00000.* the newest good one is .*00000001$"):
        load_checkpoint(tmp_path, player.optimizer)
    assert load_checkpoint(tmp_path / "checkpoint-00000001", player.optimizer)["t"] == 20
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        load_checkpoint(tmp_path / "nowhere", player.optimizer)


def test_a_checkpoint_that_is_not_there_is_no_new_run(player, tmp_path):
    """Whoever names one, or a file, has made a mistake: nothing begins anew because of it."""
    saved(player, tmp_path)
    (tmp_path / "file").touch()
    for name, words in (
        ("checkpoint-00000009", r"^there is no .*00000009; the newest good one is .*00000001$"),
        ("file", "is a file: give what save_checkpoint was given"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            load_checkpoint(tmp_path / name, player.optimizer)
        assert not isinstance(caught.value, NoCheckpointError)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "tensors-00000.safetensors/../../x", "tensors-1.safetensors", ""])
def test_a_manifest_names_nothing_outside(player, tmp_path, name):
    path = saved(player, tmp_path)
    manifest = Manifest.from_json((path / "manifest.json").read_text())
    manifest.files[name] = FileSum(1, "0" * 64)
    (path / "manifest.json").write_text(manifest.to_json("someone"))
    with pytest.raises(CheckpointError, match=r"names '.*', which is no file of a checkpoint"):
        load_checkpoint(tmp_path, player.optimizer)


@pytest.mark.parametrize("name", ["manifest.json", "contents.json", "tensors-00000.safetensors", "."])
def test_links_are_not_followed(player, tmp_path, name):
    path = saved(player, tmp_path)
    if name == ".":
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
    else:
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match="is refused"):
        load_checkpoint(tmp_path, player.optimizer)


def test_a_pipe_does_not_hang(player, tmp_path):
    path = saved(player, tmp_path)
    (path / "contents.json").unlink()
    os.mkfifo(path / "contents.json")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load_checkpoint(tmp_path, player.optimizer)


def forged(path: Path, contents: object) -> None:
    """Other contents with the right sums."""
    text = json.dumps(contents).encode()
    (path / "contents.json").unlink()
    manifest = Manifest.from_json((path / "manifest.json").read_text())
    from stallfree.checkpoints.tensors import write_file

    manifest.files["contents.json"] = write_file(path / "contents.json", iter([text]))
    (path / "manifest.json").write_text(manifest.to_json("someone"))


@pytest.mark.parametrize(
    "part",
    [
        {"tensor": "none such"},
        {"call": "os.system"},
        {"dict": [[[], 1]]},
        {"tuple": 3},
        {"float": "x"},
        {"tensor": "optimizer/state/0/exp_avg", "order": 3},
        {"dict": 1, "tuple": 2},
        {},
        json.loads("[" * 500 + "]" * 500),
    ],
)
def test_contents_that_say_something_else_are_refused(player, tmp_path, part):
    path = saved(player, tmp_path)
    before = state_of(player)
    forged(path, {"optimizer": part, "model": None, "extra": None})
    with pytest.raises((CheckpointError, ValueError)):
        load_checkpoint(tmp_path, player.optimizer)
    assert state_of(player) == before


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_saving_copies_no_state(tmp_path):
    """A state of 100 MB with the process's own memory watched: a copy of the largest part would show."""
    model = nn.Linear(2048, 4096, bias=False)
    optimizer = ZenFlowAdamW(model.named_parameters(), topk_ratio=0.1, full_warm_up_rounds=0)
    model.weight.sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, optimizer, model=model)
    before, most, stop = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            most = max(most, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    save_checkpoint(tmp_path, optimizer, model=model)
    stop.set()
    watcher.join()
    assert most - before < 16 << 20  # master, exp_avg and exp_avg_sq have 32 MiB each
    optimizer.close()


def test_large_tensors_are_written_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("stallfree.checkpoints.tensors.PIECE_BYTES", 64)
    tensors = {"a": torch.arange(1000), "b": torch.ones((), dtype=torch.float64), "c": torch.zeros(0)}
    write_tensors(tmp_path / "file", tensors)
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_where_there_is_nothing_yet_is_not_where_something_is_damaged(tmp_path):
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = ZenFlowAdamW([param], min_numel=0)
    for directory in (tmp_path, tmp_path / "not there"):
        with pytest.raises(NoCheckpointError, match="no checkpoint"):
            load_checkpoint(directory, optimizer)
    saved = save_checkpoint(tmp_path, optimizer)
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(saved, optimizer)
    assert not isinstance(refused.value, NoCheckpointError)
    optimizer.close()


@pytest.mark.parametrize("function", [save_checkpoint, load_checkpoint])
def test_other_optimizers_are_refused_with_the_way_out(tmp_path, function):
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match=r"torch\.save"):
        function(tmp_path, other)
    assert not list(tmp_path.iterdir())
