"""Training loops that must simply work: accumulation, groups, scaling, schedules, closures, accelerate."""

import copy
import signal
import threading

import pytest
import torch
from training import CALLS, LR, PRESETS, Mirror, full, mlp, regression, train

from stallfree import ZenFlowAdamW, ZenFlowConfig
from stallfree.engine.uninterrupted import uninterrupted


@pytest.fixture(params=list(PRESETS))
def settings(request):
    return PRESETS[request.param]


@pytest.mark.parametrize("passes", [2, 3])
def test_several_backward_passes_before_one_step(device, settings, passes):
    train(mlp(device), regression, settings, passes=passes)


def test_several_groups_with_names(device, settings):
    def groups(model):
        named = list(model.named_parameters())
        return [
            dict(params=[(n, p) for n, p in named if p.dim() > 1], weight_decay=0.1, lr=LR / 2),
            dict(params=[(n, p) for n, p in named if p.dim() == 1], weight_decay=0.0, betas=(0.8, 0.95), eps=1e-6),
        ]

    train(mlp(device), regression, settings, groups=groups)


def test_a_loss_scaled_by_the_user(device, settings):
    def unscale(params):
        for p in params:
            p.grad.mul_(1 / 64)

    train(mlp(device), lambda model, t: 64 * regression(model, t), settings, touch=unscale)


def test_clipping_by_torch(device, settings):
    train(mlp(device), regression, settings, touch=lambda params: torch.nn.utils.clip_grad_norm_(params, 0.1))


def test_autocast(device, settings):
    def loss(model, t):
        with torch.autocast(device.type, torch.bfloat16):
            return regression(model, t)

    train(mlp(device), loss, settings)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, CALLS),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 4)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, LR, total_steps=CALLS + 1, cycle_momentum=False),
    ],
    ids=["cosine", "lambda", "onecycle"],
)
def test_schedulers_of_torch(device, settings, schedule):
    train(mlp(device), regression, settings, schedule=schedule)


def test_onecycle_with_momentum(device):
    """This scheduler writes betas[0] of the groups."""
    weights = []
    for make in (
        lambda p: ZenFlowAdamW(p, lr=LR, config=ZenFlowConfig(**PRESETS["zero-offload"])),
        lambda p: torch.optim.AdamW(p, lr=LR),
    ):
        torch.manual_seed(0)
        model = mlp(device)
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=CALLS + 1)
        for t in range(CALLS):
            regression(model, t).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        weights.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-2 * LR)


def test_a_closure(device):
    model, twin = mlp(device), mlp(device)
    twin.load_state_dict(model.state_dict())
    ours = ZenFlowAdamW(model.parameters(), lr=LR, config=ZenFlowConfig(**PRESETS["zero-offload"]))
    theirs = torch.optim.AdamW(twin.parameters(), lr=LR)
    for t in range(CALLS):
        losses = []
        for it, optimizer in ((model, ours), (twin, theirs)):

            def closure(it=it, optimizer=optimizer, t=t):
                optimizer.zero_grad()
                loss = regression(it, t)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-2 * LR)
    ours.close()


def test_two_optimizers_in_one_process(device, settings):
    """Interleaved, each is what it is alone."""
    alone, together = [], []
    models = [mlp(device) for _ in range(2)]
    for group in (alone, together):
        copies = [copy.deepcopy(model) for model in models]
        optimizers = [ZenFlowAdamW(model.parameters(), lr=LR, config=ZenFlowConfig(**settings)) for model in copies]
        order = (
            [(i, t) for i in range(2) for t in range(CALLS)]
            if group is alone
            else [(i, t) for t in range(CALLS) for i in range(2)]
        )
        for i, t in order:
            regression(copies[i], t + i).backward()
            optimizers[i].step()
            optimizers[i].zero_grad()
        for model, optimizer in zip(copies, optimizers, strict=True):
            optimizer.flush()
            group.extend(p.detach().clone() for p in model.parameters())
            optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_accelerate_prepares_accumulates_and_clips(settings):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, twin = mlp("cpu"), mlp("cpu")
    twin.load_state_dict(model.state_dict())
    ours = ZenFlowAdamW(model.parameters(), lr=LR, config=ZenFlowConfig(**settings))
    mirror = Mirror(ours.param_groups)
    prepared, optimizer = accelerator.prepare(model, ours)
    for t in range(2 * CALLS):
        with accelerator.accumulate(prepared):
            accelerator.backward(regression(prepared, t))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
                mirror.step(full(ours, mirror.params))
            optimizer.step()
            optimizer.zero_grad()
    assert ours.metrics()["call"] == CALLS
    ours.flush()
    mirror.compare("accelerate", CALLS)
    ours.close()


def scaled_steps(optimizer, model, scaler, *, overflows=(), clip=None, mirror=None) -> None:
    """CALLS calls with a GradScaler, in which the loss overflows at some of them."""
    for t in range(CALLS):
        loss = regression(model, t) * (float("inf") if t in overflows else 1.0)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if mirror is not None and t not in overflows:
            unscale = 1.0 if clip is not None else 1 / scaler.get_scale()
            grads = full(optimizer, mirror.params)
            mirror.step([None if g is None else g.float() * unscale for g in grads])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_gradient_scaler_works(device, settings, clip):
    """With autocast to fp16 and fp32 weights, as torch's recipe has it: its skips are no calls, its scale follows them."""
    model, overflows = mlp(device), (2, 6)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, config=ZenFlowConfig(**settings))
    mirror = Mirror(optimizer.param_groups)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=3)
    scaled_steps(optimizer, model, scaler, overflows=overflows, clip=clip, mirror=mirror)
    assert optimizer.metrics()["call"] == CALLS - len(overflows)
    assert optimizer.metrics()["skipped_steps"] == 0
    assert scaler.get_scale() == 2.0**9  # halved at both overflows, doubled after the three calls between them
    optimizer.flush()
    mirror.compare("scaled", CALLS)
    optimizer.close()


def test_scaling_by_powers_of_two_changes_no_bit(device, settings):
    weights = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = mlp(device)
        optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, config=ZenFlowConfig(**settings))
        scaled_steps(optimizer, model, torch.amp.GradScaler(device.type, init_scale=2.0**8, enabled=enabled))
        optimizer.flush()
        weights.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    for plain, scaled in zip(*weights, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-6, atol=1e-7)


def test_a_gradient_scaler_is_refused_where_it_cannot_work():
    """By update_in_backward, and for fp16 weights by torch itself; no weight has changed."""
    for dtype, preset, error in (
        (torch.float32, "stronghold", "need preset zero-offload"),
        (torch.float16, "stallfree", "Attempting to unscale FP16 gradients"),
    ):
        model = mlp("cpu", dtype)
        optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, preset=preset, min_numel=0)
        scaler = torch.amp.GradScaler("cpu")
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(regression(model, 0)).backward()
        with pytest.raises((RuntimeError, ValueError), match=error):
            scaler.step(optimizer)
        assert all(torch.equal(p.detach(), b) for p, b in zip(model.parameters(), before, strict=True))
        optimizer.close()


def test_a_parameter_unfrozen_later(device, settings):
    """Frozen at construction, with a group that knows it: from its first gradient on it is trained like the others."""
    model = mlp(device)
    for p in model[3].parameters():
        p.requires_grad_(False)
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, config=ZenFlowConfig(**settings))
    mirror, late = Mirror(optimizer.param_groups), None
    kept = model[3].weight.detach().clone()
    for t in range(2 * CALLS):
        if t == 4:
            assert torch.equal(model[3].weight.detach(), kept)
            for p in model[3].parameters():
                p.requires_grad_(True)
            late = Mirror([group | dict(params=list(model[3].parameters())) for group in optimizer.param_groups])
        regression(model, t).backward()
        for it in filter(None, (mirror, late)):
            it.step(full(optimizer, it.params))
        optimizer.step()
        assert all(len(optimizer.state[p]) for p in model[3].parameters()) == (t >= 4)
        optimizer.zero_grad()
    optimizer.flush()
    mirror.compare("from the start", 2 * CALLS)
    late.compare("unfrozen", 2 * CALLS)
    optimizer.close()


def test_hooks_around_step_are_called(device, settings):
    model, seen = mlp(device), []
    optimizer = ZenFlowAdamW(model.parameters(), lr=LR, config=ZenFlowConfig(**settings))
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", o.metrics()["call"])))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", o.metrics()["call"])))
    for t in range(2):
        regression(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]
    optimizer.close()


def test_a_group_added_later(device, settings):
    """Gradual unfreezing: the new parameters start their own AdamW at that call."""
    model = mlp(device)
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = ZenFlowAdamW((p for p in model.parameters() if p.requires_grad), lr=LR, config=ZenFlowConfig(**settings))
    mirror = Mirror(optimizer.param_groups)
    late = None
    for t in range(2 * CALLS):
        if t == 4:
            for p in model[0].parameters():
                p.requires_grad_(True)
            optimizer.add_param_group(dict(params=list(model[0].parameters()), lr=LR / 3, weight_decay=0.3))
            late = Mirror(optimizer.param_groups[1:])
        regression(model, t).backward()
        for it in filter(None, (mirror, late)):
            it.step(full(optimizer, it.params))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    mirror.compare("first group", 2 * CALLS)
    late.compare("late group", 2 * CALLS)
    optimizer.close()


@pytest.mark.parametrize("name", ["step", "flush", "state_dict"])
def test_an_interrupt_waits_for_the_end_of_the_call(device, settings, name):
    """Ctrl-C where host work is under way: it is delivered, and the optimizer is whole."""
    results = []
    for interrupts in (False, True):
        torch.manual_seed(0)
        model = mlp(device)
        optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, config=ZenFlowConfig(**settings))
        for t in range(CALLS):
            regression(model, t).backward()
            optimizer.step()
            optimizer.zero_grad()
        regression(model, CALLS).backward()
        engine = optimizer.engine
        if interrupts:
            inner = engine.check_usable
            engine.check_usable = lambda inner=inner: (signal.raise_signal(signal.SIGINT), inner())
            with pytest.raises(KeyboardInterrupt):
                getattr(optimizer, name)()
            engine.check_usable = inner
        else:
            getattr(optimizer, name)()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        optimizer.zero_grad()
        for t in range(CALLS):
            regression(model, t).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        results.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_interrupt_does_not_wait():
    ended = []

    @uninterrupted(threading.RLock())
    def call():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            ended.append(1)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert ended == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("read", [lambda o: o.state_dict(), lambda o: o.metrics()], ids=["state_dict", "metrics"])
def test_another_thread_may_read_state_while_training_goes_on(device, read):
    """Training is what it is without."""
    results = []
    for reads in (False, True):
        torch.manual_seed(0)
        model, stop, errors = mlp(device), threading.Event(), []
        optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, config=ZenFlowConfig(**PRESETS["stallfree"]))

        def watch(optimizer=optimizer, stop=stop, errors=errors):
            try:
                while not stop.wait(1e-3):
                    read(optimizer)
            except BaseException as error:
                errors.append(error)

        watcher = threading.Thread(target=watch)
        if reads:
            watcher.start()
        for t in range(10 * CALLS):
            regression(model, t).backward()
            optimizer.step()
            optimizer.zero_grad()
        stop.set()
        if reads:
            watcher.join()
        assert not errors
        optimizer.flush()
        results.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_compiled_step_is_a_step(device, settings):
    """torch.compile leaves it as it is."""
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = mlp(device)
        optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, config=ZenFlowConfig(**settings))
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for t in range(CALLS):
            regression(model, t).backward()
            step()
            optimizer.zero_grad()
        assert optimizer.metrics()["call"] == CALLS
        optimizer.flush()
        results.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
