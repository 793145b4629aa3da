"""Queues, and windows with random contents for them."""

import torch

from stallfree.kernels.hyper import Hyper
from stallfree.kernels.native import NativeReplay
from stallfree.kernels.native_queue import NativeQueue
from stallfree.kernels.queue import TorchQueue
from stallfree.kernels.windows import Call, HostBlock, HostExchange, HostWeight, WindowWork

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
    queue.wait(tickets[-1])
    return tickets
