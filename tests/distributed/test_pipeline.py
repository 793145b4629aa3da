"""Pipeline stages (torch.distributed.pipelining), each inside `fully_shard` over its data-parallel ranks, with an optimizer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nets import CALLS, LR, PRESETS, Layer, Net, drawn, equal, mesh_of, weights
from ranks import DEVICE
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from stallfree import ZenFlowAdamW
from stallfree.engine.gradient import StagedGradient
from stallfree.engine.sharding import gradient_of

PASSES = 4  # microbatches
LIMIT = 1.0  # of the norm
SCHEDULES = {one.__name__: one for one in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)}
INTERLEAVED = "ScheduleInterleaved1F1B"
PAGE = Path(__file__).parents[2] / "docs" / "fsdp.md"
NAN = "    norm = torch.where(norm.isfinite(), norm, torch.nan)\n"  # a line there


class Stage(nn.Module):
    """A loss linear in the weights: in microbatch m the gradient of each is what it is given for m.

    x: `[1, 1 + PASSES]`, the sum of the stages before, and which microbatch it is, one-hot.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.layers = nn.ModuleList(Layer(Net.SHAPES[(number + i) % len(Net.SHAPES)], generator) for i in range(2))
        self.given: dict[str, Tensor] = {}  # [PASSES, *shape]
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        grads = {name: given[int(x[0, 1:].argmax())] for name, given in self.given.items()}
        total = x[:, 0]
        for number, layer in enumerate(self.layers):
            prefix = f"layers.{number}."
            total = layer(total, {name.removeprefix(prefix): grad for name, grad in grads.items() if name.startswith(prefix)})
        return torch.cat([total.view(1, 1), x[:, 1:]], dim=1)


class Part:
    """A stage of this rank, and torch's AdamW on the gradients that it is given."""

    def __init__(self, number: int, mesh: DeviceMesh) -> None:
        self.number, self.mesh = number, mesh
        self.stage, self.twin = Stage(number), Stage(number)
        options = dict(mesh=mesh["dp"], reshard_after_forward=number % 2 == 1)
        self.seen: list[list[Tensor]] = [[] for _ in self.stage.layers]  # weights that forward passes have computed with
        for layer, seen in zip(self.stage.layers, self.seen, strict=True):
            fully_shard(layer, **options)
            layer.register_forward_pre_hook(
                lambda layer, _, seen=seen: seen.append([p.detach().clone() for p in layer.parameters()])
            )
        fully_shard(self.stage, **options)
        self.adamw = torch.optim.AdamW(self.twin.parameters(), lr=LR)

    def give(self, call: int, bad: bool = False) -> None:
        """The gradients of a call: of each microbatch and data-parallel rank for itself. bad: one number of one is inf."""
        every = given(self.number, self.mesh["dp"].size(), call)
        if bad:
            every[-1]["layers.0.bias"][1, 0] = torch.inf
        self.stage.given = every[self.mesh["dp"].get_local_rank()]
        for param, grad in zip(self.twin.parameters(), mean(every), strict=True):
            param.grad = grad

    def weights(self) -> list[Tensor]:
        return weights(self.stage)

    def check_seen(self, published: list[Tensor]) -> None:
        """Each microbatch has computed with what was published, and with nothing that was gathered before."""
        for passes in zip(*self.seen, strict=True):
            equal([weight for layer in passes for weight in layer], published, f"stage {self.number} in forward")
        assert min(map(len, self.seen)) >= PASSES, "and the first call asks for shapes"
        for seen in self.seen:
            seen.clear()

    def compare(self, calls: int) -> None:
        for actual, (name, expected) in zip(self.weights(), self.twin.named_parameters(), strict=True):
            off = (actual - expected.detach()).abs()
            tolerance = calls * (2.0**-23 * expected.detach().abs() + LR * 5e-6)
            assert (off <= tolerance).all(), f"stage {self.number}, {name} is off by {off.max():.3g}"


def given(stage: int, ranks: int, call: int) -> list[dict[str, Tensor]]:
    """What a stage is given, by data-parallel rank: `[PASSES, *shape]` of each parameter."""
    shapes = Stage(stage)
    every = [[drawn(shapes, PASSES * call + m, 10 * stage + rank) for m in range(PASSES)] for rank in range(ranks)]
    return [{name: torch.stack([grads[name] for grads in of_rank]) for name in of_rank[0]} for of_rank in every]


def mean(every: list[dict[str, Tensor]]) -> list[Tensor]:
    """Over microbatches and data-parallel ranks."""
    return [torch.stack([of_rank[name].mean(0) for of_rank in every]).mean(0) for name in every[0]]


class Pipeline:
    """Two ranks of stages, by whatever number of data-parallel ranks there is room for. together: one optimizer for a rank."""

    def __init__(self, schedule: str, together: bool = False, **settings) -> None:
        self.mesh = mesh_of(2, dist.get_world_size() // 2, mesh_dim_names=("pp", "dp"))
        each = 2 if schedule == INTERLEAVED else 1
        self.parts = [Part(2 * i + self.mesh["pp"].get_local_rank(), self.mesh) for i in range(each)]
        named = [[(f"{part.number}.{name}", p) for name, p in part.stage.named_parameters()] for part in self.parts]
        twins = [list(part.twin.parameters()) for part in self.parts]
        self.trained = [[p for of_part in twins for p in of_part]] if together else twins  # by whom
        self.optimizers = [
            ZenFlowAdamW(some, lr=LR, **PRESETS["stallfree"] | settings)
            for some in ([[one for of_part in named for one in of_part]] if together else named)
        ]
        device = torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device(DEVICE)
        group = self.mesh["pp"].get_group()
        stages = [PipelineStage(part.stage, part.number, 2 * each, device, group=group) for part in self.parts]
        self.schedule = SCHEDULES[schedule](stages if each > 1 else stages[0], PASSES, loss_fn=lambda y, _: y[:, 0].sum())
        self.first, self.last = (any(getattr(stage, which) for stage in stages) for which in ("is_first", "is_last"))

    def backward(self) -> None:
        x = torch.cat([torch.zeros(PASSES, 1), torch.eye(PASSES)], dim=1).to(DEVICE)
        target = dict(target=torch.zeros(PASSES, 1, device=DEVICE)) if self.last else {}
        self.schedule.step(*([x] if self.first else []), **target)

    def clip(self, skips: bool) -> Tensor:
        """To the norm of all stages, as docs/fsdp.md shows. skips: where it is inf, it becomes nan."""
        (code,) = re.findall(r"```python\n(def clip_over_stages.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        assert code.count(NAN) == 1
        scope = {"torch": torch}
        exec(code if skips else code.replace(NAN, ""), scope)
        params = (param for part in self.parts for param in part.stage.parameters())
        norm: Tensor = scope["clip_over_stages"](params, LIMIT, self.mesh["pp"].get_group())
        return norm

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for part in self.parts:
            part.adamw.step()

    def flush(self) -> None:
        for optimizer in self.optimizers:
            optimizer.flush()

    def end(self, calls: int) -> None:
        self.flush()
        for part in self.parts:
            part.compare(calls)
        self.close()

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()


def trains(rank, schedule, together):
    """Clipped by each optimizer, to the norm of what it trains."""
    pipeline = Pipeline(schedule, together, max_grad_norm=LIMIT)
    matrices = [param for part in pipeline.parts for param in part.stage.parameters() if param.dim() > 1]
    for call in range(CALLS):
        for part in pipeline.parts:
            part.give(call)
        published = [part.weights() for part in pipeline.parts]
        pipeline.backward()
        for part, there in zip(pipeline.parts, published, strict=True):
            part.check_seen(there)
        assert {type(gradient_of(param)) for param in matrices} == {StagedGradient}, "staged before step()"
        norms = [torch.nn.utils.clip_grad_norm_(twins, LIMIT).item() for twins in pipeline.trained]
        pipeline.step()
        for optimizer, norm in zip(pipeline.optimizers, norms, strict=True):
            metrics = optimizer.metrics()
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert metrics["restages_total"] == 0, "gradients come once, when all microbatches have been"
    for optimizer in pipeline.optimizers:
        assert optimizer.metrics()["reselections_total"] > 0
        assert all(block.watched is not None for block in optimizer.engine.blocks), "hooks know what comes"
    pipeline.end(CALLS)


@pytest.mark.parametrize("schedule, together", [*((schedule, False) for schedule in SCHEDULES), (INTERLEAVED, True)])
@pytest.mark.parametrize("ranks", ["two", "four"])
def test_stages_end_with_adamws_weights(request, ranks, schedule, together):
    """One or two stages on a rank, over one or two data-parallel ranks each; four microbatches, clipped stage by stage."""
    request.getfixturevalue(ranks).run(trains, schedule, together)


def clips_over_all(rank, schedule, bad_call, skips):
    """In `bad_call` the last stage has an inf."""
    pipeline = Pipeline(schedule)
    last = 2 * len(pipeline.parts) - 1
    for call in range(CALLS):
        bad = call == bad_call
        for part in pipeline.parts:
            part.give(call, bad and part.number == last)
        pipeline.backward()
        norm = pipeline.clip(skips)
        if not bad:
            grads = [grad for stage in range(last + 1) for grad in mean(given(stage, pipeline.mesh["dp"].size(), call))]
            torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(grads), rtol=1e-5, atol=0)
        for part in pipeline.parts:
            if not bad:
                torch.nn.utils.clip_grads_with_norm_(part.twin.parameters(), LIMIT, norm)
            elif skips or part.number == last:
                part.twin.zero_grad()
            else:  # inf has made the factor 0
                torch._foreach_zero_([param.grad for param in part.twin.parameters()])
        pipeline.step()
    skipped = [optimizer.metrics()["skipped_steps"] for optimizer in pipeline.optimizers]
    assert skipped == [skips or part.number == last for part in pipeline.parts]
    pipeline.end(CALLS)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("ranks, schedule", [("two", INTERLEAVED), ("four", "Schedule1F1B")])
def test_a_norm_over_all_stages_clips_all_and_skips_all_where_it_is_nan(request, ranks, schedule, skips):
    """As docs/fsdp.md shows. Where it is inf, the stages that are not to blame take a step with gradients of zero."""
    request.getfixturevalue(ranks).run(clips_over_all, schedule, 9, skips)


def has_inf(rank):
    """Without a norm over all stages."""
    pipeline = Pipeline("Schedule1F1B")
    (part,), (optimizer,) = pipeline.parts, pipeline.optimizers
    for call in range(CALLS):
        bad = call == 9 and part.number == 0
        part.give(call, bad)
        pipeline.backward()
        if bad:
            part.twin.zero_grad()
        pipeline.step()
    assert optimizer.metrics()["skipped_steps"] == (part.number == 0)
    pipeline.end(CALLS)


def test_a_stage_with_inf_skips_alone(two):
    two.run(has_inf)


def play(pipeline, calls):
    seen = []
    for call in calls:
        for part in pipeline.parts:
            part.give(call)
        pipeline.backward()
        pipeline.step()
        seen.append([weight for part in pipeline.parts for weight in part.weights()])
    pipeline.flush()
    return [*seen, [weight for part in pipeline.parts for weight in part.weights()]]


def state_of(pipeline):
    """By names that no other stage has."""
    pairs = zip(pipeline.parts, pipeline.optimizers, strict=True)
    states = {str(part.number): get_state_dict(part.stage, optimizer) for part, optimizer in pairs}
    return {number: {"model": model, "optimizer": optimizer} for number, (model, optimizer) in states.items()}


def resumes(rank, directory):
    pipeline = Pipeline(INTERLEAVED)
    expected = play(pipeline, range(CALLS))
    pipeline.close()
    pipeline = Pipeline(INTERLEAVED)
    for call in range(8):
        for part in pipeline.parts:
            part.give(call)
        pipeline.backward()
        pipeline.step()
    dcp.save(state_of(pipeline), checkpoint_id=directory)
    pipeline.close()
    pipeline = Pipeline(INTERLEAVED)
    state = state_of(pipeline)
    dcp.load(state, checkpoint_id=directory)
    for part, optimizer in zip(pipeline.parts, pipeline.optimizers, strict=True):
        saved = state[str(part.number)]
        set_state_dict(part.stage, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    equal(play(pipeline, range(8, CALLS)), expected[8:], "resumed after call 8")
    pipeline.close()


def test_a_resumed_pipeline_is_bit_identical(two, tmp_path):
    """Mid-window: all stages in one checkpoint."""
    two.run(resumes, tmp_path)


def refuses(rank):
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*fully_shard\(model\).*pipeline stage.*one rank"):
        ZenFlowAdamW(Stage(rank).named_parameters(), lr=LR)


def test_a_plain_stage_is_refused_with_the_way_out(two):
    two.run(refuses)
