"""`--nproc N`: starts N ranks on this machine and sees to it that they end together.

Not torchrun's agent: that one kills ranks which take more than 30 seconds to save after a signal, and reports an error in
forty lines. A rank that torchrun started is the same to the run (`ranks.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from stallfree.cli.finetune.interrupt import SIGNALS
from stallfree.cli.finetune.ranks import FAILURES, LAUNCHER

PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save, no traceback
from stallfree.cli import main
sys.exit(main())
"""
GRACE = 20.0  # seconds from the first rank that failed until the others are killed
POLL = 0.1  # seconds


def launch(count: int, arguments: Sequence[str], program: str = PROGRAM) -> int:
    """Run `stallfree ARGUMENTS` on `count` ranks; returns the exit code of the first that failed, or 0.

    SIGINT and SIGTERM are passed on to all ranks, once each. When a rank fails, the others have GRACE to follow.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    theirs, ours = os.pipe()
    ranks: list[subprocess.Popen] = []
    try:
        with _passing_on(ranks) as received:
            for rank in range(count):
                if received:  # what is started now would not get the signal
                    break
                command = [sys.executable, "-c", program, *arguments]
                environment = _environment(rank, count, store.port) | {LAUNCHER: str(theirs)}
                # Sessions of their own: a Ctrl-C reaches this process, and the ranks through it.
                ranks.append(subprocess.Popen(command, env=environment, pass_fds=[theirs], start_new_session=True))
            return _watch(ranks, store, received) or (128 + received[0] if len(ranks) < count else 0)
    finally:
        os.close(theirs)
        os.close(ours)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    own = {name: str(number) for name, number in numbers.items()}
    own |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    return {"OMP_NUM_THREADS": str(threads)} | os.environ | own


def _watch(ranks: list[subprocess.Popen], store: Store, received: list[int]) -> int:
    code, deadline = 0, float("inf")
    running = dict(enumerate(ranks))
    while running:
        time.sleep(POLL)
        for rank, process in list(running.items()):
            ended = process.poll()
            if ended is None:
                continue
            del running[rank]
            if ended < 0 and not received and code == 0 and store.add(FAILURES, 1) == 1:
                name = signal.Signals(-ended).name
                print(
                    f"error: rank {rank} was killed by {name}; complete checkpoints stay: go on with --resume", file=sys.stderr
                )
            code = code or (128 - ended if ended < 0 else ended)
        if code or len(received) > 1:
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            _send(ranks, signal.SIGKILL)
    return code


@contextmanager
def _passing_on(ranks: list[subprocess.Popen]) -> Iterator[list[int]]:
    """The signals that came so far, which the ranks got too."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _send(ranks, number)

    previous = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield received
    finally:
        _send(ranks, signal.SIGKILL)  # none is left, unless this was interrupted
        for number, handler in previous.items():
            signal.signal(number, handler)


def _send(ranks: list[subprocess.Popen], number: int) -> None:
    for process in ranks:
        process.send_signal(number)  # not to one that has ended
