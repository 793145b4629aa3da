"""Weights written from outside between calls: noticed, and then training goes on as a synchronous optimizer would."""

from functools import partial

import pytest
import torch
from histories import Call, History, Player, assert_identical, assert_rounds_to, clipped, histories, hypers, run, tolerance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import hyper_of
from streams import use
from torch import nn
from training import Mirror, full

from stallfree import ZenFlowAdamW, ZenFlowConfig, to_adamw_state


def overwrite(p: nn.Parameter, kind: str, t: int) -> None:
    generator = torch.Generator().manual_seed(t)
    with torch.no_grad():
        if kind == "copy_":
            p.copy_(torch.randn(p.shape, generator=generator))
        elif kind == "mul_":
            p.mul_(0.5)
        elif kind == "element" and p.numel():
            p.view(-1)[t % p.numel()] = 3.0
        elif kind == "load_state_dict":
            nn.ParameterList([p]).load_state_dict({"0": torch.randn(p.shape, generator=generator)})


class Follower:
    """AdamW of each parameter on fp32 masters, which take over what is written from outside.

    A master that rounds to the written value stays: writing one element of a bf16 weight does not round the others' masters.
    """

    def __init__(self, history: History, groups: list[dict]) -> None:
        self.history = history
        self.groups = [hyper_of(group) for group in groups]
        self.masters = [nn.Parameter(w.float()) for w in history.weights()]
        self.optimizers = [
            torch.optim.AdamW([p], **h) for p, h in zip(self.masters, hypers(history, 0, self.groups), strict=True)
        ]

    def write(self, i: int, weight: torch.Tensor) -> None:
        with torch.no_grad():
            master = self.masters[i]
            master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.float()))

    def step(self, t: int) -> None:
        history = self.history
        grads = clipped(history.grads(t, history.weights()), history.calls[t])
        if not all(torch.isfinite(g).all() for g in grads if g is not None):
            return
        for p, grad, hyper, optimizer in zip(
            self.masters, grads, hypers(history, t, self.groups), self.optimizers, strict=True
        ):
            p.grad, optimizer.param_groups[0]["lr"] = grad, hyper["lr"]
        if history.config.max_grad_norm is not None and any(g is not None for g in grads):
            nn.utils.clip_grad_norm_(self.masters, history.config.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()


WRITES = ["copy_", "mul_", "element", "load_state_dict"]


HISTORIES = histories(dtypes=("fp32", "fp32", "bf16"), most_calls=16, befores=("flush", "exact"))


@given(history=HISTORIES, data=st.data())
def test_training_goes_on_from_what_was_written(device, history, data):
    """At any call, to any parameter: a flush leaves AdamW with the same writes, whose moments keep the gradients so far."""
    check_writes(device, history, data)


@given(history=HISTORIES, data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_publish_during_backward_overwrites_nothing_that_was_written_before(monkeypatch, history, data):
    with monkeypatch.context() as patch:
        use(patch)
        check_writes(torch.device("cpu"), history, data)


@pytest.mark.parametrize("kind", ["copy_", "data"])
@pytest.mark.parametrize("t", range(1, 7))
def test_what_was_written_stands_until_the_next_step(monkeypatch, t, kind):
    """Also where what is due is shown during backward."""
    use(monkeypatch)
    history = History(
        shapes=((6, 8), (8, 6), (9,)), calls=(Call(),) * 8, config=ZenFlowConfig(**CONFIG | dict(lag=1, update_interval=2))
    )
    player = Player(history, torch.device("cpu"))
    player.play(t)
    for p in player.params:
        if kind == "data":  # other memory, of which no version tells
            p.data = torch.full_like(p.data, 0.5)
        else:
            overwrite(p, kind, t)
    wrote = player.weights()
    player.backward()
    assert_identical([player.weights()], [wrote])
    player.close()


def check_writes(device, history, data) -> None:
    player = Player(history, device)
    follower = Follower(history, [dict(group) for group in player.optimizer.param_groups])
    wrote = [[-4, -4] for _ in history.shapes]
    for t in range(len(history.calls)):
        i = data.draw(st.integers(0, len(history.shapes) - 1), label="parameter")
        if data.draw(st.integers(0, 3), label="write?") == 0 and wrote[i][-2] <= t - 4:  # more often is refused
            wrote[i].append(t)
            overwrite(player.params[i], data.draw(st.sampled_from(WRITES), label="kind"), t)
            follower.write(i, player.params[i].detach().cpu())
        player.step()
        follower.step(t)
    expected = [p.detach() for p in follower.masters]
    assert_rounds_to(player.flushed(), expected, [tolerance(history, e, len(history.calls)) for e in expected])
    player.close()


CONFIG = dict(topk_ratio=0.25, update_interval=4, lag=2, full_warm_up_rounds=1, select_interval=4, min_numel=0, block_numel=50)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("t", range(1, 9))
def test_what_was_written_is_what_the_next_forward_pass_reads_and_what_a_flush_leaves(device, dtype, t):
    """No window that was on its way may overwrite it."""
    history = History(shapes=((6, 8), (8, 6), (9,)), calls=(Call(),) * 12, config=ZenFlowConfig(**CONFIG), dtypes=(dtype,) * 3)
    player = Player(history, device)
    player.play(t)
    for p in player.params:
        overwrite(p, "copy_", t)
    wrote = player.weights()
    assert_identical([player.flushed()], [wrote])
    with player.optimizer.exact_weights():
        assert_identical([player.weights()], [wrote])
    player.close()

    again = Player(history, device)
    again.play(t)
    for p in again.params:
        overwrite(p, "copy_", t)
    for _ in range(4):  # calls without gradients: what is published now must not be older than the write
        again.optimizer.step()
        assert_identical([again.weights()], [wrote])
    again.close()


def test_writing_one_parameter_leaves_the_others_alone(device):
    """Their weights are, at every call, those of a run without the write."""
    history = History(shapes=((6, 8), (8, 6), (9,)), calls=(Call(),) * 12, config=ZenFlowConfig(**CONFIG))
    player = Player(history, device)
    seen = player.play(6)
    overwrite(player.params[0], "copy_", 0)
    seen += [*player.play(), player.flushed()]
    assert_identical([w[1:] for w in seen], [w[1:] for w in run(history, device)])
    player.close()


def test_a_write_inside_exact_weights_is_refused_and_undone(device):
    history = History(shapes=((6, 8),), calls=(Call(),) * 6, config=ZenFlowConfig(**CONFIG))
    player = Player(history, device)
    (*_, before) = player.play(6)
    with pytest.raises(RuntimeError, match="exact_weights"), player.optimizer.exact_weights():
        overwrite(player.params[0], "copy_", 0)
    assert_identical([player.weights()], [before])
    player.close()


def test_steps_and_saves_inside_exact_weights_are_refused(device):
    history = History(shapes=((6, 8),), calls=(Call(),) * 7, config=ZenFlowConfig(**CONFIG))
    player = Player(history, device)
    player.play(6)
    with player.optimizer.exact_weights():
        optimizer = player.optimizer
        for refused in (optimizer.step, optimizer.flush, optimizer.state_dict, partial(to_adamw_state, optimizer)):
            with pytest.raises(RuntimeError, match=r"^not possible inside exact_weights\(\).*leave the context first, .*save"):
                refused()
    assert_identical([*player.play(), player.flushed()], run(history, device)[6:])
    player.close()


def test_weights_are_left_alone_where_the_optimizer_was_closed_inside_exact_weights(device):
    history = History(shapes=((6, 8),), calls=(Call(),) * 6, config=ZenFlowConfig(**CONFIG))
    player = Player(history, device)
    player.play(6)
    with player.optimizer.exact_weights():
        shown = player.weights()
        player.optimizer.close()
    assert_identical([player.weights()], [shown])
    with pytest.raises(RuntimeError, match="closed"):
        player.optimizer.step()


def test_evaluation_inside_exact_weights_reads_them(device):
    """A forward pass there sees what a flush would leave."""
    model = nn.Linear(8, 6, bias=False).to(device)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=ZenFlowConfig(**CONFIG))
    x = torch.eye(8, device=device)
    for _ in range(6):
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), optimizer.exact_weights():
        shown = model(x)
    optimizer.flush()
    with torch.no_grad():
        assert torch.equal(model(x), shown)
    optimizer.close()


def clamp(model, optimizer, x):
    """After every step, as a Wasserstein critic does."""
    model(x).pow(2).mean().backward()
    yield
    with torch.no_grad():
        model.weight.clamp_(-0.2, 0.2)


def perturb(model, optimizer, x):
    """Sharpness-aware minimization: the gradient of a point nearby."""
    model(x).pow(2).mean().backward()
    with torch.no_grad():
        shift = (
            0.05 * optimizer.full_gradient(model.weight) if isinstance(optimizer, ZenFlowAdamW) else 0.05 * model.weight.grad
        )
        model.weight.add_(shift)
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    with torch.no_grad():
        model.weight.sub_(shift)
    yield


@pytest.mark.parametrize("write", [clamp, perturb])
@pytest.mark.parametrize("settings", [dict(preset="zero-offload"), dict(update_interval=1, lag=0, topk_ratio=0.25)])
def test_settings_without_delay_honour_a_write_at_every_call(device, settings, write):
    """Each call is AdamW's, from what was written."""
    model = nn.Linear(8, 6, bias=False).to(device)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=5e-2, min_numel=0, select_interval=3, **settings)
    twin = nn.Linear(8, 6, bias=False).to(device)
    twin.load_state_dict(model.state_dict())
    follower = torch.optim.AdamW(twin.parameters(), lr=5e-2)
    for t in range(12):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(t)).to(device)
        for it, its in ((model, optimizer), (twin, follower)):
            for _ in write(it, its, x):
                its.step()
            its.zero_grad()
        torch.testing.assert_close(model.weight, twin.weight, rtol=1e-4, atol=1e-4)
    optimizer.close()


@pytest.mark.parametrize("late", [0.0, 0.02])
def test_a_write_after_an_update_in_backward_takes_its_place(device, late):
    """However late the host is: the moments have the gradient, the weight is what was written."""
    config = ZenFlowConfig(preset="stronghold", full_warm_up_rounds=0, min_numel=0)
    history = History(shapes=((6, 8), (4, 5), (3,)), calls=(Call(),) * 6, config=config)
    player = Player(history, device)
    player.optimizer.engine.delay = lambda place: late if place == "worker" else 0.0
    follower = Follower(history, [dict(group) for group in player.optimizer.param_groups])
    player.play(3)
    for t in range(3):
        follower.step(t)
    player.backward()
    overwrite(player.params[0], "copy_", 1)
    wrote = player.weights()[0]
    player.optimizer.step()
    player.optimizer.zero_grad()
    player.t += 1
    assert torch.equal(player.weights()[0], wrote)
    follower.step(3)
    follower.write(0, wrote)
    player.play()
    for t in (4, 5):
        follower.step(t)
    for mine, other in zip(player.flushed(), follower.masters, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-5, atol=1e-5)
    player.close()


@pytest.mark.parametrize("write", [clamp, perturb])
def test_a_weight_that_is_written_at_every_call_is_refused_with_the_way_out(write):
    """With a delay, each write would take the place of the updates under way, and deferred channels would stand still."""
    model = nn.Linear(8, 6, bias=False)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=1e-2, config=ZenFlowConfig(**CONFIG))

    def call():
        for _ in write(model, optimizer, torch.ones(1, 8)):
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        call()
    with pytest.raises(RuntimeError, match=r"(?s)weight was written.*zero-offload"):
        call()
    optimizer.flush()
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()  # without a write, training may go on
    optimizer.close()


def test_a_write_after_every_flush_is_not_refused(device):
    """Nothing is under way then."""
    model = nn.Linear(8, 6, bias=False).to(device)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=ZenFlowConfig(**CONFIG))
    mirror = Mirror(optimizer.param_groups)
    for t in range(8):
        model(torch.ones(1, 8, device=device) + t).pow(2).mean().backward()
        mirror.step(full(optimizer, mirror.params))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.flush()
        for p in (model.weight, mirror.masters[model.weight]):
            with torch.no_grad():
                p.clamp_(-0.3, 0.3)
        mirror.compare(f"call {t + 1}", t + 1)
    optimizer.close()


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: setattr(model.weight, "data", model.weight.data.transpose(0, 1)),
        lambda model: setattr(model.weight, "data", model.weight.data.transpose(0, 1).clone()),
    ],
    ids=["channels_last", "transposed in place", "transposed"],
)
@pytest.mark.parametrize("when", ["before backward", "before step"])
def test_memory_of_another_layout_is_refused(move, when):
    model = nn.Conv2d(6, 6, 3, bias=False)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=1e-2, config=ZenFlowConfig(**CONFIG))

    def call():
        if when == "before backward":
            move(model)
        model(torch.ones(1, 6, 3, 3)).sum().backward()
        if when == "before step":
            move(model)
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"(?s)(?=.*weight).*(build the optimizer then|zero_grad)"):
        call()
    optimizer.close()


def test_memory_replaced_twice_is_noticed(device):
    """The allocator likes to give the second tensor the address of the one before the first."""
    p = nn.Parameter(torch.ones(3000, device=device))
    optimizer = ZenFlowAdamW([p], lr=1e-2)
    for _ in range(10):
        p.grad = torch.ones_like(p)
        optimizer.step()
        for _ in range(2):
            p.data = p.data.mul(0.5)
        wrote = p.detach().clone()
        p.grad = None
        optimizer.step()
        optimizer.flush()
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert (p.detach() - wrote).abs().max() < 0.02
    optimizer.close()


@pytest.mark.parametrize("who", ["flush", "a write"])
def test_a_flush_that_was_interrupted_can_be_repeated(device, who):
    """No gradient counts twice."""
    history = History(shapes=((6, 8), (8, 6), (9,)), calls=(Call(),) * 12, config=ZenFlowConfig(**CONFIG))
    player, plain = Player(history, device), Player(history, device)
    for it in (player, plain):
        it.play(6)
        if who == "a write":
            overwrite(it.params[0], "copy_", 0)
    engine = player.optimizer.engine
    run_job, jobs = engine.run, []

    def interrupted(*args):
        run_job(*args)
        jobs.append(args)
        if len(jobs) == 1:
            raise KeyboardInterrupt

    engine.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        player.optimizer.flush()
    assert jobs
    assert_identical([player.flushed(), *player.play(), player.flushed()], [plain.flushed(), *plain.play(), plain.flushed()])
    player.close(), plain.close()
