"""Which runs the convergence study makes, and what it reports of them."""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.convergence.plan import GROUPS, METHODS, MODERATE, START, batch_of, missing
from benchmarks.convergence.report import report


def play(best, tasks=("a",), methods=tuple(METHODS)[:2]):
    """Run the plan to its end on a made-up loss with its minimum at `best`; returns the runs in order."""
    results, made = {}, []
    while todo := missing(results, tasks, methods):
        for run in batch_of(todo, 3):
            assert run not in results
            results[run] = abs(math.log(run.lr / best)) + run.seed
            made.append(run)
    return made


def test_plan_brackets_the_best_rate_and_then_repeats_it():
    made = play(best=2e-4)
    assert len(made) == len(set(made))
    firsts = [run for run in made if run.seed == 0]
    assert {run.lr for run in firsts} == set(START) == {run.lr for run in made[: len(firsts)]}
    for method in tuple(METHODS)[:2]:
        repeated = {run.lr for run in made if run.seed == 2 and run.method == method}
        assert repeated == {MODERATE, 1e-4, 2e-4, 4e-4}


def test_plan_goes_beyond_the_grid_it_started_with():
    rates = {run.lr for run in play(best=2e-3) if run.seed == 0}
    assert rates == {*START, 2e-3, 4e-3}


def test_groups_with_a_list_of_runs_go_in_order_of_importance():
    todo = missing({}, ["a", "b"], METHODS, groups=("refine", "long"))
    stages = list(dict.fromkeys((run.steps, run.seed, run.task) for run in todo))
    assert stages == [(300, 0, "a"), (300, 0, "b"), (1200, 0, "a"), (1200, 0, "b"), (300, 1, "a"), (300, 1, "b")]
    assert len(todo) == len(set(todo)) == 2 * (2 * 3 * len(GROUPS["refine"]) + 4 * len(GROUPS["long"]))
    done = dict.fromkeys(batch_of(todo, 1000), 1.0)
    assert {(run.task, run.steps) for run in done} == {("a", 300)}
    assert missing(done, ["a", "b"], METHODS, groups=("refine",)) == [
        run for run in todo if run.steps == 300 and run.task == "b"
    ]
    assert {run.steps for run in missing({}, ["a"], ["replay S=4"], 24, ("default", "long"))} == {24, 96}


def test_report_compares_seed_by_seed(tmp_path):
    file = tmp_path / "results.jsonl"
    common = dict(kind="run", task="sum", steps=3, batch=4, untrained=2.0, device="none", torch="0", date="today", rho=0.1)
    records = []
    for seed, base in enumerate((1.0, 1.2, 1.1)):
        for lr, extra in ((MODERATE, 0.3), (1e-4, 0.0), (2e-4, None if seed == 0 else 0.05)):
            for method, above in (("synchronous AdamW", 0.0), ("replay S=4", 0.01)):
                loss = None if extra is None else base + extra + above
                record = dict(method=method, lr=lr, seed=seed, held_out=[1.5, loss], exact_match=[0.1, 0.5], train_last_50=loss)
                records.append(common | record)
    axis = dict(rho=0.25, retention=0.5)
    records.append(
        common | dict(kind="probe", table=dict(q=dict(share=0.5, columns=axis, rows=axis), together=dict(rho=0.125)))
    )
    longer = dict(method="synchronous AdamW", lr=5e-5, seed=0, held_out=[0.5], exact_match=[0.9], train_last_50=0.5)
    records.append(common | longer | dict(steps=12))
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = report([file])
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## sum, 3 steps", "## sum, 12 steps"]
    assert "| synchronous AdamW | 5e-05 (edge) | 1 | 0.5000 | +0.0000 |" in text
    row = next(line for line in text.splitlines() if line.startswith("| replay S=4 |"))
    assert "| 0.0001 | 3 | 1.1100 ± 0.1000 | +0.0100 ± 0.0000 | 0.500 | 1.4100 ± 0.1000 | +0.0100 ± 0.0000 |" in row
    assert "inf (diverged)" in text
    assert "| q | 0.500 | 0.250 | 0.500 | 0.250 | 0.500 |" in text
