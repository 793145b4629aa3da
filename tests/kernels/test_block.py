"""Block kernels: every kernel must do what indexing does, on each weight of a block by itself (AdamW: `test_update.py`)."""

import pytest
import torch
from block_cases import BLOCKS, DTYPES, KERNELS, SENTINEL, Case, make_kernel, same, triton_block
from hypothesis import given
from hypothesis import strategies as st

from stallfree.kernels.block import FIRST, BlockLayout, Segment, pieces, targets
from stallfree.kernels.torch_block import TorchBlock


@pytest.fixture(params=KERNELS)
def kernel(request, device):
    return make_kernel(request.param, device)


@pytest.fixture(params=list(BLOCKS))
def segments(request):
    return BLOCKS[request.param]


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


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=5),
    numel=st.integers(0, 300),
)
def test_pieces_are_whole_rows_of_about_equal_size(shapes, numel):
    layout = BlockLayout([Segment(channels, length, 1, min(held, channels)) for channels, length, held in shapes], "cpu")
    cuts, total = pieces(layout, numel), layout.deferred_numel
    assert [low for low, _ in cuts] + [total] == [0] + [high for _, high in cuts]
    row = max(segment.length for segment in layout.segments)
    most = max(numel, row)
    large = total > 2 * most
    assert len(cuts) <= max(1, -(-total // most)) + large
    if large and numel // FIRST >= row:
        assert numel // FIRST - row < cuts[0][1] <= numel // FIRST
    for low, high in cuts:
        assert high - low < most + row
        assert layout.begins_row(low)
        rows = [layout.rows_between(index, low, high) for index in range(len(shapes))]
        assert sum(len(r) * s.length for r, s in zip(rows, layout.segments, strict=True)) == high - low
    assert total > numel or len(cuts) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_in_pieces_gives_the_same_bits(kernel, device, segments, dtype):
    """Squares and selected rows come with the first piece, and nothing is written beside a piece."""
    case = Case(segments, device, dtype)
    squares, selected, deferred = case.split(kernel)
    for low, high in case.pieces(3):
        norms, rows = case.full(case.layout.channels, torch.float32), case.full(case.layout.selected_numel)
        memory = case.full(high - low + 16)
        kernel.split(case.layout, case.targets, case.grads, norms, rows, memory[8:-8], low)
        assert same(memory[8:-8], deferred[low:high])
        assert (memory[:8] == SENTINEL).all()
        assert (memory[-8:] == SENTINEL).all()
        if low:
            assert (norms == SENTINEL).all()
            assert (rows == SENTINEL).all()
        else:
            assert same(norms, squares)
            assert same(rows, selected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_publish_in_pieces_writes_the_channels_of_each(kernel, device, segments, dtype):
    case = Case(segments, device, dtype)
    values = torch.randn(case.layout.deferred_numel).to(device, dtype)
    expected = [weight.clone() for weight in case.weights]
    for low, high in reversed(case.pieces(3)):
        piece = torch.cat([case.full(8), values[low:high], case.full(8)])[8:-8]
        kernel.publish(case.layout, case.targets, case.weights, piece, low)
        for index, segment in enumerate(segments):
            channels = case.channels_between(index, low, high)
            segment.rows(expected[index])[channels] = case.layout.deferred_rows(values[low:high], index, low)
            assert same(case.weights[index], expected[index])


def test_pieces_leave_absent_weights_alone(kernel, device):
    case = Case(BLOCKS["mixed"], device, absent=(1, 2))
    squares, selected, deferred = case.split(kernel)
    before, shown = [weight.clone() for weight in case.weights], case.shown(case.weights)
    norms, rows, found = (case.full(flat.numel(), flat.dtype) for flat in (squares, selected, deferred))
    for low, high in case.pieces(3):
        kernel.split(case.layout, case.targets, case.shown(case.grads), norms, rows, found[low:high], low)
        kernel.publish(case.layout, case.targets, shown, case.full(high - low), low)
    assert same(norms, squares)
    assert same(rows, selected)
    assert same(found, deferred)
    changed = [not torch.equal(now, old) for now, old in zip(case.weights, before, strict=True)]
    assert changed == case.present


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
    for index, segment in enumerate(case.layout.segments):
        rows = segment.rows(case.weights[index])
        assert same(rows[case.deferred[index]], case.layout.deferred_rows(expected[2], index))


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
    row = case.layout.segments[0].length
    for piece, low in (
        (deferred[:-1], 0),
        (deferred, row),
        (deferred[row:], -row),
        (deferred[1:row], 1),
        (deferred[row:], row - 1),
    ):
        with pytest.raises(ValueError, match="where rows do"):
            kernel.split(case.layout, case.targets, grads, squares, selected, piece, low)
        with pytest.raises(ValueError, match="where rows do"):
            kernel.publish(case.layout, case.targets, case.weights, piece, low)


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
    kernel = make_kernel(name, device)
    case = Case(BLOCKS["mixed"], device, torch.bfloat16)
    kernel.warm_up(case.layout, torch.bfloat16)
    squares, selected, deferred = case.split(kernel)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        targets(case.layout, case.selected, case.deferred)
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        kernel.split(case.layout, case.targets, case.grads, squares, selected, deferred)
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
