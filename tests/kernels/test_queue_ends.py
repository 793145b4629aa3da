"""How both queues end, and let go: by errors that free all, by close, with their memory, with their process, after a fork."""

import copy
import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
from queue_cases import HYPER, assert_same_bits, finish, make_block, make_calls, make_queue, make_window, word

from stallfree.kernels.queue import HostError, TorchQueue
from stallfree.kernels.replay import TorchReplay
from stallfree.kernels.windows import Gate


def broken(kind_of_failure):
    block = make_block()
    if kind_of_failure == "ascending":
        block.weights[1].deferred.fill_(1)
    elif kind_of_failure == "step count":
        block.weights[1].steps[block.weights[1].deferred[0]] = 2**31 - 1
    calls = make_calls(block, 2)
    if kind_of_failure == "betas":
        calls = (calls[0]._replace(hypers=(HYPER._replace(beta1=1.0),) * 3), calls[1])
    return make_window(block, calls, names="model.bad")


@pytest.mark.parametrize("cause", ["ascending", "step count", "betas"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failure_is_named_begins_nothing_later_and_frees_whoever_waits(kind, cause, overlap):
    done, good, after = word(), make_block(1), make_block(2)
    queue = make_queue(kind, done, overlap)
    before = copy.deepcopy(after)
    assert queue.submit([make_window(good), broken(cause), make_window(after)]) == [1, 2, 3]
    for ticket in (2, 3):
        with pytest.raises(HostError, match=f"host update of model.bad failed: .*{cause}") as caught:
            queue.wait(ticket)
        assert isinstance(caught.value.__cause__, ValueError)
    queue.wait(1)
    assert done.item() == 3 + 2**30
    assert queue.submit([make_window(after)]) == [4]
    with pytest.raises(HostError, match=r"model\.bad"):
        queue.drain()
    assert_same_bits(after, before)
    queue.close()
    assert "model.bad" in str(queue.error)


def test_close_gives_up_what_cannot_begin(start):
    gate, done, block = word(), word(), make_block()
    queue = start(done)
    queue.submit([make_window(block), make_window(block, names="waiting", gates=(Gate(gate.data_ptr(), 1),))])
    queue.wait(1)

    def wait():
        with pytest.raises(HostError):
            queue.wait(2)
        freed.set()

    freed, waiting = threading.Event(), threading.Thread(target=wait)
    waiting.start()
    for _ in range(2):
        queue.close()
        assert "host update of waiting failed: the queue was closed" in str(queue.error)
    assert freed.wait(timeout=10)
    assert done.item() == 2 + 2**30
    with pytest.raises(RuntimeError, match="the queue is closed"):
        queue.submit([make_window(block)])


def test_close_runs_what_can_begin(start):
    done, block = word(), make_block()
    queue = start(done)
    queue.submit([make_window(block, pause=0.01) for _ in range(5)])
    queue.close()
    queue.drain()
    assert (done.item(), queue.error) == (5, None)


def test_memory_in_flight_is_held_and_then_let_go(start):
    gate, queue = word(), start()
    block = make_block()
    work = make_window(block, gates=(Gate(gate.data_ptr(), 1),))
    memory = weakref.ref(work.calls[0].memory)
    queue.submit([work])
    del work
    gc.collect()
    assert memory() is not None
    gate.fill_(1)
    queue.drain()
    finish(queue, make_window(block))
    gc.collect()
    assert memory() is None


def test_a_queue_that_is_forgotten_ends(kind):
    queue = make_queue(kind, word())
    queue.submit([make_window(make_block(), pause=0.01)])
    if kind == "torch":
        queue.close()  # a Python thread holds its queue
    end = weakref.ref(queue)
    del queue
    gc.collect()
    assert end() is None


def test_a_process_ends_with_windows_in_flight(kind):
    """Also with one whose gate nobody opens."""
    program = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from queue_cases import make_block, make_queue, make_window, word
from stallfree.kernels.windows import Gate
gate, block = word(), make_block(shapes=((512, 1024, 2),) * 3)
queue = make_queue({kind!r}, word())
queue.submit([make_window(block) for _ in range(9)] + [make_window(block, gates=(Gate(gate.data_ptr(), 1),))])
del block
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_a_process_ends_in_the_middle_of_a_replay_that_calls_torch():
    """A Python thread that comes back from torch when the interpreter is gone would abort the process."""
    program = f"""
import sys, time, torch
sys.path.insert(0, {os.path.dirname(__file__)!r})
from queue_cases import make_block, make_window, word
from stallfree.kernels.queue import TorchQueue
from stallfree.kernels.replay import TorchReplay

class Slow(TorchReplay):
    def replay(self, job):
        a, end = torch.ones(600, 600), time.monotonic() + 0.8
        while time.monotonic() < end:
            a @ a

queue = TorchQueue(Slow(), word())
queue.submit([make_window(make_block())])
time.sleep(0.2)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_a_forked_child_is_refused_and_ends_nothing(start):
    queue, block = start(), make_block()
    finish(queue, make_window(block))
    child = os.fork()
    if not child:
        try:
            queue.close()
            queue.submit([make_window(block)])
        except RuntimeError as error:
            os._exit(7 if "before a fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert finish(queue, make_window(block)) == [2]


def test_any_kernel_can_be_queued_and_fails_with_a_traceback():
    class Failing(TorchReplay):
        def replay(self, job):
            raise ZeroDivisionError("here")

    queue = TorchQueue(Failing(), word())
    queue.submit([make_window(make_block())])
    with pytest.raises(HostError, match="host update of some weights failed: here\nTraceback"):
        queue.drain()
    queue.close()
    queue = TorchQueue(TorchReplay(), word())
    finish(queue, make_window(make_block()))
    queue.close()
