"""Judging a call: every kernel comes to what the definition says, and writes nowhere else."""

import math

import pytest
import torch
from block_cases import DTYPES, KERNELS, SENTINEL, make_kernel, same

from stallfree.kernels.judging import Evidence, Policy
from stallfree.kernels.torch_block import TorchBlock

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, in triton's interpreter
SIZES = {  # by name: channels of weights; elements of groups of residents, and how many residents they are
    "some": ([7, 64, 1, 33], [40, 3], 5),
    "many": ([3 + i % 5 for i in range(12)], [11], 19),
    "large": ([16, 50, 17], [33, 16], 2),
    "no weights": ([], [40], 2),
    "no residents": ([5, 9], [], 0),
    "an empty group": ([5], [0, 3], 2),
    "nothing": ([], [], 0),
}
RULE = Policy(max_norm=1.0, skips=True, decay=0.9)


@pytest.fixture(params=KERNELS)
def kernel(request, device):
    return make_kernel(request.param, device)


class Case:
    """Random evidence, the same for a seed, and a judging of it."""

    def __init__(self, kernel, device, sizes="some", rule=RULE, dtype=torch.float32, seed=0):
        self.channels, self.elements, residents = SIZES[sizes] if isinstance(sizes, str) else sizes
        self.device, self.random = device, torch.Generator().manual_seed(seed)
        self.weights, total = len(self.channels), sum(self.channels)
        starts = torch.tensor([0, *self.channels]).cumsum(0).tolist()
        groups = [torch.zeros(size, dtype=dtype, device=device) for size in self.elements]
        flats = [torch.zeros(total + 2, device=device), torch.zeros(total, dtype=torch.bool, device=device)]
        self.guarded = torch.full((total + 2,), SENTINEL, device=device)
        score = self.guarded[1:-1].zero_()
        self.evidence = Evidence(starts, flats[0][1:-1], flats[1], score, groups, residents)
        self.memory = torch.full((3 + self.weights + residents,), SENTINEL)
        if device.type == "cuda":
            self.memory = self.memory.pin_memory()
        self.target = self.memory[1:-1]
        self.judging = kernel.judging(self.evidence, rule)
        self.verdict = self.judging.verdict
        self.call = 0

    def draw(self, scale=1.0):
        """New gradients."""
        numbers = torch.rand(self.evidence.channels, generator=self.random) * scale
        self.evidence.squares.copy_(numbers)
        self.evidence.deferred.copy_(torch.rand(self.evidence.channels, generator=self.random) < 0.7)
        for group in self.evidence.groups:
            group.copy_(torch.randn(len(group), generator=self.random) * math.sqrt(scale))

    def judge(self, present=None, scales=None, **others):
        self.call += 1
        present = None if present is None else torch.tensor(present, device=self.device)
        scales = None if scales is None else torch.tensor(scales, device=self.device)
        self.judging.judge(self.call, self.target, present, scales, **others)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        assert self.memory[0] == self.memory[-1] == SENTINEL
        assert self.guarded[0] == self.guarded[-1] == SENTINEL
        assert same(self.target, self.verdict.record.cpu())

    def results(self):
        verdict = self.verdict
        return {
            name: getattr(verdict, name).cpu().clone()
            for name in ("sums", "norms", "norm", "skip", "record", "skips", "skipped_norms")
        } | {"score": self.evidence.score.cpu().clone()}


def presence(case, some):
    return [place % 3 != 1 for place in range(case.weights)] if some and case.weights else None


def scaling(case, kind):
    if kind == "none" or not case.weights:
        return None
    return 0.25 if kind == "one" else [(-1.0) ** place * (0.5 + place % 4) for place in range(case.weights)]


def assert_alike(found, expected):
    for name, values in expected.items():
        if values.dtype.is_floating_point:
            torch.testing.assert_close(found[name], values, rtol=2e-6, atol=0, equal_nan=True, msg=name)
        else:
            assert torch.equal(found[name], values), name


@pytest.mark.parametrize("scales", ["none", "one", "each"])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("sizes", list(SIZES))
def test_it_is_what_the_definition_says(kernel, device, sizes, some, scales):
    """Call after call, of which one is skipped."""
    case, other = Case(kernel, device, sizes), Case(TorchBlock(), torch.device("cpu"), sizes)
    for call in range(3):
        for one in (case, other):
            one.draw(scale=10.0 ** (call - 1))
            if call == 1:
                (one.evidence.groups[-1] if one.elements else one.evidence.squares)[:1] = math.nan
            one.judge(presence(one, some and call), scaling(one, scales))
        assert_alike(case.results(), other.results())
    nothing = not case.channels and not case.elements
    assert case.verdict.skips.tolist() == ([0, 0] if nothing else [1, 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_by_hand(kernel, device, dtype):
    """Two weights and a group: norms 3 and 4 (half of it deferred), and 12; 13 in all, clipped to 1."""
    case = Case(kernel, device, "no residents", dtype=dtype)
    assert case.weights == 2
    groups = [torch.full((9,), 4.0, dtype=dtype, device=device)]
    case.evidence = Evidence(
        case.evidence.starts, *(getattr(case.evidence, n) for n in ("squares", "deferred", "score")), groups, 3
    )
    case.memory = torch.full((8,), SENTINEL)
    case.memory = case.memory.pin_memory() if device.type == "cuda" else case.memory
    case.target = case.memory[1:-1]
    case.judging = kernel.judging(case.evidence, RULE)
    case.verdict = case.judging.verdict
    case.evidence.squares[:] = torch.tensor([9.0, 0, 0, 0, 0, 8.0, 8.0, 0, 0, 0, 0, 0, 0, 0])
    case.evidence.deferred[5] = True
    case.judge()
    assert case.verdict.sums.tolist() == [9, 16, 0, 8, 144]
    assert case.verdict.norms.tolist() == [12, 3, 4]
    assert case.verdict.norm == 13
    assert not case.verdict.skip
    assert case.target.tolist() == pytest.approx([0.0, *[1 / 13] * 5])
    assert case.evidence.score.tolist() == pytest.approx([0.9, *[0] * 4, 0.8, 0.8, *[0] * 7])
    case.judge(present=[True, False], scales=[2.0, 5.0])
    assert case.verdict.norms.tolist() == [12, 6, 0]
    norm = math.sqrt(12**2 + 6**2)
    assert case.target.tolist() == pytest.approx([0.0, 2 / norm, 5 / norm, *[1 / norm] * 3])
    assert case.evidence.score.tolist() == pytest.approx([0.9 * 0.9 + 0.1 * 36, *[0] * 4, 0.8, 0.8, *[0] * 7])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["channel", "resident"])
@pytest.mark.parametrize("rule", [RULE, RULE._replace(skips=False), Policy()])
def test_a_norm_that_is_not_finite_skips(kernel, device, rule, where, value):
    """Unless the rule says otherwise. What was not finite is kept until the next skipped call; nothing is clipped."""
    case = Case(kernel, device, rule=rule)
    case.draw()
    case.judge()
    before = case.evidence.score.clone()
    if where == "channel":
        case.evidence.squares[3] = abs(value)
    else:
        case.evidence.groups[1][1] = value
    case.judge()
    skipped = case.verdict.skip.item()
    assert skipped == rule.skips
    assert not case.verdict.norm.isfinite()
    assert case.target.tolist() == [float(skipped), *[1.0] * (len(case.target) - 1)]
    assert case.verdict.skips.tolist() == ([1, 2] if skipped else [0, 0])
    if skipped:
        assert same(case.evidence.score, before)
        wrong = [not math.isfinite(norm) for norm in case.verdict.skipped_norms.tolist()]
        assert [place for place, bad in enumerate(wrong) if bad] == [2 if where == "channel" else 1]
    else:
        assert same(case.evidence.score, before) == (rule.decay is None)
    kept = case.verdict.skipped_norms.clone()
    case.draw()
    case.judge()
    assert not case.verdict.skip
    assert same(case.verdict.skipped_norms, kept)
    assert case.verdict.skips.tolist() == ([1, 2] if rule.skips else [0, 0])


@pytest.mark.parametrize("count", [1, 7, 511, 512, 5000])
def test_records_go_to_host_memory_as_they_are(kernel, device, count):
    """`Case` looks at every bit of them, and at what lies beside."""
    case = Case(kernel, device, ([1], [1], count))
    case.draw()
    case.judge(scales=[math.nan])
    assert case.verdict.skip
    assert case.target[1].isnan()
    case.judge(scales=[math.pi])
    clip = 1 / (case.verdict.norm.item() + 1e-6)
    assert case.target.tolist() == pytest.approx([0.0, math.pi * clip, *[clip] * count])


def test_what_an_absent_weight_left_behind_is_not_looked_at(kernel, device):
    case = Case(kernel, device)
    case.draw()
    case.evidence.squares[10] = math.nan
    before = case.evidence.score.clone()
    case.judge(present=[True, False, True, True])
    assert not case.verdict.skip
    assert case.verdict.norms[2 + 1] == 0
    assert same(case.evidence.score[7:71], before[7:71])
    assert (case.evidence.score[:7] > 0).all()
    case.judge(present=[False] * 4)
    assert case.verdict.norm.item() == pytest.approx(torch.cat(list(case.evidence.groups)).norm().item())


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e6])
def test_clipping_is_torchs(kernel, device, max_norm):
    case = Case(kernel, device, rule=Policy(max_norm))
    case.draw()
    case.judge()
    expected = 1.0 if max_norm is None else min(max_norm / (case.verdict.norm.item() + 1e-6), 1.0)
    assert case.target[1:].tolist() == pytest.approx([expected] * (len(case.target) - 1), rel=1e-6)


@pytest.mark.parametrize("value, size", [(1e18, 500), (3e19, 5)])
def test_norms_end_where_fp32_does(kernel, device, value, size):
    """Sums are wider: what has a finite norm is no skip before its square has no room in fp32."""
    case, other = Case(kernel, device), Case(TorchBlock(), torch.device("cpu"))
    for one in (case, other):
        one.evidence.groups[0][:size] = value
        one.judge()
    assert_alike(case.results(), other.results())
    assert case.verdict.skip == (value > 1e19)


def test_sums_over_ranks_take_the_place_of_ones_own(kernel, device):
    case, other = Case(kernel, device), Case(TorchBlock(), torch.device("cpu"))
    for one in (case, other):
        one.draw()
        one.judging.add_up()
        one.verdict.sums.mul_(2.0)
        one.judge(squares=one.evidence.squares * 2)
    assert_alike(case.results(), other.results())
    assert case.verdict.norm.item() == pytest.approx(math.sqrt(other.verdict.norms.double().square().sum().item()), rel=1e-6)
    for one in (case, other):
        one.judge(squares=one.evidence.squares * 2, norm=torch.tensor(4.0, device=one.device))
    assert_alike(case.results(), other.results())
    assert case.verdict.norm == 4


def test_the_same_bits_every_time(kernel, device):
    found = []
    for _ in range(2):
        case = Case(kernel, device, "large")
        for _ in range(3):
            case.draw()
            case.judge(presence(case, True), scaling(case, "each"))
        found.append(case.results())
    assert all(torch.equal(first, second) for first, second in zip(*(each.values() for each in found), strict=True))


def test_planning_leaves_everything_as_it_is(kernel, device):
    case = Case(kernel, device)
    case.draw()
    case.evidence.groups[0][0] = math.nan
    case.judge()
    before = case.evidence.score.clone()
    verdict = kernel.judging(case.evidence, RULE).verdict
    assert same(case.evidence.score, before)
    assert verdict.skips.tolist() == [0, 0]
    assert not verdict.skip
    assert not verdict.skipped_norms.any()


def test_misuse_is_refused_before_anything_is_written(kernel, device):
    case = Case(kernel, device)
    case.draw()
    case.judge()
    before = case.results()
    target, there = case.target, torch.ones(4, dtype=torch.bool, device=device)
    for mistake in (
        dict(target=target[1:]),
        dict(target=target.double()),
        dict(target=target.to("meta")),  # not where the host can read it
        dict(present=there[1:]),
        dict(present=there.float()),
        dict(scales=torch.ones(3, device=device)),
        dict(scales=torch.ones((), dtype=torch.float64, device=device)),
        dict(squares=case.evidence.squares[1:]),
        dict(norm=torch.ones(2, device=device)),
    ):
        with pytest.raises(ValueError, match=r"must be"):
            case.judging.judge(**dict(call=2, target=target) | mistake)
    assert all(torch.equal(values, before[name]) for name, values in case.results().items())
    flats = {name: getattr(case.evidence, name) for name in ("squares", "deferred", "score", "groups")}
    for mistake in (
        dict(starts=[0, 7, 7, 105]),
        dict(starts=[1, 105]),
        dict(squares=flats["squares"][1:]),
        dict(deferred=flats["score"]),
        dict(score=flats["score"].double()),
        dict(groups=[torch.ones(4, dtype=torch.float64, device=device)]),
    ):
        with pytest.raises(ValueError, match=r"must be|follow each other"):
            kernel.judging(Evidence(**dict(starts=case.evidence.starts, residents=5) | flats | mistake), RULE)


@pytest.mark.gpu
def test_the_driver_launches_it():
    """All launches of a call, whatever their integers, in one call of the driver."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    judging = Case(make_kernel("triton-small", device), device, "large").judging
    launches = [*(launch for launch, _ in judging._measure), judging._judge]
    assert len(launches) == 3
    assert all(launch.is_direct and launch.code is not None for launch in launches)
