"""Copies between the halves, waited for or not: nothing overtakes, nothing waits for ever, and no result changes."""

import random
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from histories import Call, History, Player, accumulate, assert_identical, histories, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streams import use

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine import pipeline
from stallfree.engine.ring import Ring
from stallfree.engine.slots import SlotPool
from stallfree.engine.streams import Point, Timeline
from stallfree.engine.transfer import Link
from stallfree.kernels.queue import HostError

SETTINGS = dict(
    topk_ratio=0.25, update_interval=3, lag=1, full_warm_up_rounds=2, select_interval=4, min_numel=0, block_numel=60
)
QUARTER = settings(
    max_examples=max(4, settings().max_examples // 4), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def simple(calls: int = 14) -> History:
    return History(
        shapes=((6, 8), (5,), (8, 6), (3, 4, 2)), calls=(Call(),) * calls, config=ZenFlowConfig(**SETTINGS), groups=(0, 1, 1, 0)
    )


STAGING_BYTES = st.sampled_from([0, 0, 300, 1000, 1 << 20])  # the last one: whole blocks


@given(
    history=histories(dtypes=("fp32", "fp32", "bf16", "fp16")),
    rule=st.sampled_from(["replay", "mean"]),
    staging_bytes=STAGING_BYTES,
)
@QUARTER
def test_the_asynchronous_path_gives_the_same_bits(monkeypatch, history, rule, staging_bytes):
    expected = run(history, rule=rule)
    with monkeypatch.context() as patch:
        use(patch, staging_bytes=staging_bytes)
        assert_identical(run(history, rule=rule), expected)


class Leading(Link):
    """A link whose launching thread is ahead of the host, as on a GPU: what it publishes may not be there yet."""

    @contextmanager
    def up(self, source, work, arrival=None):
        with super().up(source, None) as rows:
            yield rows


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("read", ["flush", "exact_weights", "state_dict", "write"])
def test_whoever_reads_the_state_waits_for_host_work_that_was_published(monkeypatch, lag, read):
    monkeypatch.setattr(pipeline, "link_to", Leading)
    settings = dict(topk_ratio=0.0, update_interval=1, lag=lag, full_warm_up_rounds=0, min_numel=0, lookahead=0.0)
    monkeypatch.setattr(SlotPool, "give", lambda self, slots, after: None)  # here nobody waits before one is filled again
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    optimizer, adamw = ZenFlowAdamW([ours], lr=1e-2, **settings), torch.optim.AdamW([theirs], lr=1e-2)
    optimizer.engine.delay = lambda where: 5e-3 if where == "worker" else 0.0
    for call in range(4):
        for p in (ours, theirs):
            p.grad = torch.full((4, 6), 1.0 + call)
        optimizer.step()
        adamw.step()
    expected = theirs.detach().clone()
    if read == "exact_weights":
        with optimizer.exact_weights():
            shown = ours.detach().clone()
    elif read == "state_dict":
        state = optimizer.state_dict()["state"][0]  # with lag 1, the last gradient is still in a slot or a window
        shown = state["master"].clone()
    elif read == "write":
        with torch.no_grad():
            ours.copy_(expected)
        optimizer.flush()
        shown, moment = ours.detach().clone(), optimizer.engine.weights[ours].host.exp_avg
        torch.testing.assert_close(moment.t(), adamw.state[theirs]["exp_avg"])
    else:
        optimizer.flush()
        shown = ours.detach().clone()
    torch.testing.assert_close(shown, expected, rtol=1e-6, atol=1e-7)
    optimizer.close()


@given(history=histories(most_calls=12, overlap_step=True), seed=st.integers(0, 100), staging_bytes=STAGING_BYTES)
@QUARTER
def test_delays_change_no_bit_there_either(monkeypatch, history, seed, staging_bytes):
    rnd = random.Random(seed)

    def seconds() -> float:
        return rnd.random() * rnd.choice([0.0, 0.0, 1e-3])

    def slowly(player: Player) -> None:
        player.optimizer.engine.delay = lambda where: seconds()

    expected = run(history)
    with monkeypatch.context() as patch:
        use(patch, lambda: time.sleep(seconds()), staging_bytes)
        assert_identical(run(history, prepare=slowly), expected)


ONE_BLOCK = 8 * 8 * 4  # bytes


@pytest.mark.parametrize("staging_bytes", [2 * ONE_BLOCK, ONE_BLOCK, 0], ids=["two blocks", "one block", "a row or two"])
def test_little_staging_memory(monkeypatch, staging_bytes):
    """Copies are slow, and all blocks need the same memory: their gradients must not overwrite those still on their way."""
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=2, full_warm_up_rounds=1, min_numel=0, block_numel=1)
    history = History(shapes=((8, 8),) * 6, calls=(Call(),) * 8, config=config)
    expected = run(history)
    use(monkeypatch, lambda: time.sleep(1e-3), staging_bytes)
    assert_identical(run(history), expected)


def test_a_slot_is_free_when_its_last_piece_has_come_up(monkeypatch):
    use(monkeypatch)
    p = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = ZenFlowAdamW([p], lr=1e-2, topk_ratio=0.0, update_interval=1, full_warm_up_rounds=0, min_numel=0)
    engine, give, begun = optimizer.engine, optimizer.engine.pool.give, []

    def given(slots, after):
        if slots:  # at the close of windows of one call there are none
            begun.append(after == engine.link._went_up.now())
        give(slots, after)

    engine.pool.give = given
    for _ in range(5):
        accumulate([p], 0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    assert begun == [True] * 4


def test_waiting_for_staging_memory_is_a_stall(monkeypatch):
    """Within a window nothing comes up: all that is waited for are copies down, for one block at a time."""
    use(monkeypatch, lambda: time.sleep(2e-3))
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=8, stagger=False, full_warm_up_rounds=0, min_numel=0, block_numel=1)
    player = Player(History(shapes=((8, 8),) * 6, calls=(Call(),) * 5, config=config))
    player.play(2)
    before = player.optimizer.metrics()
    player.play()
    after = player.optimizer.metrics()
    assert after["bytes_up_total"] == before["bytes_up_total"]
    stalled, crowded = (after[name] - before[name] for name in ("stall_ms_total", "crowding_ms_total"))
    assert stalled == crowded > 2 * 3 * 5  # a pause for each block but the first
    player.close()


def broken(kernel, jobs: int):
    """Let a host kernel fail at its n-th job."""
    replay, left = kernel.replay, iter(range(jobs))

    def fail(job):
        if next(left, None) is None:
            raise ArithmeticError("the host kernel broke")
        replay(job)

    return fail


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("overlap_step", [False, True])
def test_a_failing_worker_lets_the_device_go_on_and_the_next_step_says_why(monkeypatch, asynchronous, overlap_step):
    if asynchronous:
        use(monkeypatch)
    player = Player(simple(), overlap_step=overlap_step, host_kernel="torch")
    player.play(5)
    kernel = player.optimizer.engine.worker.kernel
    kernel.replay = broken(kernel, jobs=1)
    with pytest.raises(HostError, match=r"(?s)parameter of shape.*the host kernel broke"):
        player.play()
    assert player.t < 12
    with pytest.raises(RuntimeError, match="earlier call failed"):
        player.optimizer.step()
    player.close()


def test_closing_releases_every_wait(monkeypatch):
    """Also those of windows that nobody has replayed: a device that waits would never let the process end."""
    use(monkeypatch)
    player = Player(simple())
    player.play(9)
    link = player.optimizer.engine.link
    link.streams.wait_for(link.streams.to_device, Point(link.host, link.host.value + 100))
    player.close()  # waits for both streams
    assert not link.streams.registered


class Recorder:
    """Streams that only remember which points each has waited for."""

    def __init__(self) -> None:
        self.seen = 0

    def wait(self, point: Point) -> None:
        self.seen = max(self.seen, point.value)


@given(
    takes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 1), st.integers(1, 4)), min_size=1, max_size=60),
    size=st.sampled_from([1400, 2048, 5000]),
)
def test_ring_memory_is_written_again_only_after_its_last_use(takes, size):
    """By whichever stream, and of each of its parts; also where less has been read than was taken."""
    streams, copies = (Recorder(), Recorder()), Timeline(torch.zeros(1, dtype=torch.int32), 0)
    ring, used = Ring(torch.device("cpu")), [0] * size  # by byte: the moment of its last use
    ring.grow(size)
    whole = ring.take(size, streams[0].wait)
    assert not ring.has_room(1)
    begin, whole.used = whole.rows(torch.uint8).data_ptr(), copies.next()
    for nbytes, number, parts in takes:
        stream = streams[number]
        assert ring.has_room(nbytes)
        share = ring.take(nbytes, stream.wait)
        start = share.rows(torch.uint8).data_ptr() - begin if nbytes else 0
        assert (share.rows(torch.uint8).numel(), start % Ring.ALIGNMENT) == (nbytes, 0)
        assert max(used[start : start + nbytes], default=0) <= stream.seen
        share.used = copies.next()
        used[start : start + nbytes] = [share.used.value] * nbytes
        if nbytes and parts > 1:
            read = [(nbytes * part // (parts + number), copies.next()) for part in range(1, parts + 1)]
            ring.leave(share, read)
            for (low, _), (high, point) in pairwise([(0, share.used), *read]):
                used[start + low : start + high] = [point.value] * (high - low)


def test_the_host_may_begin_with_a_block_before_the_last_copy_is_there(monkeypatch):
    """Its gates are its own copies and the record of the call; only hand-overs, which are copied last, wait for all."""
    use(monkeypatch)
    params = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(3)]
    settings = dict(topk_ratio=0.25, update_interval=2, stagger=False, full_warm_up_rounds=0, select_interval=6)
    optimizer = ZenFlowAdamW(params, min_numel=0, block_numel=1, **settings)
    engine, submitted = optimizer.engine, []
    submit = engine.worker.submit

    def noted(works):
        submitted.append((works, engine.link.sent().value))
        return submit(works)

    engine.worker.submit = noted
    for _ in range(12):
        accumulate(params, 0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    plain = [works for works, _ in submitted if works and all(work.exchange is None for work in works)]
    handing_over = [(work, sent) for works, sent in submitted for work in works if work.exchange is not None]
    assert plain
    assert handing_over
    for works in plain:
        first, last = ([gate.value for gate in works[place].gates] for place in (0, -1))
        assert first[0] < last[0]
        assert first[1] == last[1]
    assert all(work.gates[0].value == sent for work, sent in handing_over)


def test_the_lead_is_counted_in_calls(monkeypatch):
    use(monkeypatch)
    params = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(3)]
    optimizer = ZenFlowAdamW(params, min_numel=0, block_numel=1, topk_ratio=0.0, update_interval=1, full_warm_up_rounds=1)
    link, counts = optimizer.engine.link, []
    for t in range(6):
        accumulate(params, t)
        optimizer.step()
        optimizer.zero_grad()
        assert link.lead() == 0, "the launching thread is the device here"
        counts.append(link._computed.value)
    joined, link._joined = link._joined, link._shown.next()
    assert link.lead() == 1, "the device waits for the host, at the end of backward"
    link._joined = joined
    link._computed.value += counts[-1] - counts[-2]
    assert link.lead() == 1
    optimizer.close()
