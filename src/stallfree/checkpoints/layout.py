"""What a checkpoint is on disk, and how one is judged.

    checkpoints/
      checkpoint-00000007/
        manifest.json            size and SHA-256 of each file below, and of itself; written last
        contents.json            the state: dicts, numbers, text, and the names of tensors
        tensors-00000.safetensors ...
      checkpoint-00000008/
      .saving-00000009/          being written, or left by a process that died
      .removing-checkpoint-00000006/  what is left of an older one
      .lock                      held while one process saves

A checkpoint exists from the moment its directory gets its name: one rename, after everything in it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallfree.checkpoints.errors import CheckpointError
from stallfree.checkpoints.tensors import FileSum

FORMAT, VERSION = "stallfree checkpoint", 1
MANIFEST, CONTENTS, LOCK = "manifest.json", "contents.json", ".lock"
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{8})")
FILE_NAME = re.compile(r"contents\.json|tensors-\d{5}\.safetensors")
MANIFEST_MOST_BYTES = 1 << 26
WORKERS = 4  # files that are written or compared with their sums at once


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint."""

    call: int  # of the optimizer
    files: dict[str, FileSum]

    def to_json(self, written_by: str) -> str:
        files = {name: {"bytes": file.size, "sha256": file.sha256} for name, file in self.files.items()}
        body = {"format": FORMAT, "version": VERSION, "written_by": written_by, "call": self.call, "files": files}
        return json.dumps({"manifest": body, "sha256": _digest(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises CheckpointError, or what a malformed text makes of the look-ups here."""
        whole = json.loads(text)
        body = whole["manifest"]
        if whole["sha256"] != _digest(body):
            raise CheckpointError(f"{MANIFEST} does not have the checksum that it names")
        if body["format"] != FORMAT or body["version"] != VERSION:
            raise CheckpointError(
                f"{MANIFEST} says {body['format']!r}, version {body['version']!r}; this release reads {FORMAT!r}, {VERSION}"
            )
        files = {name: FileSum(int(file["bytes"]), str(file["sha256"])) for name, file in body["files"].items()}
        for name in files:
            if not FILE_NAME.fullmatch(name):
                raise CheckpointError(f"{MANIFEST} names {name!r}, which is no file of a checkpoint")
        if CONTENTS not in files:
            raise CheckpointError(f"{MANIFEST} does not name {CONTENTS}")
        return cls(int(body["call"]), files)


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def checkpoints(directory: Path) -> list[Path]:
    """All that have a checkpoint's name, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if CHECKPOINT_NAME.fullmatch(path.name))


def number(path: Path) -> int:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are there with the right sizes; what is in them is not read.

    Raises:
        CheckpointError: with the reason.
    """
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise CheckpointError("it is not a directory")
        with _open(path / MANIFEST) as file:
            manifest = Manifest.from_json(file.read(MANIFEST_MOST_BYTES).decode())
        for name, expected in manifest.files.items():
            with _open(path / name) as file:
                size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                raise CheckpointError(f"{name} has {size} bytes and should have {expected.size}")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{Path(error.filename or path).name} cannot be read ({error.strerror})") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is not what was written ({type(error).__name__}: {error})") from error
    return manifest


def verify(path: Path) -> Manifest:
    """The same, of a checkpoint in which every byte is as it was written."""
    manifest = read_manifest(path)

    def check(name: str) -> None:
        try:
            with _open(path / name) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror})") from error
        if found != manifest.files[name].sha256:
            raise CheckpointError(f"{name} does not have the checksum that it was written with")

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="stallfree-verify") as readers:
        for _ in readers.map(check, manifest.files):
            pass
    return manifest


def _open(path: Path) -> Any:
    """A regular file; neither a link to elsewhere nor a pipe that waits."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path.name} is not a regular file")
    return os.fdopen(file, "rb")


def good(paths: list[Path]) -> Iterator[Path]:
    """Those whose every byte is right, newest first."""
    for path in reversed(paths):
        try:
            verify(path)
        except CheckpointError:
            continue
        yield path
