"""Copies between the halves, waited for or not: nothing overtakes, nothing waits for ever, and no result changes."""

import math
import random
import time
from contextlib import contextmanager

import pytest
import torch
from histories import Call, History, Player, assert_identical, histories, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streams import use

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine import pipeline
from stallfree.engine.host import HostError
from stallfree.engine.ring import Ring
from stallfree.engine.transfer import Link

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


@given(history=histories(dtypes=("fp32", "fp32", "bf16", "fp16")), rule=st.sampled_from(["replay", "mean"]))
@QUARTER
def test_the_asynchronous_path_gives_the_same_bits(monkeypatch, history, rule):
    expected = run(history, rule=rule)
    with monkeypatch.context() as patch:
        use(patch)
        assert_identical(run(history, rule=rule), expected)


class Copying(Link):
    """A GPU's link with copies that wait, on the CPU: what travels is not the memory it came from, and is spoilt after use."""

    @contextmanager
    def staging(self, target):
        yield torch.full_like(target, math.nan)

    @contextmanager
    def up(self, source, work=None, ahead=None):
        with super().up(source, work, ahead) as (rows, event):
            copy = rows.clone()
            yield copy, event
            copy.fill_(math.nan if copy.is_floating_point() else -1)

    def send(self, source):
        return super().send(source).clone()


@given(history=histories(dtypes=("fp32", "fp32", "bf16", "fp16")), rule=st.sampled_from(["replay", "mean"]))
@QUARTER
def test_copies_that_wait_give_the_same_bits(monkeypatch, history, rule):
    expected = run(history, rule=rule)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "link_to", lambda device, config: Copying(device))
        assert_identical(run(history, rule=rule), expected)


class Leading(Link):
    """A link whose launching thread is ahead of the host, as on a GPU: what it publishes may not be there yet."""

    @contextmanager
    def up(self, source, work=None, ahead=None):
        with super().up(source) as rows_and_event:
            yield rows_and_event


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("read", ["flush", "exact_weights", "state_dict", "write"])
def test_whoever_reads_the_state_waits_for_host_work_that_was_published(monkeypatch, lag, read):
    monkeypatch.setattr(pipeline, "link_to", lambda device, config: Leading(device))
    settings = dict(topk_ratio=0.0, update_interval=1, lag=lag, full_warm_up_rounds=0, min_numel=0, lookahead=0.0)
    settings["max_update_interval"] = 8  # a slot for each call: here nobody waits before one is filled again
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    optimizer, adamw = ZenFlowAdamW([ours], lr=1e-2, **settings), torch.optim.AdamW([theirs], lr=1e-2)
    optimizer.engine.delay = lambda where: time.sleep(5e-3 if where == "worker" else 0)
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


@given(history=histories(most_calls=12, overlap_step=True), seed=st.integers(0, 100))
@QUARTER
def test_delays_change_no_bit_there_either(monkeypatch, history, seed):
    rnd = random.Random(seed)

    def pause() -> None:
        time.sleep(rnd.random() * rnd.choice([0.0, 0.0, 1e-3]))

    def slowly(player: Player) -> None:
        player.optimizer.engine.delay = lambda where: pause()

    expected = run(history)
    with monkeypatch.context() as patch:
        use(patch, pause)
        assert_identical(run(history, prepare=slowly), expected)


def test_staging_memory_for_one_block_only(monkeypatch):
    """Copies are slow, and every block needs the same memory: its gradients must not overwrite those still on their way."""
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=2, full_warm_up_rounds=1, min_numel=0, block_numel=1)
    history = History(shapes=((8, 8),) * 6, calls=(Call(),) * 8, config=config)
    expected = run(history)
    use(monkeypatch, lambda: time.sleep(1e-3))
    assert_identical(run(history), expected)


class Broken:
    """A host kernel that fails at its n-th job."""

    name = "broken"

    def __init__(self, kernel, jobs: int) -> None:
        self.kernel, self.jobs = kernel, jobs

    def replay(self, job) -> None:
        self.jobs -= 1
        if self.jobs < 0:
            raise ArithmeticError("the host kernel broke")
        self.kernel.replay(job)

    def close(self) -> None:
        self.kernel.close()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("overlap_step", [False, True])
def test_a_failing_worker_lets_the_device_go_on_and_the_next_step_says_why(monkeypatch, asynchronous, overlap_step):
    if asynchronous:
        use(monkeypatch)
    player = Player(simple(), overlap_step=overlap_step)
    player.play(5)
    worker = player.optimizer.engine.worker
    worker.kernel = Broken(worker.kernel, jobs=1)
    with pytest.raises(HostError, match=r"(?s)parameter of shape.*the host kernel broke"):
        player.play()
    assert player.t < 12
    with pytest.raises(RuntimeError, match="earlier step failed"):
        player.optimizer.step()
    player.close()


def test_closing_releases_every_wait(monkeypatch):
    """Also those of windows that nobody has replayed: a device that waits would never let the process end."""
    use(monkeypatch)
    player = Player(simple())
    player.play(9)
    engine = player.optimizer.engine
    flags = [block.flag for block in engine.blocks]
    streams = engine.link.streams
    for flag in flags:
        streams.wait_value(streams.to_device, flag.address, flag.value + 100)
    player.close()  # waits for both streams
    assert not streams.registered


class Mark:
    """An event, and those that had happened before it."""

    def __init__(self, behind) -> None:
        self.behind = {self, *behind}


class Recorder:
    """Streams that only remember which events each comes after."""

    def __init__(self) -> None:
        self.behind: dict[str, set[Mark]] = {}

    def record(self, stream: str) -> Mark:
        return Mark(self.behind.get(stream, ()))

    def wait(self, stream: str, event: Mark) -> None:
        self.behind.setdefault(stream, set()).update(event.behind)


@given(
    takes=st.lists(st.tuples(st.integers(0, 700), st.sampled_from("aaab")), min_size=1, max_size=60),
    size=st.sampled_from([1400, 2048, 5000]),
)
def test_ring_memory_is_written_again_only_after_its_last_use(takes, size):
    streams = Recorder()
    ring, used = Ring(torch.device("cpu"), streams), [None] * size  # by byte: the event of its last use
    ring.grow(size)
    whole = ring.take(size, "a")
    assert not ring.has_room(1)
    begin, whole.used = whole.memory.data_ptr(), streams.record("copies")
    for nbytes, stream in takes:
        assert ring.has_room(nbytes)
        share = ring.take(nbytes, stream)
        start = share.memory.data_ptr() - begin if nbytes else 0
        assert (share.memory.numel(), start % Ring.ALIGNMENT) == (nbytes, 0)
        for event in used[start : start + nbytes]:
            assert event is None or event in streams.behind.get(stream, ())
        share.used = streams.record("copies")
        used[start : start + nbytes] = [share.used] * nbytes
