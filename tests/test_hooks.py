"""A block is watched through one weight as long as its gradients come as usual; whatever comes otherwise, no result changes."""

import copy

import pytest
import torch
from histories import assert_identical, histories, run
from hypothesis import HealthCheck, given, settings
from streams import use
from torch import nn

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine import hooks

SETTINGS = dict(topk_ratio=0.25, update_interval=3, full_warm_up_rounds=2, select_interval=4, min_numel=0, block_numel=10_000)
NEVER = 1 << 30


class Branches(nn.Module):
    """Weights whose gradients come in an order that `first` says, some twice per backward pass, some not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.parts = [self.one, self.two, self.three]

    def loss(self, order: list[int], t: int) -> torch.Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(t))
        for place in order:
            x = torch.tanh(self.parts[place](x))
        return x.square().sum()


def train(plan: list[list[list[int]]], resume_at: int | None = None) -> tuple[list[torch.Tensor], list[int]]:
    """plan: by call, its backward passes, each an order of the parts. Returns the weights, and how many hooks there were."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=1e-2, config=ZenFlowConfig(**SETTINGS))
    watched = []
    for t, passes in enumerate(plan):
        for number, order in enumerate(passes):
            model.loss(order, 10 * t + number).backward()
        optimizer.step()
        optimizer.zero_grad()
        watched.append(len(optimizer.engine.hooks))
        if t == resume_at:
            saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer)]
            optimizer.close()
            model = Branches()
            model.load_state_dict(saved[0])
            optimizer = ZenFlowAdamW(model.named_parameters(), lr=1e-2, config=ZenFlowConfig(**SETTINGS))
            optimizer.load_state_dict(saved[1])
    optimizer.flush()
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    return weights, watched


USUAL = [[0, 1, 2]]


def test_after_some_calls_alike_one_weight_is_watched_and_after_a_surprise_all_are():
    _, watched = train([USUAL] * 8 + [[[2, 1, 0]]] + [[[2, 1, 0]]] * 8)
    assert watched[7] == 1
    assert watched[8] == 3
    assert watched[-1] == 1


@pytest.mark.parametrize(
    "other",
    [
        [[2, 1, 0]],  # the watched one comes first
        [[1, 2, 0]],
        [[1, 2]],  # or not at all
        [[0, 2]],
        [[0, 1, 2], [0, 1, 2]],  # more backward passes
        [[0, 1, 2], [2, 1, 0], [1, 0, 2]],
        [[0], [1], [2]],
        [],
    ],
)
@pytest.mark.parametrize("usual", [USUAL, [[0, 1, 2], [0, 1, 2]]], ids=["one pass", "two passes"])
def test_gradients_that_come_otherwise_count_all_the_same(monkeypatch, usual, other):
    plan = [usual] * 7 + [other] + [usual] * 2 + [other] * 6
    found, watched = train(plan)
    if len(usual) == 1:  # of several passes each may have brought the gradient that is there: all are watched
        assert 1 in watched
    monkeypatch.setattr(hooks, "ALIKE", NEVER)
    expected, watched = train(plan)
    assert set(watched) == {3}
    assert_identical([found], [expected])


@given(history=histories())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whoever_is_watched_no_bit_changes(monkeypatch, history):
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "ALIKE", NEVER)
        expected = run(history)
        patch.setattr(hooks, "ALIKE", 0)
        assert_identical(run(history), expected)


def test_hooks_of_others_stay_and_none_is_left_over():
    model, calls = Branches(), []
    weight = model.parts[0].weight
    weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    optimizer = ZenFlowAdamW(model.named_parameters(), config=ZenFlowConfig(**SETTINGS))
    for t in range(8):
        model.loss([0, 1, 2], t).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(calls) == 8
    assert len(optimizer.engine.hooks) == 1
    assert model.parts[1].weight._post_accumulate_grad_hooks is None
    optimizer.close()
    assert len(weight._post_accumulate_grad_hooks) == 1
    assert model.parts[2].weight._post_accumulate_grad_hooks is None


def test_weights_whose_gradients_come_on_several_streams_are_all_watched():
    """Who waits for the stream of one has not waited for the others'."""
    model = Branches()
    optimizer = ZenFlowAdamW(model.named_parameters(), config=ZenFlowConfig(**SETTINGS))
    streams, turn = {"alike": lambda: 7, "apart": lambda: next(turn)}, iter(range(1000))
    watched = {}
    for name, follow in (("apart", streams["apart"]), ("alike", streams["alike"])):
        optimizer.engine.link.follow = follow
        for t in range(8):
            model.loss([0, 1, 2], t).backward()
            optimizer.step()
            optimizer.zero_grad()
        watched[name] = len(optimizer.engine.hooks)
    assert watched == {"apart": 3, "alike": 1}
    # Another stream than before: this call is left to step(), and all are watched again.
    optimizer.engine.link.follow = lambda: 8
    model.loss([0, 1, 2], 0).backward()
    assert all(state.staged is None for state in optimizer.engine.weights.values())
    optimizer.step()
    assert len(optimizer.engine.hooks) == 3
    optimizer.close()


def test_a_refused_step_does_not_forget_that_a_gradient_was_zeroed():
    first, second = (nn.Parameter(torch.ones(6, 6)) for _ in range(2))
    optimizer = ZenFlowAdamW([first, second], lr=0.1, weight_decay=0.0, topk_ratio=0.0, update_interval=1, lag=0, min_numel=0)
    (first.sum() + second.sum()).backward()
    first.grad.zero_()
    mine, second.grad = second.grad, torch.ones(6, 6).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    second.grad = mine
    optimizer.step()
    optimizer.flush()
    assert torch.equal(first.detach(), torch.ones(6, 6))
    assert not torch.equal(second.detach(), torch.ones(6, 6))
    optimizer.close()


@pytest.mark.parametrize("again", [True, False])
def test_a_gradient_that_was_added_to_a_zeroed_one_can_be_discarded(again):
    params = [nn.Parameter(torch.ones(6, 6)) for _ in range(2)]
    optimizer = ZenFlowAdamW(params, lr=0.1, weight_decay=0.0, preset="zero-offload", min_numel=0)
    sum(p.sum() for p in params).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = [p.detach().clone() for p in params]
    sum(p.sum() for p in params).backward()
    optimizer.zero_grad()
    if again:
        params[1].sum().backward()
    optimizer.step()
    assert torch.equal(params[0].detach(), before[0])
    assert torch.equal(params[1].detach(), before[1]) is not again
    optimizer.close()


@pytest.mark.parametrize("other", [[[0, 1, 2], [0, 1, 2]], [[2, 1, 0], [0, 1, 2]]])
def test_a_resumed_run_publishes_in_backward_as_the_other_does(monkeypatch, other):
    """What a surprising backward pass reads depends on how gradients came before, which is saved."""
    use(monkeypatch)
    plan = [USUAL] * 9 + [other] + [USUAL] * 4  # windows that closed in the call before are due
    uninterrupted, _ = train(plan)
    resumed, _ = train(plan, resume_at=8)
    assert_identical([resumed], [uninterrupted])
