"""Both queues: the same bits as one job after the other, and windows in order between gates and `done`."""

import copy
import time
from itertools import accumulate, pairwise

import pytest
import torch
from queue_cases import (
    HYPER,
    RECORD_START,
    assert_same_bits,
    choose,
    finish,
    make_block,
    make_calls,
    make_exchange,
    make_queue,
    make_window,
    word,
)

from stallfree.kernels.native import NativeReplay
from stallfree.kernels.queue import HostError
from stallfree.kernels.replay import ReplayJob, SlotGradient
from stallfree.kernels.windows import Gate


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


def test_work_counts_while_it_goes_on(start):
    block = make_block(shapes=((1024, 4096, 0),))
    queue, seen = start(), []
    for window in range(1, 21):  # on a busy machine one may be over before anybody looks
        queue.submit([make_window(block)])
        while not seen or seen[-1].windows < window:
            seen.append(queue.stats())
        assert seen[-1].running_seconds == 0
    so_far = [stats.busy_seconds + stats.running_seconds for stats in seen]
    assert so_far == sorted(so_far)
    assert any(stats.running_seconds for stats in seen)


def test_work_that_fails_is_over(start):
    block = make_block()
    queue = start()
    block.weights[0].steps.fill_(-1)
    (ticket,) = queue.submit([make_window(block)])
    with pytest.raises(HostError):
        queue.wait(ticket)
    assert queue.stats() == (0, 0, 0.0, 0.0)


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


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(0, 0), (1, 1), (2, 5), (7, 11), (9, 9), (4, 16)])
def test_a_window_in_spans_is_the_same_window(start, cuts, moments, divided):
    """Cut between rows, within a weight or between two; empty spans; and chosen weights. A row is worked on where it begins."""
    starts = row_starts(make_block(), divided)
    ends = sorted(starts[cut] if cut < len(starts) else starts[-1] for cut in cuts)
    bounds = [0, *ends, sum(len(w.deferred if divided else w.every) * w.master.shape[1] for w in make_block().weights)]
    for places in (None, (1,), (0, 2)):
        whole, parts = (make_block(moments=moments) for _ in range(2))
        calls = [make_calls(whole, 3, divided) for _ in range(2)]
        finish(start(), make_window(whole, calls[0], divided=divided, places=places))
        spans = [make_window(parts, calls[1], divided=divided, places=places, span=span) for span in pairwise(bounds)]
        queue = start()
        queue.submit(spans[:1])
        queue.drain()
        assert_same_bits(calls[1][0].memory[bounds[1] :], make_calls(parts, 1, divided)[0].memory[bounds[1] :])
        finish(queue, *spans[1:])
        assert_same_bits(parts.weights, whole.weights)
        assert_same_bits([call.memory for call in calls[1]], [call.memory for call in calls[0]])


def row_starts(block, divided):
    """Where each row of a call's gradients begins."""
    lengths = [w.master.shape[1] for w in block.weights for _ in (w.deferred if divided else w.every)]
    return list(accumulate(lengths, initial=0))[:-1]


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
    time.sleep(0.02)
    assert done.item() == 0
    assert all(torch.equal(a, b) for a, b in zip(steps, (w.steps for block in blocks for w in block.weights), strict=True))
    first.calls[2].record[0] = 1  # records are read when the gates are open
    opened = time.monotonic_ns()
    gates[1] = -(2**31) + 1
    queue.wait(2)
    assert done.item() == 2
    assert [int(block.weights[0].steps.max()) - int(steps[3 * i].max()) for i, block in enumerate(blocks)] == [2, 3]
    one, two = queue.history()
    assert (one.ticket, two.ticket) == (1, 2)
    assert opened <= one.gates_open <= one.begin <= one.end <= two.gates_open <= two.end <= time.monotonic_ns()


def test_tickets_and_words_count_modulo_two_to_the_32(start):
    done = word(-2)
    queue = start(done)
    assert queue.submit([make_window(make_block()) for _ in range(3)]) == [2**32 - 1, 0, 1]
    queue.drain()
    queue.wait(2**32 - 1)
    assert done.item() == 1
    with pytest.raises(ValueError, match="ticket 2 has not been given"):
        queue.wait(2)


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
        (make_window(block, span=(5, 846)), "span must lie in its 845 elements"),
        (make_window(block, span=(-1, 5)), "span must lie in its 845 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            queue.submit([make_window(block), work])
    assert finish(queue, make_window(block, (call._replace(record=None),))) == [1]
