"""Block kernels: every kernel must do what indexing and torch.optim.AdamW do, on each weight of a block by itself.

Without a GPU the Triton kernels run in triton's interpreter, which has to be chosen before triton is imported.
"""

import os
import sys

import pytest
import torch

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from stallfree.kernels.block import BlockLayout, Segment, TorchBlock, targets
from stallfree.kernels.device import Hyper

HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
SENTINEL = 7.0  # in every element that a kernel must not write
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = {
    "even": [Segment(64, 48, 1, 5), Segment(32, 64, 1, 3), Segment(24, 128, 1, 9)],
    "odd": [Segment(37, 53, 1, 5), Segment(17, 91, 0, 3), Segment(5, 7, 1, 2)],
    "mixed": [Segment(40, 96, 0, 7), Segment(72, 40, 1, 9), Segment(16, 33, 0, 4), Segment(24, 16, 1, 8)],
    "nothing selected": [Segment(24, 40, 1, 0), Segment(19, 12, 0, 0)],
    "all but one selected": [Segment(24, 40, 1, 23), Segment(9, 20, 0, 8)],
    "one channel": [Segment(1, 40, 1, 0), Segment(1, 7, 0, 0), Segment(1, 16, 1, 1)],
    "more than one launch takes": [Segment(3 + i % 3, 4 + i % 5, 1, i % 2) for i in range(34)],
}


def triton_block(device, small):
    """Small tiles make small weights span many."""
    pytest.importorskip("triton")
    from stallfree.kernels import triton as module

    if device.type != ("cpu" if module.INTERPRETED else "cuda"):
        pytest.skip("the triton that is imported here runs on the other device")
    if module.INTERPRETED:
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(tl.sum, InterpretedFunction):
            pytest.skip("triton was imported before TRITON_INTERPRET=1 could be set: set it in the environment")
    if not small:
        return module.TritonBlock(device)
    tiling = module.Tiling(
        columns=module.Tile(16, 16, 32, 4),
        rows=module.Tile(4, 16, 32, 4),
        column_state=module.Tile(4, 16, 16, 4),
        row_state=module.Tile(4, 16, 16, 4),
    )
    return module.TritonBlock(device, tiling)


@pytest.fixture(params=["torch", "triton", "triton-small"])
def kernel(request, device):
    return TorchBlock() if request.param == "torch" else triton_block(device, request.param == "triton-small")


class Case:
    """A block with random gradients, weights and state, and a random division of its channels."""

    def __init__(self, segments, device, dtype=torch.float32, absent=()):
        self.device, self.dtype = device, dtype
        self.layout = BlockLayout(segments, device)
        orders = [torch.randperm(segment.channels) for segment in segments]
        self.selected = [order[: s.selected].to(device) for order, s in zip(orders, segments, strict=True)]
        self.deferred = [order[s.selected :].sort().values.to(device) for order, s in zip(orders, segments, strict=True)]
        self.targets = targets(self.layout, self.selected, self.deferred)
        self.present = [index not in absent for index in range(len(segments))]
        self.grads, self.weights = self.randoms(), self.randoms()
        count = self.layout.selected_numel
        self.master, self.exp_avg = torch.randn(count, device=device), torch.randn(count, device=device) * 1e-2
        self.exp_avg_sq = torch.rand(count, device=device) * 1e-2
        self.steps = torch.randint(0, 50, (self.layout.places,), dtype=torch.int32, device=device)
        self.hypers = [HYPER if present else None for present in self.present]
        self.factors = torch.rand(len(segments), device=device) + 0.5
        self.skip = torch.zeros((), dtype=torch.bool, device=device)
        self.grad = torch.randn(count, device=device).to(dtype)

    def randoms(self):
        shapes = [(s.channels, s.length)[:: 1 if s.channel_dim == 0 else -1] for s in self.layout.segments]
        return [torch.randn(shape).to(self.device, self.dtype) for shape in shapes]

    def full(self, numel, dtype=None):
        return torch.full((numel,), SENTINEL, dtype=dtype or self.dtype, device=self.device)

    def shown(self, tensors):
        return [tensor if present else None for tensor, present in zip(tensors, self.present, strict=True)]

    def split(self, kernel):
        squares = self.full(self.layout.channels, torch.float32)
        selected, deferred = self.full(self.layout.selected_numel), self.full(self.layout.deferred_numel)
        kernel.split(self.layout, self.targets, self.shown(self.grads), squares, selected, deferred)
        return squares, selected, deferred

    def adamw(self, kernel):
        kernel.adamw(
            self.layout,
            self.targets,
            self.shown(self.weights),
            *(self.master, self.exp_avg, self.exp_avg_sq, self.steps, self.grad),
            self.hypers,
            self.factors,
            self.skip,
        )

    def changing(self):
        """Everything that adamw may write."""
        return [*self.weights, self.master, self.exp_avg, self.exp_avg_sq, self.steps]


@pytest.fixture(params=list(BLOCKS))
def segments(request):
    return BLOCKS[request.param]


def bits(tensor):
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same(tensor, other):
    """Bit for bit, NaNs included."""
    return torch.equal(bits(tensor), bits(other))


def test_targets_name_each_channels_place_or_row(device, segments):
    case = Case(segments, device)
    for index, (selected, deferred) in enumerate(zip(case.selected, case.deferred, strict=True)):
        rows = case.layout.channels_of(case.targets.rows, index)
        assert rows[selected].tolist() == list(range(len(selected)))
        assert rows[deferred].tolist() == [-1 - row for row in range(len(deferred))]
    assert torch.equal(case.targets.selected.long(), torch.cat(case.selected))
    assert torch.equal(case.targets.deferred.long(), torch.cat(case.deferred))


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_is_indexing_and_sums_of_squares(kernel, device, segments, dtype):
    case = Case(segments, device, dtype)
    squares, selected, deferred = case.split(kernel)
    for index, (segment, grad) in enumerate(zip(segments, case.grads, strict=True)):
        rows = segment.rows(grad)
        assert torch.equal(case.layout.selected_rows(selected, index), rows[case.selected[index]])
        assert torch.equal(case.layout.deferred_rows(deferred, index), rows[case.deferred[index]])
        expected = rows.double().square().sum(1).float()
        torch.testing.assert_close(case.layout.channels_of(squares, index), expected, rtol=2e-6, atol=0)


def test_split_gives_the_same_bits_every_time(kernel, device, segments):
    case = Case(segments, device)
    for first, second in zip(case.split(kernel), case.split(kernel), strict=True):
        assert same(first, second)


def test_split_leaves_the_parts_of_absent_gradients_alone(kernel, device):
    case = Case(BLOCKS["mixed"], device, absent=(1, 2))
    squares, selected, deferred = case.split(kernel)
    for index, present in enumerate(case.present):
        parts = (
            case.layout.channels_of(squares, index),
            case.layout.selected_rows(selected, index),
            case.layout.deferred_rows(deferred, index),
        )
        assert [bool((part == SENTINEL).all()) for part in parts] == [not present] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_passes_nan_and_inf_on(kernel, device, dtype):
    case = Case(BLOCKS["odd"], device, dtype)
    segment, rows = case.layout.segments[0], case.layout.segments[0].rows(case.grads[0])
    rows[3, 1], rows[4, 2], rows[4, 3] = float("nan"), float("inf"), -float("inf")
    squares, selected, deferred = case.split(kernel)
    assert same(case.layout.selected_rows(selected, 0), rows[case.selected[0]].contiguous())
    assert same(case.layout.deferred_rows(deferred, 0), rows[case.deferred[0]].contiguous())
    mine = case.layout.channels_of(squares, 0)
    assert mine.isfinite().logical_not().nonzero().flatten().tolist() == [3, 4]
    assert mine[3].isnan()
    assert mine[4].isposinf()
    assert squares[segment.channels :].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_publish_writes_deferred_channels_and_no_others(kernel, device, segments, dtype):
    case = Case(segments, device, dtype)
    values = torch.randn(case.layout.deferred_numel).to(device, dtype)
    before = [weight.clone() for weight in case.weights]
    kernel.publish(case.layout, case.targets, case.weights, values)
    for index, segment in enumerate(segments):
        rows, old = segment.rows(case.weights[index]), segment.rows(before[index])
        assert same(rows[case.deferred[index]], case.layout.deferred_rows(values, index))
        assert same(rows[case.selected[index]].contiguous(), old[case.selected[index]].contiguous())


def test_publish_leaves_absent_weights_alone(kernel, device):
    case = Case(BLOCKS["mixed"], device, absent=(0, 3))
    before = [weight.clone() for weight in case.weights]
    kernel.publish(case.layout, case.targets, case.shown(case.weights), case.full(case.layout.deferred_numel))
    assert [torch.equal(now, old) for now, old in zip(case.weights, before, strict=True)] == [True, False, False, True]


@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_may_begin_anywhere(kernel, device, dtype, offset):
    case = Case(BLOCKS["even"], device, dtype)

    def moved(tensor):
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
        return memory[offset:].view(tensor.shape).copy_(tensor)

    expected = case.split(TorchBlock())
    case.grads = [moved(grad) for grad in case.grads]
    found = case.split(kernel)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])
    case.weights = [moved(weight) for weight in case.weights]
    kernel.publish(case.layout, case.targets, case.weights, moved(expected[2]))
    case.master = moved(case.master)
    case.adamw(kernel)
    for index, segment in enumerate(case.layout.segments):
        rows = segment.rows(case.weights[index])
        assert same(rows[case.deferred[index]], case.layout.deferred_rows(expected[2], index))
        assert same(rows[case.selected[index]], case.layout.selected_rows(case.master, index).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_is_torchs(kernel, device, segments, dtype):
    """Masters within 2e-6 of torch.optim.AdamW on each place after 3 steps, each place at its own step count."""
    case = Case(segments, device, dtype)
    case.hypers = [HYPER._replace(lr=1e-2 / (1 + index % 3), beta2=0.99 + index % 2 * 0.009) for index in range(len(segments))]
    places = []
    for index in range(len(segments)):
        state = [case.layout.selected_rows(flat, index).clone() for flat in (case.master, case.exp_avg, case.exp_avg_sq)]
        lr, beta1, beta2, eps, weight_decay = case.hypers[index]
        for place, count in enumerate(case.layout.places_of(case.steps, index).tolist()):
            param = torch.nn.Parameter(state[0][place])
            optimizer = torch.optim.AdamW([param], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
            if count:
                step = torch.tensor(float(count))
                optimizer.state[param] = {"step": step, "exp_avg": state[1][place], "exp_avg_sq": state[2][place]}
            else:
                for flat in (case.exp_avg, case.exp_avg_sq):
                    case.layout.selected_rows(flat, index)[place] = 0
            places.append((index, place, param, optimizer))
    for _ in range(3):
        case.grad = torch.randn_like(case.grad)
        before = [weight.clone() for weight in case.weights]
        case.adamw(kernel)
        for index, place, param, optimizer in places:
            param.grad = case.layout.selected_rows(case.grad, index)[place].float() * case.factors[index]
            optimizer.step()
            torch.testing.assert_close(
                case.layout.selected_rows(case.master, index)[place], param.detach(), rtol=2e-6, atol=2e-6
            )
            assert case.layout.places_of(case.steps, index)[place] == optimizer.state[param]["step"]
        for index, segment in enumerate(segments):
            rows, old = segment.rows(case.weights[index]), segment.rows(before[index])
            masters = case.layout.selected_rows(case.master, index)
            assert same(rows[case.selected[index]].contiguous(), masters.to(dtype))
            assert same(rows[case.deferred[index]].contiguous(), old[case.deferred[index]].contiguous())


def test_adamw_gives_the_same_bits_every_time(kernel, device):
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        case = Case(BLOCKS["mixed"], device, torch.bfloat16)
        case.adamw(kernel)
        results.append(case.changing())
    assert all(map(same, *results))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_call_changes_nothing(kernel, device, dtype):
    case = Case(BLOCKS["mixed"], device, dtype)
    case.skip.fill_(True)
    case.grad.fill_(float("nan"))
    case.steps[0] = 0
    before = [tensor.clone() for tensor in case.changing()]
    case.adamw(kernel)
    assert all(map(same, case.changing(), before))


def test_weights_without_a_gradient_take_no_step(kernel, device):
    case = Case(BLOCKS["mixed"], device, absent=(0, 1))
    case.hypers[2] = None  # a weight without settings, and a gradient without weight, are absent too
    case.hypers[1] = HYPER
    steps, master = case.steps.clone(), case.master.clone()
    before = [weight.clone() for weight in case.weights]
    case.adamw(kernel)
    assert [torch.equal(now, old) for now, old in zip(case.weights, before, strict=True)] == [True, True, True, False]
    for index in range(4):
        taken = case.layout.places_of(case.steps, index) - case.layout.places_of(steps, index)
        assert (taken == (index == 3)).all()
        unchanged = torch.equal(case.layout.selected_rows(case.master, index), case.layout.selected_rows(master, index))
        assert unchanged == (index != 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_nearest_even(kernel, device, dtype):
    """With lr 0 masters stay: halfway cases of both parities, both signs, overflow, inf and NaN."""
    case = Case([Segment(3, 2048, 1, 2), Segment(3, 512, 0, 2)], device, dtype)
    case.hypers = [HYPER._replace(lr=0.0)] * 2
    half = 16 if dtype == torch.bfloat16 else 13  # bits of fp32 that the dtype has no room for
    pattern = torch.randint(-(2**31), 2**31, (case.layout.selected_numel,), dtype=torch.int64)
    pattern[::2] = (pattern[::2] >> half << half) + (1 << half - 1)
    master = pattern.to(torch.int32).view(torch.float32)
    master[master.abs() < 1e-4] = 1.0  # conversions of numbers that the dtype denormalizes may flush to zero
    master[:4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38])
    case.master = master.to(device)
    case.adamw(kernel)
    assert same(torch.nan_to_num(case.master, nan=1.5), torch.nan_to_num(master, nan=1.5).to(device))
    for index, segment in enumerate(case.layout.segments):
        shown = segment.rows(case.weights[index])[case.selected[index]].contiguous()
        expected = case.layout.selected_rows(case.master, index).to(dtype)
        assert torch.equal(shown.isnan(), expected.isnan())
        assert same(torch.nan_to_num(shown, nan=1.5), torch.nan_to_num(expected, nan=1.5))


@pytest.mark.parametrize("beta2", [0.95, 0.999, 0.999999])
def test_bias_corrections_keep_their_digits(kernel, device, beta2):
    """1 - beta^n at counts where fp32 would have lost it: without a gradient the step is known in closed form."""
    counts = torch.tensor([1, 2, 10, 1000, 99_999, 2**31 - 1], dtype=torch.int64)
    case = Case([Segment(7, 8, 1, 6)], device)
    case.hypers = [Hyper(1.0, 0.9, beta2, 0.0, 0.0)]
    case.steps.copy_(counts - 1)
    case.grad.zero_()
    case.master.zero_()
    case.exp_avg.fill_(1.0)
    case.exp_avg_sq.fill_(1.0)
    case.adamw(kernel)
    counts = counts.double()
    expected = -0.9 / (1 - 0.9**counts) * (1 - beta2**counts).sqrt() / beta2**0.5
    found = case.layout.selected_rows(case.master, 0)[:, 0].double().cpu()
    torch.testing.assert_close(found, expected, rtol=4e-7, atol=0)
    assert torch.equal(case.steps.cpu().double(), counts)


def test_misuse_is_refused_before_anything_is_written(kernel, device):
    case = Case(BLOCKS["even"], device, torch.bfloat16)
    squares, selected, deferred = case.split(kernel)
    grads = case.grads
    for mistake in (
        [*grads[:2]],
        [*grads[:2], grads[2].float()],
        [*grads[:2], grads[2][:-1]],
        [*grads[:2], grads[2].t()],
        [grads[0].double(), None, None],
    ):
        with pytest.raises(ValueError, match=r"gradient|weights"):
            kernel.split(case.layout, case.targets, mistake, squares, selected, deferred)
    for name, flats in {
        "squares": (squares[1:], selected, deferred),
        "selected": (squares, selected.float(), deferred),
        "deferred": (squares, selected, torch.cat([deferred, deferred])[::2]),
    }.items():
        with pytest.raises(ValueError, match=name):
            kernel.split(case.layout, case.targets, grads, *flats)
    with pytest.raises(ValueError, match="values"):
        kernel.publish(case.layout, case.targets, case.weights, deferred.float())
    case.steps = case.steps.long()
    before = [tensor.clone() for tensor in case.weights]
    with pytest.raises(ValueError, match="steps"):
        case.adamw(kernel)
    assert all(map(same, case.weights, before))


def test_a_segment_must_be_possible():
    for mistake in ((0, 4, 1, 0), (4, 0, 1, 0), (4, 4, 2, 0), (4, 4, 1, 5)):
        with pytest.raises(ValueError):
            Segment(*mistake)
    layout = BlockLayout([Segment(4, 3, 1, 2)], "cpu")
    with pytest.raises(ValueError, match="2 selected"):
        targets(layout, [torch.arange(3)], [torch.arange(3, 4)])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_calls_never_wait_for_the_device(name):
    """Neither does building targets; and after warm_up Triton kernels allocate nothing."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = TorchBlock() if name == "torch" else triton_block(device, small=False)
    case = Case(BLOCKS["mixed"], device, torch.bfloat16)
    kernel.warm_up(case.layout, torch.bfloat16)
    squares, selected, deferred = case.split(kernel)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        targets(case.layout, case.selected, case.deferred)
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        kernel.split(case.layout, case.targets, case.grads, squares, selected, deferred)
        case.adamw(kernel)
        kernel.publish(case.layout, case.targets, case.weights, deferred)
        if name == "triton":
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("channel_dim", [0, 1])
def test_offsets_beyond_32_bits(channel_dim):
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 32 * 2**30:
        pytest.skip("needs a CUDA device with 32 GiB free")
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = triton_block(device, small=False)
    segment = Segment(1_450_000, 1536, channel_dim, 1000)  # 2.2e9 elements
    layout = BlockLayout([segment], device)
    order = torch.randperm(segment.channels, device=device)
    selected, deferred = order[:1000], order[1000:].sort().values
    where = targets(layout, [selected], [deferred])
    shape = (segment.channels, segment.length) if channel_dim == 0 else (segment.length, segment.channels)
    grad = torch.empty(shape, dtype=torch.bfloat16, device=device).uniform_()
    squares = torch.empty(layout.channels, device=device)
    flat = [torch.empty(numel, dtype=torch.bfloat16, device=device) for numel in (layout.selected_numel, layout.deferred_numel)]
    kernel.split(layout, where, [grad], squares, *flat)
    rows = segment.rows(grad)
    last = deferred[-1000:]
    assert torch.equal(layout.selected_rows(flat[0], 0), rows[selected])
    assert torch.equal(layout.deferred_rows(flat[1], 0)[-1000:], rows[last])
    torch.testing.assert_close(squares[last], rows[last].double().square().sum(1).float(), rtol=2e-6, atol=0)
    grad[...] = 0
    kernel.publish(layout, where, [grad], flat[1])
    assert torch.equal(layout.deferred_rows(flat[1], 0)[-1000:], rows[last])
    assert not rows[selected].any()
