"""Resuming where the run that saved and the optimizer that loads were built differently, or where something is under way."""

import copy

import pytest
import torch
from histories import assert_identical, backward
from test_state import flat
from torch import nn

import stallfree.limits
from stallfree import ZenFlowAdamW

SHAPES = {
    "layers.0.q.weight": (8, 6),
    "layers.0.k.weight": (6, 8),
    "layers.0.norm.bias": (5,),
    "layers.1.q.weight": (8, 6),
    "layers.1.norm.bias": (7,),
}
CALLS, CHANGE = 16, 4
STEADY = dict(topk_ratio=0.25, update_interval=3, select_interval=5, full_warm_up_rounds=2, max_grad_norm=1.0)
RUNS = {  # how the run that saves begins, before it trains everything from call CHANGE on
    "all": dict(),
    "frozen weight": dict(frozen=("layers.0.k.weight",)),
    "frozen layer": dict(frozen=("layers.0.q.weight", "layers.0.k.weight", "layers.0.norm.bias")),
    "later group": dict(later=("layers.0.k.weight", "layers.0.norm.bias")),
}


class Run:
    """Parameters with names, and an optimizer that knows or does not know them."""

    def __init__(self, device, *, frozen=(), later=(), named=True, seed=0, **settings) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params = {name: nn.Parameter(torch.randn(s, generator=generator).to(device)) for name, s in SHAPES.items()}
        for name in (*frozen, *later):
            self.params[name].requires_grad_(False)
        self.later, self.named = later, named
        self.settings = dict(lr=1e-2, min_numel=0, **(STEADY if "preset" not in settings else {}) | settings)
        self.optimizer = ZenFlowAdamW(self._members([name for name in SHAPES if name not in later]), **self.settings)

    def _members(self, names) -> list:
        return [(name, self.params[name]) if self.named else self.params[name] for name in names]

    def train_everything(self) -> None:
        for param in self.params.values():
            param.requires_grad_()
        if self.later:
            self.optimizer.add_param_group(dict(params=self._members(self.later), lr=3e-3))
            self.later = ()

    def backward(self, t: int) -> None:
        generator = torch.Generator().manual_seed(t)
        grads = [torch.randn(p.shape, generator=generator).to(p) if p.requires_grad else None for p in self.params.values()]
        live = [(p, g) for p, g in zip(self.params.values(), grads, strict=True) if g is not None]
        backward([p for p, _ in live], [g for _, g in live])

    def play(self, start: int, end: int) -> list[list[torch.Tensor]]:
        """The weights after each of these calls."""
        seen = []
        for t in range(start, end):
            if t == CHANGE:
                self.train_everything()
            self.backward(t)
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append(self.weights())
        return seen

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().cpu().clone() for param in self.params.values()]

    def finish(self, start: int) -> list[list[torch.Tensor]]:
        rest = self.play(start, CALLS)
        self.optimizer.flush()
        rest.append(self.weights())
        self.optimizer.close()
        return rest


def played(device, **how) -> tuple[dict[int, dict], list[list[torch.Tensor]]]:
    """State after each number of calls, and the weights after each call and a flush."""
    run, seen, states = Run(device, **how), [], {}
    for t in range(CALLS):
        states[t] = copy.deepcopy(run.optimizer.state_dict())
        seen += run.play(t, t + 1)
    return states, [*seen, *run.finish(CALLS)]


# What trained, and in which blocks


@pytest.mark.parametrize(
    ("run", "built"),
    [*((run, "as at the end") for run in RUNS), *((run, "as at the start") for run in RUNS if "frozen" in run)],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_run_that_changed_what_it_trains_resumes_exactly(device, run, built, named):
    """The loading optimizer is built as the run was, or with all that trained in the end, with names or without."""
    states, expected = played(device, **RUNS[run])
    for t in range(CHANGE + 1, CALLS, 4):  # each place in a window
        again = Run(device, **RUNS[run], named=named, seed=9)
        if built == "as at the end":
            again.train_everything()
        again.optimizer.load_state_dict(states[t])
        for param in again.params.values():
            param.requires_grad_()
        assert_identical(again.finish(t), expected[t:], f"resumed after call {t}")


@pytest.mark.parametrize("named", [True, False])
def test_a_run_resumes_exactly_before_it_changes_what_it_trains(device, named):
    states, expected = played(device, **RUNS["frozen weight"])
    for t in range(CHANGE + 1):
        again = Run(device, **RUNS["frozen weight"], named=named)
        again.optimizer.load_state_dict(states[t])
        assert_identical(again.finish(t), expected[t:], f"resumed after call {t}")


def test_a_state_without_a_parameter_that_trains_here_is_refused_with_the_way_out(device):
    states, _ = played(device, **RUNS["frozen weight"])
    again = Run(device)
    before, weights = flat(again.optimizer.state_dict()), again.weights()
    with pytest.raises(ValueError, match=r"(?s)layers\.0\.k\.weight.*frozen"):
        again.optimizer.load_state_dict(states[CHANGE])
    assert flat(again.optimizer.state_dict()) == before
    assert_identical([again.weights()], [weights])
    again.optimizer.close()


def test_no_parameter_is_adopted_for_which_there_is_no_memory(monkeypatch):
    """By add_param_group, when it is unfrozen, and when a state holds it: nothing has changed afterwards."""
    states, _ = played("cpu", **RUNS["frozen weight"])
    run = Run("cpu", **RUNS["frozen weight"])
    run.play(0, 2)
    before, weights = flat(run.optimizer.state_dict()), run.weights()
    monkeypatch.setattr(stallfree.limits, "available_host_bytes", lambda: 0)
    with pytest.raises(MemoryError):
        run.optimizer.add_param_group(dict(params=[("late", nn.Parameter(torch.ones(4, 4)))]))
    with pytest.raises(MemoryError):
        run.optimizer.load_state_dict(states[CHANGE + 1])
    run.params["layers.0.k.weight"].requires_grad_()
    run.backward(2)
    with pytest.raises(MemoryError):
        run.optimizer.step()
    assert len(run.optimizer.param_groups) == 1
    assert flat(run.optimizer.state_dict()) == before
    assert_identical([run.weights()], [weights])
    monkeypatch.undo()
    run.optimizer.step()
    run.optimizer.close()


# A state that is not whole


def parts(value, path=()) -> list[tuple]:
    """Where the dicts inside hold their keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    below = [part for key, item in items for part in parts(item, (*path, key))]
    return [*([(*path, key) for key in value] if isinstance(value, dict) else []), *below]


def test_a_missing_part_of_the_state_is_named_and_nothing_is_changed():
    states, _ = played("cpu")
    whole = states[7]
    run = Run("cpu")
    before, weights = flat(run.optimizer.state_dict()), run.weights()
    paths = [(number, *path) for number, entry in whole["state"].items() for path in parts(entry)]
    later = {"tuner", "layout", "in_flight", "skips"}  # states from before these can be loaded
    paths = [path for path in paths if not later & set(path)]
    assert {path[-1] for path in paths} >= {"exp_avg", "phase", "grad", "deferred", "last_lr", "block"}
    for path in paths:
        broken = copy.deepcopy(whole)
        inside = broken["state"]
        for key in path[:-1]:
            inside = inside[key]
        del inside[path[-1]]
        with pytest.raises(ValueError, match="resident" if path[-1] == "channel_dim" else f"{path[-1]}|ZenFlowAdamW"):
            run.optimizer.load_state_dict(broken)
    assert flat(run.optimizer.state_dict()) == before
    assert_identical([run.weights()], [weights])
    run.optimizer.close()


def test_parts_of_different_states_are_refused():
    states, _ = played("cpu")
    run = Run("cpu")
    for other in (6, 8):
        mixed = copy.deepcopy(states[7])
        mixed["state"][1] = states[other]["state"][1]
        with pytest.raises(ValueError, match=r"layers\.0\.k\.weight"):
            run.optimizer.load_state_dict(mixed)
    lacking = copy.deepcopy(states[7])
    del lacking["state"][1]
    with pytest.raises(ValueError, match=r"layers\.0\.k\.weight"):
        run.optimizer.load_state_dict(lacking)
    run.optimizer.close()


# Between backward and step


@pytest.mark.parametrize("settings", [dict(), dict(preset="stronghold")])
@pytest.mark.parametrize("how", [dict(), RUNS["frozen weight"]])
def test_gradients_under_way_belong_to_the_state_that_is_given_up(device, settings, how):
    """Also those whose update has begun, and also where the blocks become others."""
    states, expected = played(device, **how, **settings)
    run = Run(device, **settings)
    run.play(0, 3)
    run.optimizer.engine.delay = lambda place: 0.02 if place == "worker" else 0.0
    run.backward(99)
    handle = run.params["layers.0.q.weight"].grad
    run.optimizer.load_state_dict(states[8])
    assert all(param.grad is None for param in run.params.values())
    run.optimizer.engine.delay = None
    run.params["layers.0.q.weight"].grad = handle
    with pytest.raises(RuntimeError, match="zero_grad"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert_identical(run.finish(8), expected[8:])


# As torch's optimizers


def test_a_learning_rate_in_a_tensor_is_copied():
    first, other = (ZenFlowAdamW([nn.Parameter(torch.ones(4, 6))], lr=torch.tensor(0.5), min_numel=0) for _ in range(2))
    other.load_state_dict(first.state_dict())
    first.param_groups[0]["lr"].fill_(0.25)
    assert other.param_groups[0]["lr"] == 0.5
    first.close(), other.close()


def test_state_by_parameter_is_always_there():
    run = Run("cpu")
    for t in (0, 1):
        for _ in range(2):
            assert all(set(run.optimizer.state[p]) == {"master", "exp_avg", "exp_avg_sq", "step"} for p in run.params.values())
            run.optimizer.state_dict()
        run.play(t, t + 1)
    assert all(run.optimizer.state[p]["exp_avg"].any() for p in run.params.values())
    run.optimizer.close()


@pytest.fixture
def other_defaults():
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def test_torch_s_defaults_change_nothing(device, request):
    """From construction on, with weights beside residents, handed-over channels and host rounding of moments."""
    states, expected = played(device, moments_dtype="bfloat16")
    run = Run(device, moments_dtype="bfloat16", seed=9)
    run.optimizer.close()
    params = list(run.params.values())
    drawn = []
    for t in range(9, CALLS):
        generator = torch.Generator().manual_seed(t)
        drawn.append([torch.randn(p.shape, generator=generator).to(p) for p in params])
    request.getfixturevalue("other_defaults")
    optimizer, seen = ZenFlowAdamW(run.params.items(), **run.settings), []
    optimizer.load_state_dict(states[9])
    for grads in drawn:
        backward(params, grads)
        optimizer.clip_grad_norm_(1e6)
        optimizer.state_dict()
        with_grad = optimizer.full_gradient(params[0])
        assert with_grad.device == params[0].device
        optimizer.step()
        optimizer.zero_grad()
        seen.append(run.weights())
    with optimizer.exact_weights():
        pass
    optimizer.flush()
    assert_identical([*seen, run.weights()], expected[9:])
    optimizer.close()
