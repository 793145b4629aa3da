"""Slots: who gets which memory, when it may be written, and how much of it there is."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from histories import Call, History, Player, histories
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from streams import use
from torch import nn

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine import slots
from stallfree.engine.blocks import build_blocks, classify
from stallfree.engine.memory import PAGE
from stallfree.engine.pipeline import Engine
from stallfree.engine.slots import Cell, Slot, SlotPlan, SlotPool, Until, plan_slots
from stallfree.engine.streams import Point, Timeline

HALF = settings(max_examples=max(4, settings().max_examples // 2), suppress_health_check=[HealthCheck.function_scoped_fixture])


def plan_of(engine: Engine) -> SlotPlan:
    return plan_slots([block.block for block in engine.blocks], engine.config)


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=60),
    planned=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    keep=st.integers(1, 6),
)
def test_slots_never_share_memory_and_wait_for_the_last_reader(steps, planned, keep):
    """steps: which block, how many cells, which slot to give back if more are held than `keep`."""
    config = ZenFlowConfig(topk_ratio=0.0, min_numel=0, block_numel=1)
    named = [("", torch.nn.Parameter(torch.empty(PAGE // 4, pages))) for pages in (1, 2, 5)]
    blocks = build_blocks(classify(named, config)[1], config)
    pool = SlotPool(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    sizes = {block: (block.numel * 4,) * 2 for block in blocks}
    pool.follow(SlotPlan(sizes, {sizes[block][0]: count for block, count in zip(blocks, planned, strict=True)}))
    host, up = (Timeline(torch.zeros(1, dtype=torch.int32), 0) for _ in range(2))
    held: list[Slot] = []
    given: dict[Cell, tuple[int, list[Point]]] = {}  # when it was given back, and by page, until when it is read
    for turn, (which, count, place) in enumerate(steps):
        before = [cell for cell in pool._cells[sizes[blocks[which]][0]] if cell.free]
        slot = pool.take(blocks[which], count * sizes[blocks[which]][0])
        held.append(slot)
        slot.memory.fill_(len(held))
        assert slot.memory.numel() == count * sizes[blocks[which]][0]
        ranges = sorted((s.memory.data_ptr(), s.memory.data_ptr() + s.memory.numel()) for s in held)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
        assert all(pool.holds(s.memory) for s in held)
        begin, end = slot.memory.data_ptr(), slot.memory.data_ptr() + len(slot.memory)
        claimed = [[c.point for c in slot.after if c.begin <= page < c.end] for page in range(begin, end, PAGE)]
        until = [[point] for cell in slot.cells if cell in given for point in given[cell][1]]
        until += [[] for cell in slot.cells if cell not in given for _ in range(cell.size // PAGE)]
        assert Counter(map(str, claimed)) == Counter(map(str, until))
        assert all(begin <= claim.begin < claim.end <= end for claim in slot.after)
        if count == 1 and before:  # of those that there were, the one that has been free longest
            assert slot.cells[0] in before
            assert given.get(slot.cells[0], (-1,))[0] == min(given.get(cell, (-1,))[0] for cell in before)
        if len(held) > keep:
            old = held.pop(place % len(held))
            line, size = host if place % 2 else up, old.cells[0].size
            count = size // PAGE if place % 3 else 1  # each page for itself, or all at once
            points = [line.next() for _ in range(count)]
            until = [Until(size // count * (number + 1), point) for number, point in enumerate(points)]
            pool.give([old], until if count > 1 else points[0])
            for cell in old.cells:
                pages = cell.size // PAGE
                given[cell] = (turn, points if len(old.cells) == 1 and count == pages else points[-1:] * pages)


@pytest.mark.parametrize(("alike", "others", "shared"), [(2, 0, True), (2, 3, False), (3, 3, True)])
def test_two_that_nobody_else_is_like_share_no_cells(small_pages, alike, others, shared):
    """If there are others: of a model of two blocks it would take a seventh more memory."""
    shapes = [(8, 100)] * alike + [(8, 40)] * others
    named = [(f"layers.{place}.weight", nn.Parameter(torch.empty(shape))) for place, shape in enumerate(shapes)]
    config = ZenFlowConfig(topk_ratio=0.0, min_numel=0, block_numel=1)
    blocks = build_blocks(classify(named, config)[1], config)
    sizes = {block.weights[0].name: cell for block, (cell, _) in plan_slots(blocks, config).sizes.items()}
    assert len({sizes[f"layers.{place}.weight"] for place in range(alike)}) == (1 if shared else 2)
    assert all(sizes[name] >= param.numel() * 4 for name, param in named)


@pytest.fixture
def small_pages(monkeypatch):
    """So that small blocks have cells of their own sizes."""
    monkeypatch.setattr(slots, "PAGE", 4)


LATE = ZenFlowConfig(
    update_interval=1, lag=2, topk_ratio=0.1, select_interval=1, channel_dim=1, full_warm_up_rounds=1, min_numel=0
)
# Selections that move nobody hurry no publish, and so the first one that moves somebody finds all that is queued.
UNMOVED = History(((1,), (3, 2, 65)), (Call(), *[Call(missing=frozenset([1]))] * 3, *[Call(scale=30.0)] * 3), LATE)


# Whole gradients that fit into one cell: of all S, 1 needs most.
TINY = History(((8, 40),) * 2, (Call(),) * 6, LATE.replace(lag=1, max_update_interval=2, block_numel=1))


@pytest.mark.parametrize(("place", "page"), [("cpu", 4), ("cpu", PAGE), ("streams", 4)])
@given(history=histories(dtypes=("fp32", "bf16"), befores=("flush", "exact")))
@example(history=UNMOVED)
@example(history=replace(UNMOVED, calls=(Call(),) * 6, config=LATE.replace(select_interval=3)))
@example(history=TINY)
@HALF
def test_a_pool_never_grows(monkeypatch, place, page, history):
    """Whatever gradients are missing, and wherever in a call weights are published."""
    with monkeypatch.context() as patch:
        patch.setattr(slots, "PAGE", page)
        if place == "streams":
            use(patch)
        player = Player(history)
        player.play()
        assert player.optimizer.engine.pool.nbytes == plan_of(player.optimizer.engine).nbytes
        player.close()


class Watch:
    """The most cells of each size that a pool has lent at once."""

    def __init__(self, pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        take, give = pool._take, pool.give

        def taken(size: int, nbytes: int) -> Slot:
            slot = take(size, nbytes)
            self.held[size] += len(slot.cells)
            self.most[size] = max(self.most[size], self.held[size])
            return slot

        def given(slots: Iterable[Slot], after: Point | None) -> None:
            slots = list(slots)
            give(slots, after)
            self.held.subtract(cell.size for slot in slots for cell in slot.cells)

        monkeypatch.setattr(pool, "_take", taken)
        monkeypatch.setattr(pool, "give", given)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("S, lag", [(1, 0), (1, 1), (2, 1), (4, 0), (4, 1), (3, 2), (1, 3), (4, 2), (2, 4)])
def test_a_plan_is_what_a_run_takes(monkeypatch, small_pages, S, lag, stagger, ratio):
    """On the CPU, where each call stages everything before it publishes anything; selections at each close. With a lag above 1
    also so seldom that nothing has hurried what is queued, in whatever call of a window.
    """
    most: Counter[int] = Counter()
    seldom = 2 * (S + lag)
    for select_interval in (1, *range(seldom, seldom + S)) if lag > 1 and ratio else (1,):
        params = [nn.Parameter(torch.randn(shape)) for shape in [(20, 40)] * 5 + [(20, 41)] * 3 + [(20, 200)]]
        config = ZenFlowConfig(
            update_interval=S,
            max_update_interval=S,
            lag=lag,
            stagger=stagger,
            topk_ratio=ratio,
            select_interval=select_interval,
            full_warm_up_rounds=2,
            block_numel=1,
            min_numel=0,
        )
        optimizer = ZenFlowAdamW(params, config=config)
        watch = Watch(optimizer.engine.pool, monkeypatch)
        for _ in range(2 + 3 * (S + lag) + select_interval):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        plan = plan_of(optimizer.engine)
        assert optimizer.engine.pool.nbytes == plan.nbytes
        most |= watch.most
        optimizer.close()
    assert most == Counter(plan.counts)


def qwen(vocabulary: int, hidden: int, inner: int, layers: int, keys: int, tied: bool) -> list[tuple[str, nn.Parameter]]:
    """Weights of Qwen2.5's shapes."""
    shapes = {"embed_tokens": (vocabulary, hidden)}
    for layer in range(layers):
        for name, rows, columns in (
            ("q_proj", hidden, hidden),
            ("k_proj", keys, hidden),
            ("v_proj", keys, hidden),
            ("o_proj", hidden, hidden),
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            shapes[f"layers.{layer}.{name}"] = (rows, columns)
    if not tied:
        shapes["lm_head"] = (vocabulary, hidden)
    return [(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))) for name, shape in shapes.items()]


@pytest.mark.parametrize(
    "shapes, at_4, at_8",
    [
        ((151936, 896, 4864, 24, 128, True), 6.7, 11.7),  # 0.5B: one block has 28% of the parameters
        ((151936, 1536, 8960, 28, 256, True), 6.1, 10.3),  # 1.5B
        ((152064, 3584, 18944, 28, 512, False), 6.1, 10.6),  # 7B
    ],
    ids=["0.5B", "1.5B", "7B"],
)
def test_bytes_per_parameter(shapes, at_4, at_8):
    """Of slots, bf16. Equal blocks that kept their slots until the publish would need 6.3 at S=4 and 9.9 at S=8."""
    for S, most in ((4, at_4), (8, at_8)):
        config = ZenFlowConfig(update_interval=S, max_update_interval=S)
        blocks = build_blocks(classify(qwen(*shapes), config)[1], config)
        assert plan_slots(blocks, config).nbytes <= most * sum(block.numel for block in blocks)
