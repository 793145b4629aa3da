"""Both queues: the same bits as one job after the other, windows in order between gates and `done`, errors that free all."""

import copy
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from stallfree.kernels.device import Hyper
from stallfree.kernels.native import NativeReplay
from stallfree.kernels.native_queue import NativeQueue
from stallfree.kernels.queue import HostError, TorchQueue
from stallfree.kernels.replay import ReplayJob, SlotGradient, TorchReplay
from stallfree.kernels.windows import Call, Gate, HostBlock, HostExchange, HostWeight, WindowWork

SHAPES = ((7, 33, 2), (4, 200, 1), (5, 16, 0))  # channels, length, selected of each weight
HYPER = Hyper(1e-2, 0.9, 0.99, 1e-8, 0.1)
RECORD_START = 3


def word(value=0):
    return torch.tensor([value], dtype=torch.int32)


def make_queue(kind, done, overlap=True):
    if kind == "native":
        kernel = NativeReplay(2)
        queue = NativeQueue(kernel, done, overlap)
        kernel.close()  # the queue keeps the threads
        return queue
    return TorchQueue(NativeReplay(1), done, overlap)


@pytest.fixture(params=["torch", "native"])
def kind(request):
    return request.param


@pytest.fixture
def start(kind):
    """Makes queues, and closes them."""
    queues = []

    def make(done=None, overlap=True):
        queues.append(make_queue(kind, word() if done is None else done, overlap))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


def make_block(seed=0, dtype=torch.bfloat16, moments=torch.float32, rule="replay", shapes=SHAPES):
    rnd = torch.Generator().manual_seed(seed)

    def weight(channels, length, selected, number):
        return HostWeight(
            master=torch.randn(channels, length, generator=rnd),
            exp_avg=torch.randn(channels, length, generator=rnd).to(moments),
            exp_avg_sq=torch.rand(channels, length, generator=rnd).to(moments),
            steps=torch.randint(0, 4, (channels,), generator=rnd, dtype=torch.int32),
            deferred=torch.randperm(channels, generator=rnd)[selected:].sort().values,
            every=torch.arange(channels),
            key=seed << 32 | number,
        )

    weights = tuple(weight(*shape, number) for number, shape in enumerate(shapes))
    return HostBlock(weights, RECORD_START, rule, dtype)


def make_exchange(block, seed=0):
    rnd = torch.Generator().manual_seed(seed)
    places, rows = sum(w.selected for w in block.weights), sum(len(w.deferred) for w in block.weights)
    numel = sum(w.selected * w.master.shape[1] for w in block.weights)
    flats = [torch.rand(numel, generator=rnd) for _ in range(3)]
    counts = torch.randint(4, 9, (places,), generator=rnd, dtype=torch.int32)
    numbers, nobody = torch.zeros(2 * places + rows, dtype=torch.int32), torch.full((places,), -1, dtype=torch.int32)
    return HostExchange(*flats, counts, numbers, nobody)


def make_calls(block, count, divided=True, seed=0):
    rnd = torch.Generator().manual_seed(seed)
    numel = sum(len(w.deferred if divided else w.every) * w.master.shape[1] for w in block.weights)
    factors = (0.5, 2.0, 0.25)
    return tuple(
        Call(
            torch.randn(numel, generator=rnd).to(block.dtype),
            torch.tensor([0.0] * RECORD_START + [factor * (1 + i) for factor in factors[: len(block.weights)]]),
            (HYPER._replace(lr=1e-2 / (1 + i)),) * len(block.weights),
        )
        for i in range(count)
    )


def make_window(block, calls=None, **changes):
    work = WindowWork(block, make_calls(block, 3) if calls is None else calls, True, 1.5, True, "some weights")
    return work._replace(**changes)


def choose(block, exchange, seed):
    """What comes down after a selection, written into the exchange's memory."""
    rnd = torch.Generator().manual_seed(seed)
    chosen, deferred, moved, first = [], [], [], 0
    for weight in block.weights:
        order = torch.randperm(len(weight.every), generator=rnd)
        before = exchange.selected[first : first + weight.selected]
        now = order[: weight.selected]
        for place, channel in enumerate(before.tolist()):  # who is chosen again keeps the place
            if channel in now:
                now = torch.cat([now[now != channel][:place], torch.tensor([channel]), now[now != channel][place:]])
        chosen.append(now)
        moved.append(now != before)
        deferred.append(torch.tensor(sorted(set(weight.every.tolist()) - set(now.tolist())), dtype=torch.int64))
        first += weight.selected
    exchange.numbers.copy_(torch.cat([*chosen, *deferred, *moved]))


def tensors_of(value):
    """All tensors inside, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in tensors_of(part)]
    return [t for name in getattr(value, "__slots__", ()) for t in tensors_of(getattr(value, name))]


def assert_same_bits(a, b):
    pairs = list(zip(tensors_of(a), tensors_of(b), strict=True))
    assert pairs
    for x, y in pairs:
        assert x.dtype == y.dtype
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def finish(queue, *windows):
    tickets = queue.submit(windows)
    queue.wait(tickets[-1], timeout=30)
    return tickets


def test_a_window_is_one_job_for_each_weight(start):
    block = make_block()
    expected = copy.deepcopy(make_window(block))
    work = copy.deepcopy(make_window(block))
    work.calls[1].record[0] = expected.calls[1].record[0] = 1  # skipped
    none = tuple(None if place == 1 else HYPER for place in range(3))
    work, expected = (w._replace(calls=(w.calls[0]._replace(hypers=none), *w.calls[1:])) for w in (work, expected))
    kernel, begin = NativeReplay(1), 0
    for place, weight in enumerate(expected.block.weights):
        shape = len(weight.deferred), weight.master.shape[1]
        end = begin + shape[0] * shape[1]
        slots = tuple(
            SlotGradient(call.memory[begin:end].view(shape), *call.hypers[place], float(call.record[RECORD_START + place]))
            for call in (expected.calls[0], expected.calls[2])
            if call.hypers[place] is not None
        )
        state = weight.master, weight.exp_avg, weight.exp_avg_sq, weight.steps
        out = expected.calls[0].memory[begin:end].view(shape)
        kernel.replay(ReplayJob(*state, weight.deferred, slots, "replay", 1.5, out, True, weight.key))
        begin = end
    kernel.close()
    done = word()
    queue = start(done)
    assert finish(queue, work) == [1]
    assert done.item() == 1
    assert_same_bits(work, expected)
    elements = sum(len(w.deferred) * w.master.shape[1] * (1 if place == 1 else 2) for place, w in enumerate(block.weights))
    assert queue.stats()[:2] == (1, elements)


def test_a_weight_without_gradients_publishes_its_masters(start):
    block = make_block(dtype=torch.float32)
    weights = copy.deepcopy(block.weights)
    calls = tuple(call._replace(hypers=(None,) * 3) for call in make_calls(block, 2))
    finish(start(), make_window(block, calls))
    assert_same_bits(block.weights, weights)
    assert torch.equal(calls[0].memory, torch.cat([w.master[w.deferred].flatten() for w in weights]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["replay", "mean"])
def test_queues_agree_on_a_history(dtype, moments, rule):
    """Undivided, then hand-overs between windows, with chosen weights and without a publish in between."""
    results = []
    for kind in ("torch", "native"):
        block, memory = make_block(1, dtype, moments, rule), []
        exchange = make_exchange(block)
        queue = make_queue(kind, word())
        for window in range(6):
            calls = make_calls(block, 1 + window % 3, window > 0, seed=window)
            memory.append(calls)
            if window % 2 == 0:
                choose(block, exchange, seed=window)
            merged = exchange if window % 2 == 0 else None
            places = (0, 2) if window == 3 else None
            changes = dict(divided=window > 0, exchange=merged, places=places, publish=window != 4)
            finish(queue, make_window(block, calls, **changes))
        results.append((block.weights, exchange, memory))
        queue.close()
    assert_same_bits(*results)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_a_merge_files_who_leaves_and_brings_who_arrives(start, moments):
    block = make_block(moments=moments, shapes=((5, 2, 2),))
    (weight,), exchange = block.weights, make_exchange(block)
    before, state = copy.deepcopy(weight), copy.deepcopy(exchange)
    exchange.numbers.copy_(torch.tensor([4, 1, 0, 2, 3, 1, 0]))  # place 0 goes to channel 4; place 1 stays with 1
    exchange.selected.copy_(torch.tensor([3, 1]))
    finish(start(), make_window(block, (), publish=False, exchange=exchange))
    pairs = zip(("master", "exp_avg", "exp_avg_sq"), (2, 2, 2), strict=True)
    for name, length in pairs:
        ours, theirs = getattr(exchange, name).view(2, length), getattr(weight, name)
        old, filed = getattr(state, name).view(2, length), getattr(before, name)
        assert torch.equal(ours, torch.stack([filed[4].float(), old[1]]))
        assert torch.equal(theirs, torch.cat([filed[:3], old[:1].to(theirs.dtype), filed[4:]]))
    assert exchange.steps.tolist() == [before.steps[4], state.steps[1]]
    assert weight.steps.tolist() == [*before.steps[:3].tolist(), state.steps[0], before.steps[4]]
    assert weight.deferred.tolist() == [0, 2, 3]
    assert exchange.selected.tolist() == [4, 1]


def test_windows_wait_for_all_their_gates_and_run_in_order(start):
    gates, done, blocks = torch.zeros(2, dtype=torch.int32), word(), [make_block(seed) for seed in range(2)]
    gates[1] = -(2**31)
    queue = start(done)
    steps = [w.steps.clone() for block in blocks for w in block.weights]
    address = gates.data_ptr()
    first = make_window(blocks[0], gates=(Gate(address, 3), Gate(address + 4, 2**31 + 1)))
    tickets = queue.submit([first, make_window(blocks[1])])
    assert tickets == [1, 2]
    gates[0] = 4  # past its value: open
    with pytest.raises(TimeoutError, match="window 1 was not done"):
        queue.wait(1, timeout=0.02)
    assert done.item() == 0
    assert all(torch.equal(a, b) for a, b in zip(steps, (w.steps for block in blocks for w in block.weights), strict=True))
    first.calls[2].record[0] = 1  # records are read when the gates are open
    opened = time.monotonic_ns()
    gates[1] = -(2**31) + 1
    queue.wait(2, timeout=30)
    assert done.item() == 2
    assert [int(block.weights[0].steps.max()) - int(steps[3 * i].max()) for i, block in enumerate(blocks)] == [2, 3]
    one, two = queue.history()
    assert (one.ticket, two.ticket) == (1, 2)
    assert opened <= one.gates_open <= one.begin <= one.end <= two.gates_open <= two.end <= time.monotonic_ns()
    assert queue.stats().wait_seconds >= 0.02


def test_tickets_and_words_count_modulo_two_to_the_32(start):
    done = word(-2)
    queue = start(done)
    assert queue.submit([make_window(make_block()) for _ in range(3)]) == [2**32 - 1, 0, 1]
    queue.drain()
    queue.wait(2**32 - 1)
    assert done.item() == 1
    with pytest.raises(ValueError, match="ticket 2 has not been given"):
        queue.wait(2)


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
            queue.wait(ticket, timeout=30)
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
    queue.wait(1, timeout=30)

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


def test_without_overlap_all_is_done_when_submit_returns(start):
    done, block = word(), make_block()
    queue = start(done, overlap=False)
    queue.submit([make_window(block, pause=0.02) for _ in range(2)])
    assert done.item() == 2
    assert queue.submit([]) == []


def test_bad_windows_are_refused(start):
    queue, block = start(), make_block()
    short = make_exchange(block)._replace(numbers=torch.zeros(3, dtype=torch.int32))
    call = make_calls(block, 1)[0]
    for work, message in (
        (make_window(block, ()), "needs a call to publish"),
        (make_window(block, exchange=short), "numbers must be of shape"),
        (make_window(block, (call._replace(memory=call.memory[1:]),)), "of 845 elements"),
        (make_window(block, (call._replace(memory=call.memory.float()),)), "bfloat16"),
        (make_window(block, (call._replace(hypers=(HYPER,)),)), "3 weights need as many hypers"),
        (make_window(block, (call._replace(record=torch.zeros(5)),)), "hold a factor for each weight"),
    ):
        with pytest.raises(ValueError, match=message):
            queue.submit([make_window(block), work])
    assert finish(queue, make_window(block, (call._replace(record=None),))) == [1]


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
from test_queue import Gate, make_block, make_queue, make_window, word
gate, block = word(), make_block(shapes=((512, 1024, 2),) * 3)
queue = make_queue({kind!r}, word())
queue.submit([make_window(block) for _ in range(9)] + [make_window(block, gates=(Gate(gate.data_ptr(), 1),))])
del block
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
