"""Which channels a rank selects where they are spread over ranks: the best of those that it holds, call by call."""

import pytest
import torch
import torch.distributed as dist
from nets import CALLS, LR, PRESETS, Run, drawn_batch, gathered, in_two_dimensions

from stallfree import ZenFlowAdamW

SETTINGS = PRESETS["stallfree"]


def followed(optimizer, parts, backward):
    """Trains. After each call selections and scores are compared with what follows from the gathered gradients.

    parts: by weight, this rank's part of one number for each of its channels.
    Returns by weight what was selected, one selection after the other, and in how many of them the last place was a tie.
    """
    engine, decay = optimizer.engine, optimizer.config.score_decay
    states = {state.weight.name: state for state in engine.weights.values() if state.weight.name in parts}
    scores, chosen, ties = dict.fromkeys(states, 0), {name: [[]] for name in states}, dict.fromkeys(states, 0)
    for call in range(1, CALLS + 1):
        backward(call)
        for name, state in states.items():
            squares = gathered(optimizer.full_gradient(state.weight.param)).square().sum(1 - state.weight.channel_dim)
            scores[name] = decay * scores[name] + (1 - decay) * squares
        optimizer.step()
        optimizer.zero_grad()
        for name, state in states.items():
            weight, half, mine = state.weight, state.block.half, parts[name](scores[name])
            torch.testing.assert_close(engine.channels.of(engine.channels.score, weight, weight), mine, rtol=1e-5, atol=0)
            if state.block.schedule.last_selection == call:
                mine = mine.tolist()
                best = sorted(range(len(mine)), key=lambda channel: (-mine[channel], channel))
                places = min(round(2 * SETTINGS["topk_ratio"] * len(mine)), len(mine) - 1)
                chosen[name].append(best[:places])
                ties[name] += places > 0 and mine[best[places - 1]] == mine[best[places]]
            else:
                assert sorted(half.installed.selected[state.place].tolist()) == sorted(chosen[name][-1]), "what is here"
            assert sorted(half.division.selected[state.place].tolist()) == sorted(chosen[name][-1]), (
                "what the next call updates"
            )
    optimizer.close()
    return chosen, ties


def rows_of_a_table(rank):
    """Every third row has the same gradient. At first the second row and its like are the loudest, of which a rank of two may
    have one, while others are as loud as each other; then others are."""
    run = Run.of("sharded", SETTINGS, alike=False)

    def backward(call):
        def repeat(grads):
            like = torch.arange(10, device=grads["embed.weight"].device) % 3
            loud = 1 + 4.0 ** (1 + call // 4) * ((like + 1 + call // 4) % 3 == 0)
            grads["embed.weight"] = grads["embed.weight"][like] * loud[:, None]

        run.call = call
        run.backward(change=repeat)

    chosen, ties = followed(run.optimizer, {"embed.weight": lambda rows: rows.chunk(dist.get_world_size())[rank]}, backward)
    return chosen["embed.weight"], ties["embed.weight"]


@pytest.mark.parametrize("ranks, places, tied", [("two", [2, 2], True), ("four", [2, 2, 2, 0], False)])
def test_of_a_tables_rows_a_rank_selects_the_best_that_it_holds(request, ranks, places, tied):
    """Twice topk_ratio of them; ties go to the lowest."""
    answers = request.getfixturevalue(ranks).run(rows_of_a_table)
    for (chosen, ties), count in zip(answers, places, strict=True):
        assert {len(rows) for rows in chosen[1:]} == {count}
        assert bool(ties) == tied
        assert len({tuple(sorted(rows)) for rows in chosen[1:]}) > 1 or not count, "rows change hands"


def channels_in_two_dimensions(rank):
    model = in_two_dimensions()
    optimizer = ZenFlowAdamW(model.named_parameters(), lr=LR, channel_dim=dict(up=0, down=1), **SETTINGS)
    dp, tp = divmod(rank, 2)
    parts = {
        "layers.0.up.weight": lambda rows: rows.chunk(2)[tp].chunk(2)[dp],
        "layers.0.down.weight": lambda c: c.chunk(2)[tp],
    }

    def backward(call):
        loud = 1 + 9 * ((torch.arange(6) + call // 4) % 3 == 0).float()
        model(drawn_batch(4, 10 * call + dp) * loud.to(drawn_batch(1, 0).device)).square().sum().backward()

    return followed(optimizer, parts, backward)[0]


def test_so_it_does_of_channels_that_two_dimensions_split(four):
    """Rows that FSDP splits once more behind tensor parallelism, and columns that the latter splits."""
    answers = four.run(channels_in_two_dimensions)
    for name, count in (("layers.0.up.weight", 1), ("layers.0.down.weight", 2)):
        assert {len(channels) for chosen in answers for channels in chosen[name][1:]} == {count}
        assert any(len({*map(tuple, chosen[name][1:])}) > 1 for chosen in answers), "channels change hands"
