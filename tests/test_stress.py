"""Correctness under stress: late streams and hosts, layers in any order, threads, failures in the middle of a backward pass.

See tests/stress.py. Whatever happens, results are those of a quiet run, bit for bit.
"""

import random
import threading
import time
from contextlib import nullcontext
from functools import partial

import pytest
import sanitize
import stress
import torch
import torch.nn.functional as F
from histories import assert_identical
from stress import (
    CALLS,
    PLACES,
    WIDTH,
    Branches,
    Deep,
    Late,
    Thin,
    batch,
    build,
    device_of,
    gradients,
    late,
    linear,
    squares,
    trained,
    weights,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import LR, PRESETS, Mirror, train

from stallfree import ZenFlowAdamW
from stallfree.engine.blocks import Block
from stallfree.engine.slots import Until
from stallfree.engine.streams import Timeline

NO_SELECTION = dict(topk_ratio=0.0, full_warm_up_rounds=1)


@pytest.fixture(params=PLACES)
def place(request):
    return request.param


@pytest.fixture
def device(place, monkeypatch):
    return device_of(place, monkeypatch)


# Late


@pytest.mark.parametrize("channel_dim", [0, 1], ids=["long channels", "short channels"])
@pytest.mark.parametrize("transposed", [False, True])
def test_thin_layers(place, device, channel_dim, transposed):
    """131072 channels of 32 elements, or the other way round: where a missing wait shows (torchao's trick)."""
    shape = (32, 131072 if place == "cuda" else 256)
    make = partial(Thin, *(shape[::-1] if transposed else shape))
    how = dict(calls=8, loss=lambda model, t: linear(model, t % 3), channel_dim=channel_dim, block_numel=1 << 23)
    quiet = trained(make, device, **how)
    for seed in range(2):
        assert_identical(trained(make, device, prepare=late(seed), **how), quiet)
    torch.manual_seed(0)
    model = make().to(device)
    adamw = Mirror([dict(torch.optim.AdamW([nn.Parameter()]).defaults, lr=LR, params=list(model.parameters()))])
    for t in range(8):
        adamw.step(gradients(model, t % 3))
    for p, ours in zip(model.parameters(), quiet[-1], strict=True):
        p.detach().copy_(ours)
    adamw.compare("flushed", 8)


@pytest.mark.parametrize(
    "settings", [dict(), dict(lag=2, select_interval=1), dict(lag=0), NO_SELECTION, dict(max_grad_norm=0.1)]
)
def test_delays_on_every_stream_change_no_bit(device, settings):
    quiet = trained(Deep, device, **settings)
    for seed in range(2):
        assert_identical(trained(Deep, device, prepare=late(seed), **settings), quiet)


@pytest.mark.parametrize("staging_bytes", [0, 700, 5000])
def test_little_staging_memory_changes_no_bit(monkeypatch, staging_bytes):
    """Copies wait for each other's memory, and some windows cannot come up before the step that publishes them."""
    quiet = trained(Deep, torch.device("cpu"))
    monkeypatch.setitem(stress.STAGING_BYTES, "streams", staging_bytes)
    assert_identical(trained(Deep, device_of("streams", monkeypatch), prepare=late(1)), quiet)


def test_a_slow_host_changes_no_bit(device):
    """Each window takes longer than a step."""
    quiet = trained(lambda: Deep(2), device)

    def slow(optimizer: ZenFlowAdamW) -> None:
        optimizer.engine.delay = lambda place: 5e-3 if place == "worker" else 0.0

    assert_identical(trained(lambda: Deep(2), device, prepare=slow, host_threads=2), quiet)


@pytest.mark.parametrize("S, lag", [(1, 1), (3, 1), (2, 2)])
def test_a_slow_host_makes_nothing_later(device, S, lag):
    """One gradient among zeros is visible S + lag - 1 calls later at most, however long its window takes."""
    settings = dict(update_interval=S, lag=lag, full_warm_up_rounds=2, topk_ratio=0.0, min_numel=0, block_numel=1)
    params = [nn.Parameter(torch.ones(4, 6, device=device)) for _ in range(4)]
    optimizer = ZenFlowAdamW(params, lr=1e-2, weight_decay=0.0, **settings)
    optimizer.engine.delay = lambda place: 4e-3 if place == "worker" else 0.0
    impulse, moved = 2 + 2 * S, {}
    for t in range(impulse + S + lag):
        sum((p * float(t == impulse)).sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
        for i, p in enumerate(params):
            if i not in moved and bool((p.detach() != 1).all()):
                moved[i] = t - impulse
    optimizer.close()
    assert sorted(moved) == [0, 1, 2, 3]
    assert lag <= min(moved.values())
    assert max(moved.values()) <= S + lag - 1


def test_the_host_writes_a_slot_only_when_its_last_reader_is_done(monkeypatch):
    """A window without a gradient: the host is the first to write its slot, which a copy may be reading still."""
    device_of("streams", monkeypatch)
    p = nn.Parameter(torch.ones(4, 6))
    optimizer = ZenFlowAdamW([p], lr=1e-2, topk_ratio=0.0, update_interval=1, full_warm_up_rounds=0, min_numel=0)
    engine, take = optimizer.engine, optimizer.engine.pool.take
    reading = Timeline(torch.zeros(1, dtype=torch.int32), 0)
    last = reading.next()

    def taken(block: Block, nbytes: int):
        slot = take(block, nbytes)
        slot.cells[0].after = (Until(slot.cells[0].size, last),)
        return slot

    engine.pool.take = taken
    optimizer.step()
    window = engine.blocks[0].queue[0]
    time.sleep(0.05)
    assert engine.worker.queue.stats().windows == 0
    reading.memory.fill_(last.value)
    engine.worker.queue.wait(window.work.value)
    assert engine.worker.queue.stats().windows == len(window.replayed) == 2, "in two portions"
    optimizer.close()


def test_the_program_for_compute_sanitizer(place, device):
    if place == "streams":
        pytest.skip("kernels are the CPU's")
    sanitize.main(device)


def test_a_block_is_staged_after_every_stream_that_computed_for_it(monkeypatch):
    """Two weights whose gradients come on two streams: the second waits for the first, and keeps its gradient's memory."""
    device_of("streams", monkeypatch)
    params = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    optimizer = ZenFlowAdamW(params, lr=1e-2, topk_ratio=0.0, full_warm_up_rounds=0, min_numel=0)
    streams, now, waits, held = optimizer.engine.link.streams, [0], [], []

    def another_stream(place: str) -> float:
        now[0] += place == "hook"
        return 0.0

    optimizer.engine.delay = another_stream
    monkeypatch.setattr(streams, "current_handle", lambda: now[0])
    monkeypatch.setattr(streams, "wait", lambda stream, event: waits.append(now[0]))
    monkeypatch.setattr(streams, "hold", lambda tensor, stream: held.append(tensor.shape), raising=False)
    sum(p.sum() for p in params).backward()
    assert (waits, held) == ([2], [p.shape for p in params])
    optimizer.step()
    optimizer.close()


# Order


@pytest.mark.parametrize("block_numel", [1, 600, 10_000])
def test_layers_that_finish_in_changing_order_change_no_bit(device, block_numel):
    def shuffle(model: nn.Module, t: int) -> None:
        random.Random(t).shuffle(model.order)

    fixed = trained(Branches, device, block_numel=block_numel)
    assert_identical(trained(Branches, device, before=shuffle, block_numel=block_numel), fixed)
    assert_identical(trained(Branches, device, before=shuffle, prepare=late(2), block_numel=block_numel), fixed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(device, reentrant):
    plain = trained(Deep, device, loss=from_leaf)
    assert_identical(trained(lambda: Deep(checkpointing=reentrant), device, loss=from_leaf, prepare=late(3)), plain)


def from_leaf(model: nn.Module, t: int) -> torch.Tensor:
    """Reentrant checkpointing wants an input with a gradient."""
    return (model(batch(model, t).clone().requires_grad_()) - 1).pow(2).mean()


@pytest.mark.parametrize("whole", [False, True], ids=["layer by layer", "whole"])
def test_compiled_models(place, device, whole):
    backend = "inductor" if place == "cuda" else "aot_eager"
    model = Deep(2).to(device)
    if whole:
        compiled = torch.compile(model, backend=backend)
        train(model, lambda it, t: squares(compiled if it is model else it, t), PRESETS["stallfree"])
    else:
        for layer in model.layers:
            layer.compile(backend=backend)
        train(model, squares, PRESETS["stallfree"])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).view(2, 4, 3, WIDTH).unbind(2)
        with sdpa_kernel(SDPBackend.MATH):  # whose backward is deterministic
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)).flatten(0, 1)


def test_run_to_run_and_without_overlap(device):
    first = trained(Attention, device)
    assert_identical(trained(Attention, device, prepare=late(4)), first)
    assert_identical(trained(Attention, device, overlap_step=False), first)


# Side by side


def test_two_optimizers_in_turn(device):
    alone = [trained(Deep, device, update_interval=S) for S in (2, 3)]
    pairs = [build(Deep, device, update_interval=S) for S in (2, 3)]
    for t in range(CALLS):
        for model, _ in pairs:
            squares(model, t).backward()
        for _, optimizer in reversed(pairs):
            optimizer.step()
            optimizer.zero_grad()
    for (model, optimizer), expected in zip(pairs, alone, strict=True):
        optimizer.flush()
        assert_identical([weights(model)], expected[-1:])
        optimizer.close()


def test_two_optimizers_in_two_threads(device):
    alone = [trained(Deep, device, update_interval=S) for S in (2, 3)]
    seen, errors = {}, []

    def work(S: int) -> None:
        try:
            with stream_of(device):
                model, optimizer = models[S]
                optimizer.engine.delay = Late(optimizer, S)
                for t in range(CALLS):
                    squares(model, t).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.flush()
                seen[S] = weights(model)
                optimizer.close()
        except BaseException as error:
            errors.append(error)

    models = {S: build(Deep, device, update_interval=S) for S in (2, 3)}
    synchronize(device)
    threads = [threading.Thread(target=work, args=(S,)) for S in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    synchronize(device)
    assert not errors
    assert_identical([seen[2], seen[3]], [each[-1] for each in alone])


def test_a_fresh_thread_may_load_flush_save_and_close(device):
    """One that has not called CUDA before."""
    expected = trained(Deep, device)[-1:]
    model, optimizer = build(Deep, device)
    for t in range(CALLS):
        squares(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(device)
    errors = []

    def in_thread(call) -> None:
        def work() -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors

    saved = {}
    in_thread(lambda: saved.update(optimizer.state_dict()))
    in_thread(lambda: optimizer.load_state_dict(saved))
    in_thread(optimizer.flush)
    assert_identical([weights(model)], expected)
    in_thread(optimizer.close)


def test_another_model_evaluated_beside_training(device):
    quiet = trained(Deep, device)
    other = Deep().to(device)
    with torch.no_grad():
        expected = squares(other, 0).item()
    losses = []
    synchronize(device)
    side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def evaluate(model: nn.Module, t: int) -> None:
        with torch.no_grad(), nullcontext() if side is None else torch.cuda.stream(side):
            losses.append(squares(other, 0))

    assert_identical(trained(Deep, device, before=evaluate, prepare=late(5)), quiet)
    synchronize(device)
    assert {loss.item() for loss in losses} == {expected}


def stream_of(device: torch.device):
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("together", [False, True], ids=["in turn", "branches"])
def test_several_computing_streams(together):
    """Backward on another stream at every call; or on several at once, for the weights of one block."""
    device = torch.device("cuda")
    settings = dict(block_numel=10_000)
    expected = trained(lambda: Branches(4), device, **settings)
    streams = [torch.cuda.Stream(device) for _ in range(4)]
    for seed in range(3):
        model, optimizer = build(lambda: Branches(4), device, **settings)
        optimizer.engine.delay = Late(optimizer, seed)
        model.streams = streams if together else []
        seen = []
        for t in range(CALLS):
            stream = torch.cuda.current_stream() if together else streams[t % 3]
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                squares(model, t).backward()
                if t % 2:
                    optimizer.step()
            torch.cuda.default_stream().wait_stream(stream)
            if not t % 2:
                optimizer.step()
            optimizer.zero_grad()
            seen.append(weights(model))
        optimizer.flush()
        assert_identical([*seen, weights(model)], expected)
        optimizer.close()
