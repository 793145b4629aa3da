"""Sharded checkpoints by torch.distributed.checkpoint: bit-exact on as many ranks, loadable on any number after a flush."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nets import CALLS, LR, PRESETS, Run, drawn_batch, equal, gathered, in_one_dimension, in_two_dimensions, near, weights
from ranks import DEVICE, on_host
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from stallfree import ZenFlowAdamW


def save(run: Run, directory: Path) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory)


def load(run: Run, directory: Path, more_ranks: bool = False) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=directory, planner=dcp.DefaultLoadPlanner(allow_partial_load=more_ranks))
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
OPTIONS = {  # to set a full state with
    "from all": FULL,
    "from the first": StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
}


def save_full(run: Run, path: Path) -> None:
    """In one file, by the first rank."""
    model, optimizer = get_state_dict(run.model, run.optimizer, options=FULL)
    if torch.distributed.get_rank() == 0:
        torch.save({"model": model, "optimizer": optimizer}, path)
    torch.distributed.barrier()


def load_full(run: Run, path: Path, options: StateDictOptions = FULL) -> None:
    reads = torch.distributed.get_rank() == 0 or not options.broadcast_from_rank0
    state = torch.load(path, weights_only=True) if reads else {"model": {}, "optimizer": {}}
    set_model_state_dict(run.model, state["model"], options=options)
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=options)


def resumes(rank, way, settings, directory, step):
    """Returns what was in flight when state was saved."""
    in_flight = set()
    run = Run.of(way, settings, alike=False)
    expected = [*run.play(CALLS), run.flushed()]
    run.optimizer.close()
    run = Run.of(way, settings, alike=False)
    for call in range(1, CALLS):
        run.play(call)
        if call % step:
            continue
        save(run, directory / str(call))
        in_flight |= {name for block in run.optimizer.engine.blocks for name in ("open", "queue") if getattr(block, name)}
        fresh = Run.of(way, settings, alike=False)
        fresh.play(call % 3)
        load(fresh, directory / str(call))
        fresh.call = call
        equal([weights(fresh.model), *fresh.play(CALLS), fresh.flushed()], expected[call - 1 :], f"resumed after call {call}")
        fresh.optimizer.close()
    equal([*run.play(CALLS), run.flushed()], expected[-2:], "the run that was saved from")
    run.optimizer.close()
    return in_flight


@pytest.mark.parametrize("preset", ["stallfree", "rounds", "device"])
def test_a_resumed_run_is_bit_identical(two, tmp_path, preset):
    """Mid-window, with slots and windows in flight on every rank."""
    two.run(resumes, "sharded", PRESETS[preset], tmp_path, 3)


def test_a_resumed_run_with_moments_in_bf16_is_bit_identical(two, tmp_path):
    two.run(resumes, "sharded", PRESETS["stallfree"] | dict(moments_dtype="bfloat16"), tmp_path, 5)


def test_a_resumed_run_that_is_split_by_columns_is_bit_identical(two, tmp_path):
    two.run(resumes, "by_columns", PRESETS["stallfree"], tmp_path, 5)


@pytest.mark.parametrize("way", ["sharded", "hybrid"])
def test_a_resumed_run_over_four_ranks_is_bit_identical(four, tmp_path, way):
    assert four.run(resumes, way, PRESETS["stallfree"], tmp_path, 7) == [{"open", "queue"}] * 4


def stage(rank, way, settings, source, more_ranks, since, until, target, full=None):
    """Part of a run: from a checkpoint to a flush and another checkpoint. full: the options to set full states with."""
    run = Run.of(way, settings)
    if source is not None:
        load_full(run, source, full) if full else load(run, source, more_ranks)
    run.call = since
    seen = run.play(until)
    seen.append(run.flushed())
    if target is not None:
        save_full(run, target) if full else save(run, target)
    run.optimizer.close()
    return seen


class Real:
    """The loop of a model over two dimensions."""

    def __init__(self, preset="stallfree"):
        self.model = in_two_dimensions()
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), lr=LR, **PRESETS[preset], max_grad_norm=1.0)
        self.call = 0

    def play(self, until):
        for call in range(self.call, until):
            self.model(drawn_batch(4, 10 * call + torch.distributed.get_rank() // 2)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.call = until
        return weights(self.model)


def resumes_in_two_dimensions(rank, directory):
    run = Real()
    run.play(8)
    save(run, directory)
    expected = run.play(CALLS)
    run.optimizer.close()
    fresh = Real()
    load(fresh, directory)
    fresh.call = 8
    equal([fresh.play(CALLS)], [expected])
    fresh.optimizer.close()


def test_a_resumed_run_over_two_dimensions_is_bit_identical(four, tmp_path):
    four.run(resumes_in_two_dimensions, tmp_path)


def saved_over_two_dimensions(rank, directory):
    run = Real("deferred")
    run.play(8)
    run.optimizer.flush()
    save(run, directory)
    run.play(CALLS)
    run.optimizer.flush()
    run.optimizer.close()
    return weights(run.model)


def loaded_over_one(rank, directory):
    model = in_one_dimension()
    run = Run(model, ZenFlowAdamW(model.named_parameters(), lr=LR, **PRESETS["deferred"], max_grad_norm=1.0))
    load(run, directory)
    for call in range(8, CALLS):
        model(drawn_batch(4, 10 * call + rank)).square().sum().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run.flushed()


def test_from_two_dimensions_to_one(two, four, tmp_path):
    """Each pair of tensor-parallel ranks saw one batch, and so does each rank here; sums are made in another order."""
    expected = four.run(saved_over_two_dimensions, tmp_path)[0]
    for a, b in zip(two.run(loaded_over_one, tmp_path)[0], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


STOPS = (5, 8, 11, 14)


def interrupted(settings):
    """What a run without interruption says, that flushes at the same calls."""
    run = Run.of("plain", settings)
    seen = [[*run.play(stop), run.flushed()] for stop in STOPS]
    run.optimizer.close()
    return on_host(seen)


@pytest.mark.parametrize("preset", ["deferred", "stallfree"])
@pytest.mark.parametrize("full", [None, *OPTIONS.values()], ids=["sharded", *OPTIONS])
def test_after_a_flush_a_run_goes_on_over_another_number_of_ranks(route, tmp_path, preset, full):
    """Without a selection no bit changes; with one, channels are selected anew, and flushed weights are
    AdamW's as ever."""
    settings, since, source = PRESETS[preset] | dict(channel_dim=1), 0, None
    expected = interrupted(settings)
    saved_by = 1
    for place, (ranks, stop) in enumerate(zip(route, STOPS, strict=True)):
        target, how = tmp_path / str(place), FULL if full and saved_by == 1 else full
        seen = ranks.run(stage, "sharded", settings, source, ranks.world > saved_by, since, stop, target, how)[0]
        if preset == "deferred":
            equal(seen, expected[place], f"part {place}")
        else:
            near(seen[-1:], expected[place][-1:])
        since, source, saved_by = stop, target, ranks.world


def saved_mid_window(rank, directory):
    run = Run.of("sharded", PRESETS["stallfree"])
    run.play(7)
    save(run, directory)
    run.optimizer.close()


def refuses(rank, directory):
    run = Run.of("sharded", PRESETS["stallfree"])
    with pytest.raises(ValueError, match=r"mid-window.*flush\(\) before"):
        load(run, directory, more_ranks=True)
    run.optimizer.close()


def test_what_is_in_flight_is_refused_on_another_number_of_ranks_with_the_way_out(two, four, tmp_path):
    two.run(saved_mid_window, tmp_path)
    four.run(refuses, tmp_path)


# Full states


def resumes_whole(rank, way, options, path):
    """On the same ranks, after a flush."""
    run = Run.of(way, PRESETS["deferred"], alike=False)
    run.play(4)
    run.optimizer.set_update_interval(2)
    run.play(7)
    run.flushed()
    save_full(run, path)
    expected = [*run.play(CALLS), run.flushed()]
    fresh = Run.of(way, PRESETS["deferred"], alike=False)
    load_full(fresh, path, options)
    assert fresh.optimizer.interval_history == run.optimizer.interval_history
    fresh.call = 7
    equal([*fresh.play(CALLS), fresh.flushed()], expected)
    run.optimizer.close()
    fresh.optimizer.close()


@pytest.mark.parametrize("ranks, way", [("two", "sharded"), ("two", "by_columns"), ("four", "hybrid")])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_resumed_from_a_full_state_is_bit_identical_without_a_selection(request, tmp_path, ranks, way, options):
    request.getfixturevalue(ranks).run(resumes_whole, way, options, tmp_path / "full")


def resumes_whole_in_two_dimensions(rank, options, path):
    run = Real("deferred")
    run.play(8)
    run.optimizer.flush()
    save_full(run, path)
    expected = run.play(CALLS)
    fresh = Real("deferred")
    load_full(fresh, path, options)
    fresh.call = 8
    equal([fresh.play(CALLS)], [expected])
    run.optimizer.close()
    fresh.optimizer.close()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_over_two_dimensions_resumes_from_a_full_state(four, tmp_path, options):
    four.run(resumes_whole_in_two_dimensions, options, tmp_path / "full")


def refuses_what_one_process_broadcasts(rank, path):
    run = Run.of("sharded", PRESETS["stallfree"] | dict(channel_dim=1))
    try:
        load_full(run, path, OPTIONS["from the first"])
    except ValueError as error:
        return str(error)
    finally:
        run.optimizer.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="with NCCL torch refuses on rank 0 alone: the other would wait for a timeout")
def test_a_full_state_that_torch_broadcasts_in_another_order_is_refused_with_the_way_out(one, two, tmp_path):
    """From one process its tensors are not contiguous, and it sends their memory."""
    one.run(stage, "sharded", PRESETS["stallfree"] | dict(channel_dim=1), None, False, 0, 5, tmp_path / "full", FULL)
    assert "load it without broadcast_from_rank0" in two.run(refuses_what_one_process_broadcasts, tmp_path / "full")[1]


def refuses_what_is_in_flight_in_a_full_state(rank, path):
    run = Run.of("sharded", PRESETS["stallfree"])
    run.play(7)
    save_full(run, path)
    state = torch.load(path, weights_only=True)["optimizer"] if rank == 0 else {}
    for calls in (0, 7):  # with nothing in flight, and with as much: the others' own would stay beside the first one's
        fresh = Run.of("sharded", PRESETS["stallfree"])
        fresh.play(calls)
        with pytest.raises(ValueError, match=r"mid-window.*full_state_dict.*flush\(\) before"):
            set_optimizer_state_dict(fresh.model, fresh.optimizer, state, options=OPTIONS["from the first"])
        fresh.optimizer.close()
    run.optimizer.close()


def test_what_is_in_flight_in_a_full_state_is_refused_on_every_rank_with_the_way_out(two, tmp_path):
    two.run(refuses_what_is_in_flight_in_a_full_state, tmp_path / "full")


def refuses_a_full_state_without_the_option(rank, path):
    run = Run.of("sharded", PRESETS["stallfree"])
    run.play(7)
    run.optimizer.flush()
    save_full(run, path)
    state = torch.load(path, weights_only=True)["optimizer"]
    before = weights(run.model)
    with pytest.raises(ValueError, match=r"set_optimizer_state_dict with .*full_state_dict=True"):
        set_optimizer_state_dict(run.model, run.optimizer, state)
    equal([weights(run.model)], [before])
    run.optimizer.close()


def test_a_full_state_is_refused_without_the_option_that_spreads_it(two, tmp_path):
    two.run(refuses_a_full_state_without_the_option, tmp_path / "full")


def whole_state(rank):
    run = Run.of("sharded", PRESETS["stallfree"])
    run.play(7)
    entries = run.optimizer.state_dict()["state"]
    params = list(run.model.parameters())
    for number, param in enumerate(params):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert entries[number][name].shape == param.shape
            assert entries[number][name].placements == param.placements
    states = [gathered(entries[number]["exp_avg"]) for number in range(len(params))]
    run.optimizer.close()
    return states


def test_state_is_shaped_and_placed_like_parameters(two):
    first, second = two.run(whole_state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def asks_before_the_first_call(rank):
    run, other = (Run.of("sharded", PRESETS["stallfree"]) for _ in range(2))
    before = weights(run.model)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    assert run.optimizer.metrics()["call"] == 0
    equal(weights(run.model), before, "asked for its state")
    equal([*run.play(9), run.flushed()], [*other.play(9), other.flushed()], "what follows")
    run.optimizer.close()
    other.optimizer.close()


def test_to_ask_for_the_state_of_a_new_optimizer_is_no_step(two):
    """Torch takes one, with zero gradients and a learning rate of 0, where there is no state yet."""
    two.run(asks_before_the_first_call)
