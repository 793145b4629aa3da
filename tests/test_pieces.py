"""Gradients and weights of large blocks, which go in pieces: whatever comes between two of them, no result changes."""

import copy
import random
import threading
import time

import pytest
import torch
from histories import accumulate, assert_identical
from large import LARGE, large
from streams import StandIn, Stream, use, use_streams

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine.blocks import build_blocks, classify
from stallfree.engine.ring import ring_bytes
from stallfree.engine.sending import Sending


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staging_bytes", [0, 300, 1500, 1 << 20])
def test_staging_memory_is_what_the_planner_says_however_large_a_block(monkeypatch, dtype, staging_bytes):
    use(monkeypatch, staging_bytes=staging_bytes)
    params, optimizer = large(dtype)
    blocks, link = [state.block for state in optimizer.engine.blocks], optimizer.engine.link
    total, row = sum(param.nbytes for param in params), 64 * dtype.itemsize
    assert (link._down_ring.size, link._up_ring.size) == ring_bytes(blocks)
    assert max(ring_bytes(blocks)) <= max(min(staging_bytes * 4 / 3, total), 2 * row)
    for t in range(6):
        accumulate(params, t)
        optimizer.step()
        optimizer.zero_grad()
    assert (link._down_ring.size, link._up_ring.size) == ring_bytes(blocks)
    optimizer.close()


@pytest.mark.parametrize("shape", [(151936, 1536), (152064, 3584)], ids=["Qwen2.5 1.5B", "Qwen2.5 7B"])
def test_staging_memory_of_a_large_vocabulary(shape):
    """The embedding alone takes 445 MiB, 1040 MiB."""
    embedding, layer = (torch.nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="meta")) for s in (shape, (4096, 4096)))
    config = ZenFlowConfig()
    _, weights = classify([("embed_tokens.weight", embedding), ("layers.0.weight", layer)], config)
    total = sum(weight.numel for weight in weights) * 2
    assert ring_bytes(build_blocks(weights, config)) == (384 << 20, min(total, 512 << 20))


def test_a_large_block_is_published_piece_by_piece_when_its_turn_has_come(monkeypatch):
    """Each as its predecessors leave the staging memory, beside computation."""
    use(monkeypatch, staging_bytes=1024)
    params, optimizer = large(topk_ratio=0.0, stagger=False)
    blocks, room = optimizer.engine.blocks, optimizer.engine.link._up_ring.size

    def left() -> list[int]:
        return [sum(piece.values.nbytes for window in block.queue for piece in window.pieces) for block in blocks]

    for t in range(6):
        accumulate(params, t)
        optimizer.step()
        optimizer.zero_grad()
    assert left() == [param.nbytes for param in params]
    assert left()[-1] > room
    for place, param in reversed(list(enumerate(params))):
        (param * 2.0).sum().backward()
        assert left() == [other.nbytes for other in params[:place]] + [0] * (5 - place)
    optimizer.close()


def played(params: list[torch.nn.Parameter], optimizer: ZenFlowAdamW) -> list[list[torch.Tensor]]:
    """What a large block's gradient looks like between backward and step(), restaged, missing and skipped; and its weights."""
    seen = []
    for t in range(14):
        accumulate(params if t % 5 != 3 else params[:-1], t)
        if t % 4 == 1:  # unannounced: what is staged is fetched and staged again
            accumulate(params[-1:], 100 + t)
        if t == 7:
            params[-1].grad.mul_(float("nan"))
        grad = optimizer.full_gradient(params[-1]) if params[-1].grad is not None else torch.zeros(1)
        if t % 3 == 2:
            with optimizer.exact_weights():
                seen.append([param.detach().clone() for param in params])
        optimizer.step()
        optimizer.zero_grad()
        seen.append([grad.nan_to_num(), *(param.detach().clone() for param in params)])
    optimizer.flush()
    seen.append([param.detach().clone() for param in params])
    optimizer.close()
    return seen


@pytest.mark.parametrize("settings", [dict(), dict(lag=2), dict(lag=0), dict(channel_dim=0), dict(block_numel=1 << 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staging_bytes", [0, 600, 3000])
def test_pieces_change_no_bit(monkeypatch, settings, dtype, staging_bytes):
    expected = played(*large(dtype, **settings))
    rnd = random.Random(staging_bytes)
    use(monkeypatch, lambda: time.sleep(rnd.random() * rnd.choice([0.0, 0.0, 5e-4])), staging_bytes)
    assert_identical(played(*large(dtype, **settings)), expected)


def test_later_pieces_of_a_large_block_go_between_those_of_others(monkeypatch):
    """So that others do not wait for all of them; the last ones go in step()."""
    use(monkeypatch, staging_bytes=1024)
    params, optimizer = large(topk_ratio=0.0)
    blocks, sent, send = optimizer.engine.blocks, [], Sending._send

    def noted(self, block, places, grads, low, target):
        sent.append((blocks.index(block), low))
        send(self, block, places, grads, low, target)

    monkeypatch.setattr(Sending, "_send", noted)
    for t in range(3):
        sent.clear()
        accumulate(params, t)
        optimizer.step()
        optimizer.zero_grad()
    count = sum(block == 4 for block, _ in sent)
    assert count > 6
    lows = [low for block, low in sent if block == 4]
    assert lows == sorted(set(lows))
    others = [(4, lows[0]), (4, lows[1]), (3, 0), (4, lows[2]), (2, 0), (4, lows[3]), (1, 0), (4, lows[4]), (0, 0)]
    assert sent == others + [(4, low) for low in lows[5:]]
    optimizer.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_staging_memory_holds_whole_is_cut_only_where_that_begins_anew(monkeypatch, late):
    """512 bytes are left there, 8 rows, unless the copy of the call before has been made: then all is free again."""
    use(monkeypatch, lambda: time.sleep(0.05 if late else 0.0), staging_bytes=64 * 16 * 4 + 2 * 256)
    params, optimizer = large(topk_ratio=0.0, update_interval=8, full_warm_up_rounds=0, stagger=False)
    block, sent, send = optimizer.engine.blocks[-1], [], Sending._send

    def noted(self, block, places, grads, low, target):
        sent.append((low, target.numel(), self.link._now_beside))
        send(self, block, places, grads, low, target)

    monkeypatch.setattr(Sending, "_send", noted)
    for _ in range(2):
        accumulate(params[-1:], 0)
        assert block.turn == 1
        optimizer.step()
        optimizer.zero_grad()
        if not late:
            optimizer.engine.link.wait_down()
    whole = (0, 64 * 16, False)
    assert sent == [whole, *([(0, 128, False), (128, 64 * 16 - 128, False)] if late else [whole])]
    assert not optimizer.engine.sending.later
    optimizer.close()


def loaded(optimizer: ZenFlowAdamW, params: list[torch.nn.Parameter], t: int) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)  # what was staged is gone
    accumulate(params, t)


def broken_off(optimizer: ZenFlowAdamW, params: list[torch.nn.Parameter], t: int) -> None:
    """Memory goes while a later piece is sent; whoever catches that goes on."""
    link = optimizer.engine.link
    down = link.down

    def fail(*_: object) -> None:
        link.down = down
        raise torch.OutOfMemoryError("no memory")

    optimizer.zero_grad()
    accumulate(params[-1:], t)
    if optimizer.engine.sending.later:  # in pieces
        link.down = fail
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.full_gradient(params[-1])
    accumulate(params[:-1], t)


BETWEEN = {
    "zeroed": lambda optimizer, params, t: (optimizer.zero_grad(set_to_none=False), accumulate(params[2:], 100 + t)),
    "set to none": lambda optimizer, params, t: (optimizer.zero_grad(), accumulate(params[2:], 100 + t)),
    "loaded": loaded,
    "a second backward pass": lambda optimizer, params, t: accumulate(params[t % 4 :], 100 + t),
    "read": lambda optimizer, params, t: params[-1].grad.add_(optimizer.full_gradient(params[-1])),
    "broken off": broken_off,
}


def trained(between: str | None = None, **settings) -> list[torch.Tensor]:
    """The weights after some calls, in every third of which something comes between backward and step()."""
    params, optimizer = large(**settings)
    for t in range(12):
        accumulate(params, t)
        if between and t % 3 == 1:
            BETWEEN[between](optimizer, params, t)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    optimizer.close()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("select", [2, 5])
def test_whatever_comes_between_backward_and_step_pieces_change_no_bit(monkeypatch, between, select):
    expected = trained(between, select_interval=select)
    rnd = random.Random(select)
    use(monkeypatch, lambda: time.sleep(rnd.random() * rnd.choice([0.0, 0.0, 5e-4])), 600)
    assert_identical([trained(between, select_interval=select)], [expected])


def test_pieces_are_there_when_the_host_begins_in_backward(monkeypatch):
    early = dict(preset="stronghold", topk_ratio=0.0, update_interval=1, select_interval=64)
    expected = trained(**early)
    use(monkeypatch, lambda: time.sleep(2e-4), 600)
    assert_identical([trained(**early)], [expected])


def test_gradients_of_one_block_at_most_wait_to_be_sent(monkeypatch):
    use(monkeypatch, staging_bytes=600)
    params = [torch.nn.Parameter(torch.ones(64, 16)) for _ in range(6)]
    optimizer = ZenFlowAdamW([(f"layers.{n}.weight", p) for n, p in enumerate(params)], lr=1e-2, config=ZenFlowConfig(**LARGE))
    engine = optimizer.engine
    assert len(engine.blocks) == 6
    for param in reversed(params):
        accumulate([param], 0)
        assert len({later.block for later in engine.sending.later}) == 1
        assert len(engine.sending.later) > 3
    optimizer.step()
    optimizer.zero_grad()
    assert not engine.sending.later
    accumulate(params, 1)
    assert engine.sending.later
    optimizer.close()
    assert not engine.sending.later


@pytest.mark.parametrize("staging_bytes", [600, 1 << 20])
def test_state_may_be_read_in_another_thread_during_backward(monkeypatch, staging_bytes):
    def weights(read: bool) -> list[torch.Tensor]:
        params, optimizer = large(select_interval=3)
        stop, errors = threading.Event(), []

        def reading() -> None:
            while not stop.wait(1e-4):
                try:
                    optimizer.state_dict()
                except Exception as error:
                    errors.append(error)
                    return

        thread = threading.Thread(target=reading)
        if read:
            thread.start()
        for t in range(20):
            accumulate(params, t)
            optimizer.step()
            optimizer.zero_grad()
        stop.set()
        if read:
            thread.join()
        optimizer.flush()
        optimizer.close()
        assert not errors
        return [param.detach().clone() for param in params]

    expected = weights(read=False)
    use(monkeypatch, staging_bytes=staging_bytes)
    assert_identical([weights(read=True)], [expected])


class Late(StandIn):
    """Copies down come late, and what runs beside computation a little earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host, self.beside = Stream(lambda: time.sleep(3e-3)), Stream(lambda: time.sleep(1e-3))


def test_memory_of_a_piece_that_goes_down_is_not_written(monkeypatch):
    """Neither by the computing stream nor by the one beside it, which do not wait for each other."""

    def gradients() -> list[torch.Tensor]:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((64, 5), (8, 8), (8, 8), (8, 8), (64, 5), (8, 8))]
        named = [(f"layers.{place}.weight", param) for place, param in enumerate(params)]
        optimizer = ZenFlowAdamW(named, topk_ratio=0.0, min_numel=0, block_numel=1)
        for place, param in enumerate(params):
            (param * (place + 1 + torch.arange(param.numel()).view(param.shape))).sum().backward()
        found = [optimizer.full_gradient(param) for param in params]
        optimizer.close()
        return found

    expected = gradients()
    for staging_bytes in (600, 1024, 1500):
        use_streams(monkeypatch, Late, staging_bytes)
        assert_identical([gradients()], [expected])


def test_a_gradient_in_pieces_is_read_in_inference_mode(monkeypatch):
    use(monkeypatch, staging_bytes=600)
    params, optimizer = large()
    accumulate(params, 0)
    with torch.inference_mode():
        found = optimizer.full_gradient(params[-1])
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(found, torch.randn(params[-1].shape, generator=generator))
    optimizer.close()
