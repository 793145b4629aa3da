"""AdamW of many parts: torch.optim.AdamW's on each place by itself, whatever else is updated with it."""

import pytest
import torch
from block_cases import BLOCKS, DTYPES, HYPER, KERNELS, Case, make_kernel, same

from stallfree.kernels.block import BlockLayout, Part, Segment, targets
from stallfree.kernels.hyper import Hyper
from stallfree.kernels.torch_block import TorchBlock

MODEL = [  # parts of one model: both axes, every dtype, lengths and starts that allow vectors and others, nothing selected
    ("even", torch.bfloat16),
    ("odd", torch.float32),
    ("nothing selected", torch.bfloat16),
    ("mixed", torch.float16),
    ("one channel", torch.bfloat16),
    ("mixed", torch.float32),
]


@pytest.fixture(params=KERNELS)
def kernel(request, device):
    return make_kernel(request.param, device)


@pytest.fixture(params=list(BLOCKS))
def segments(request):
    return BLOCKS[request.param]


class Model:
    """Several parts, the same ones for a seed, and one update of all."""

    def __init__(self, kernel, device, blocks=MODEL):
        torch.manual_seed(3)
        self.cases = [Case(BLOCKS[name] if isinstance(name, str) else name, device, dtype) for name, dtype in blocks]
        self.kernel, self.skip = kernel, torch.zeros((), dtype=torch.bool, device=device)
        self.factors = torch.cat([case.factors for case in self.cases])
        self.update = kernel.plan([case.part() for case in self.cases])

    def step(self, hypers, together=True):
        """With one update, or with one for each part."""
        if together:
            self.update.step(hypers, self.factors, self.skip)
            return
        first = 0
        for case in self.cases:
            mine = slice(first, first + len(case.hypers))
            self.kernel.plan([case.part()]).step(hypers[mine], self.factors[mine].clone(), self.skip)
            first = mine.stop

    def randomize(self, seed):
        """New gradients, and other channels in all places."""
        torch.manual_seed(seed)
        for case in self.cases:
            case.grad.copy_(torch.randn(case.grad.shape))
            for segment, start in zip(case.layout.segments, case.layout.place_starts, strict=True):
                chosen = torch.randperm(segment.channels)[: segment.selected]
                case.targets.selected[start : start + segment.selected] = chosen.to(case.device, torch.int32)

    def changing(self):
        return [tensor for case in self.cases for tensor in case.changing()]


def some_hypers(count, step):
    """Absent weights, weights that share settings by value, and settings that change from step to step."""
    kinds = [Hyper(1e-2 / (1 + kind + step % 2), 0.9, 0.99 + kind * 0.003, 1e-8, 0.1 * kind) for kind in range(3)]
    return [None if (index + step) % 4 == 0 else Hyper(*kinds[index * index % 3]) for index in range(count)]


def test_parts_are_updated_together_as_by_themselves(kernel, device):
    """The same bits, with subsets of weights, several settings, a skipped step, and channels that change between steps."""
    together, apart = Model(kernel, device), Model(kernel, device)
    assert all(map(same, together.changing(), apart.changing()))
    for step in range(4):
        hypers = some_hypers(len(together.factors), step)
        for model, one in ((together, True), (apart, False)):
            model.randomize(seed=step)
            model.skip.fill_(step == 2)
            model.step(hypers, together=one)
        assert all(map(same, together.changing(), apart.changing()))


def test_new_settings_for_the_same_weights(kernel, device):
    """As a schedule makes them: shared as before, by fewer objects, by objects that share a value, and not as before; and
    steps that some of them, or all, do not take."""
    together, apart = Model(kernel, device), Model(kernel, device)
    count = len(together.factors)
    together.step([None] * count)
    every = ([1, 2, 3], [4, 5, 6], [4, 5, 6], [7, 7, 8], [9, 10, 9], [2, 3, 4], [0, 0, 0], [4, 5, 6], [4, 0, 6], [0, 5, 6])
    for step, kinds in enumerate(every):
        settings = [HYPER._replace(lr=1e-3 * kind) if kind else None for kind in kinds]
        hypers = [None if index % 5 == 1 else settings[index * index % 3] for index in range(count)]
        if step == 5:
            hypers[0], hypers[1] = hypers[1], HYPER
        for model, one in ((together, True), (apart, False)):
            model.randomize(seed=step)
            model.step(hypers, together=one)
        assert all(map(same, together.changing(), apart.changing()))


def test_kernels_agree(kernel, device):
    ours, theirs = Model(kernel, device), Model(TorchBlock(), device)
    for step in range(2):
        for model in (ours, theirs):
            model.randomize(seed=step)
            model.step(some_hypers(len(model.factors), step))
    for mine, other in zip(ours.cases, theirs.cases, strict=True):
        assert torch.equal(mine.steps, other.steps)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("weights, words", [(65, 8), (65, 1), pytest.param(600, 8, marks=pytest.mark.slow)])
def test_any_number_of_weights(kernel, device, monkeypatch, weights, words):
    """More than a word of a launch's mask, and more than one launch's mask, tell apart."""
    if not isinstance(kernel, TorchBlock):
        monkeypatch.setattr("stallfree.kernels.triton_update.WORDS", words)
    segments = [Segment(2 + index % 2, 3, index % 2, 1 + index % 5 % 2) for index in range(weights)]
    half = weights // 2
    model = Model(kernel, device, [(segments[:half], torch.float32), (segments[half:], torch.float32)])
    before = [(case.steps.clone(), case.master.clone()) for case in model.cases]
    hypers = [None if index % 7 == 3 or index > weights - 3 else HYPER for index in range(weights)]
    model.step(hypers)
    index = 0
    for case, (steps, master) in zip(model.cases, before, strict=True):
        for place in range(len(case.layout.segments)):
            taken = case.layout.places_of(case.steps - steps, place)
            assert (taken == (hypers[index] is not None)).all()
            moved = case.layout.selected_rows(case.master != master, place)
            assert moved.all() if hypers[index] else not moved.any()
            index += 1


def test_nothing_to_update(kernel, device):
    skip = torch.zeros((), dtype=torch.bool, device=device)
    kernel.plan([]).step([], torch.ones(0, device=device), skip)
    for segments in ([], BLOCKS["nothing selected"]):
        case = Case(segments, device)
        before = [weight.clone() for weight in case.weights]
        case.adamw(kernel)
        assert all(map(same, case.weights, before))
    case = Case(BLOCKS["mixed"], device)
    before = [tensor.clone() for tensor in case.changing()]
    case.hypers = [None] * 4
    case.adamw(kernel)
    assert all(map(same, case.changing(), before))


def test_no_arrangement_of_weights_is_taken_for_another(kernel, device, monkeypatch):
    """However many there are in a row, and whatever the caller does with its list."""
    if not isinstance(kernel, TorchBlock):
        monkeypatch.setattr("stallfree.kernels.triton_update.PATTERNS", 3)
    case = Case([Segment(2, 3, 1, 1)] * 4, device)
    update, expected = kernel.plan([case.part()]), case.steps.clone()
    hypers = [None] * 4
    for step in range(12):
        for index in range(4):
            hypers[index] = HYPER if step * 5 >> index & 1 else None
            expected[index] += hypers[index] is not None
        update.step(hypers, case.factors, case.skip)
        assert torch.equal(case.steps, expected)


def test_a_model_takes_few_launches(device, monkeypatch):
    """Two for counts with two settings, one for each axis; with weights of odd lengths, one more for each axis."""
    kernel = make_kernel("triton", device)
    from stallfree.kernels import triton_update

    launch_all, launches = triton_update.launch_all, []
    monkeypatch.setattr(triton_update, "launch_all", lambda *several: (launches.extend(several), launch_all(*several)))
    even = [Segment(16, 24, 1, 3), Segment(24, 16, 1, 2)]
    residents = [Segment(1, 64, 0, 1), Segment(8, 16, 0, 8)]
    for odd, expected in (([], 4), ([Segment(5, 7, 0, 2), Segment(5, 7, 1, 2)], 6)):
        model = Model(kernel, device, [(blocks, torch.bfloat16) for blocks in (even, even, even, residents, odd)])
        launches.clear()
        model.step([HYPER._replace(weight_decay=index % 2 * 0.1) for index in range(len(model.factors))])
        assert len(launches) == expected


@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["weights", "master", "exp_avg_sq", "grad"])
def test_tensors_may_begin_anywhere(kernel, device, name, dtype, offset):
    def moved(tensor):
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
        return memory[offset:].view(tensor.shape).copy_(tensor)

    cases = []
    for _ in range(2):
        torch.manual_seed(5)
        cases.append(Case([*BLOCKS["even"], Segment(16, 24, 0, 5)], device, dtype))
    tensors = getattr(cases[0], name)
    setattr(cases[0], name, [moved(weight) for weight in tensors] if name == "weights" else moved(tensors))
    for case in cases:
        case.adamw(kernel)
    for mine, other in zip(cases[0].changing(), cases[1].changing(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6 if mine.dtype == torch.float32 else 1e-2, atol=1e-6)


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
    case = Case(BLOCKS["mixed"], device, absent=(0, 1, 2))
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
    part = case.part()
    for name, mistake in {
        "steps": case.steps.long(),
        "channels": case.targets.selected.long(),
        "master": case.master[1:],
        "exp_avg": case.exp_avg.double(),
        "grad": case.grad.float(),
        "weight": [*case.weights[:2], None],
        "weight 2": [*case.weights[:2], case.weights[2].float()],
    }.items():
        field = name.split()[0].replace("weight", "weights")
        with pytest.raises(ValueError, match=name):
            kernel.plan([part, part._replace(**{field: mistake})])
    before = [tensor.clone() for tensor in case.changing()]
    update = kernel.plan([part])
    for mistake in (
        (case.hypers[1:], case.factors, case.skip),
        (case.hypers, case.factors[1:], case.skip),
        (case.hypers, case.factors.double(), case.skip),
        (case.hypers, case.factors, case.skip.int()),
    ):
        with pytest.raises(ValueError, match=r"hypers|factors|skip"):
            update.step(*mistake)
    assert all(map(same, case.changing(), before))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_steps_never_wait_for_the_device(name):
    """Neither do Triton's allocate."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    model = Model(make_kernel(name, device), device)
    hypers = [some_hypers(len(model.factors), step) for step in range(3)]
    model.step(hypers[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        for mine in hypers:
            model.step(mine)
        if name == "triton":
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("channel_dim", [0, 1])
def test_offsets_beyond_32_bits(channel_dim):
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 48 * 2**30:
        pytest.skip("needs a CUDA device with 48 GiB free")
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = make_kernel("triton", device)
    channels, last = 1_450_000, 100
    segment = Segment(channels, 1536, channel_dim, channels)  # 2.2e9 elements
    layout = BlockLayout([segment], device)
    every = torch.arange(channels, device=device)
    where = targets(layout, [every], [every[:0]])
    shape = (channels, 1536) if channel_dim == 0 else (1536, channels)
    weight = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    state = [torch.empty(layout.selected_numel, device=device).uniform_() for _ in range(3)]
    steps = torch.ones(layout.places, dtype=torch.int32, device=device)
    grad = torch.empty(layout.selected_numel, dtype=torch.bfloat16, device=device).uniform_()
    tail = Case([Segment(last, 1536, 0, last)], device, torch.bfloat16)
    names = ("master", "exp_avg", "exp_avg_sq")
    for name, flat in zip((*names, "grad"), (*state, grad), strict=True):
        getattr(tail, name).copy_(flat[-last * 1536 :])
    tail.steps.fill_(1)
    kernel.plan([Part(layout, where.selected, [weight], *state, steps, grad)]).step([HYPER], tail.factors, tail.skip)
    tail.adamw(kernel)
    for name, flat in zip(names, state, strict=True):
        torch.testing.assert_close(flat[-last * 1536 :], getattr(tail, name), rtol=2e-6, atol=2e-6)
    assert same(segment.rows(weight)[-last:].contiguous(), layout.selected_rows(state[0], 0)[-last:].bfloat16())
