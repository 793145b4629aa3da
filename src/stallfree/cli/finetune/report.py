"""The page that a finished run leaves: report.md with the numbers, loss.svg with the curve."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from stallfree.cli.finetune.data import Data
from stallfree.cli.finetune.evaluation import Evaluation, Prompt
from stallfree.cli.finetune.machine import hardware, versions
from stallfree.cli.finetune.metrics import read_metrics
from stallfree.cli.finetune.optimizer import warmup_steps
from stallfree.cli.finetune.settings import FinetuneSettings
from stallfree.cli.finetune.train import Training
from stallfree.config import FIELDS
from stallfree.engine.sharding import part_in

REPORT_FILE, CURVE_FILE = "report.md", "loss.svg"
WIDTH, HEIGHT, MARGIN = 640, 320, 48


def write_report(
    directory: Path,
    settings: FinetuneSettings,
    training: Training,
    evaluated: Iterable[Evaluation],
    prompts: Sequence[Prompt],
    data: Data,
) -> Path:
    """Write the report of the finished run in `directory`, its steps' numbers from its metrics log; returns its path."""
    steps = [record for record in read_metrics(directory) if record["kind"] == "step"]
    evaluations = [evaluation.record() for evaluation in evaluated]
    (directory / CURVE_FILE).write_text(curve_svg(steps, evaluations), encoding="utf-8")
    parts = [
        "# Fine-tuning report",
        f"`{settings.model}` on `{settings.data}`: {training.steps} steps, {training.tokens:,} tokens "
        f"in {_duration(sum(r['seconds'] for r in steps))} of training.",
        f"On {hardware(training.model.device.type)}{_ranks(training)}. {versions()}.",
        _results(evaluations),
        f"![loss]({CURVE_FILE})",
        _optimizer(steps, settings.preset),
        _memory(training),
        _samples(prompts, evaluations),
        "## Use it",
        f"```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(directory.absolute())!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(directory.absolute())!r})\n```",
        "## Settings",
        "With the defaults that applied:",
        f"```yaml\n{yaml.safe_dump(_settings(settings, training, data), sort_keys=False)}```",
        f"The optimizer's configuration. What its `auto` came to: {_derived(training)}.",
        f"```yaml\n{yaml.safe_dump(_optimizer_fields(settings, training), sort_keys=False)}```",
    ]
    path = directory / REPORT_FILE
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def curve_svg(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    """Loss over steps: training as a thin line, held out as dots on a thick one. Not finite: left out."""
    train = _finite([(record["step"], record["loss"]) for record in steps])
    held_out = _finite([(record["step"], record["loss"]) for record in evaluations])
    values = [loss for _, loss in train + held_out] or [0.0]
    last = max((step for step, _ in train + held_out), default=1) or 1
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def place(point: tuple[float, float]) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * point[0] / last
        y = MARGIN + (HEIGHT - 2 * MARGIN) * (high - point[1]) / span
        return f"{x:.1f},{y:.1f}"

    def line(points: list[tuple[float, float]], style: str) -> str:
        return f'<polyline fill="none" {style} points="{" ".join(map(place, points))}"/>'

    def text(x: float, y: float, words: str, anchor: str) -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'

    dots = [f'<circle r="3.5" fill="#c2410c" cx="{x}" cy="{y}"/>' for x, y in (place(point).split(",") for point in held_out)]
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" fill="none" stroke="#999"/>',
            line(train, 'stroke="#2563eb" stroke-width="1.2"'),
            line(held_out, 'stroke="#c2410c" stroke-width="2"'),
            *dots,
            text(MARGIN - 6, MARGIN + 4, f"{high:.2f}", "end"),
            text(MARGIN - 6, bottom + 4, f"{low:.2f}", "end"),
            text(MARGIN, bottom + 18, "0", "middle"),
            text(right, bottom + 18, f"{last} steps", "end"),
            '<g font-weight="bold">',
            f'<g fill="#2563eb">{text(right, MARGIN - 24, "training loss", "end")}</g>',
            f'<g fill="#c2410c">{text(right, MARGIN - 8, "held-out loss", "end")}</g>',
            "</g>",
            "</svg>\n",
        ]
    )


def _results(evaluations: list[dict[str, Any]]) -> str:
    scored = any("score" in record for record in evaluations)
    rows = ["| step | held-out loss |" + (" task score |" if scored else ""), "|---|---|" + ("---|" if scored else "")]
    for record in evaluations:
        score = f" {record['score']:.3f} ({record['scored']} problems) |" if "score" in record else " |"
        rows.append(f"| {record['step']} | {record['loss']:.4f} |" + (score if scored else ""))
    table = "\n".join(rows)
    if not scored:
        return table
    solved = ", ".join(
        f"{record['solved']} of {record['scored']} {'after' if record['step'] else 'before'}"
        for record in evaluations
        if "score" in record
    )
    return f"{table}\n\nThe task score is the task's own, from 0 to 1, with partial credit. Exact matches: {solved}."


def _optimizer(steps: list[dict[str, Any]], preset: str) -> str:
    parts = [f"Optimizer: preset `{preset}`"]
    settled = [record for record in steps if not record.get("warming_up")]  # before that every channel is deferred
    if rhos := _finite_values(settled, "rho"):
        parts.append(f"rho {statistics.fmean(rhos):.3f} on average")
    if kept := _finite_values(settled, "retention"):
        parts.append(f"retention {statistics.fmean(kept):.3f}")
    if stalls := _finite_values(steps, "stall_ms"):
        parts.append(f"stall {statistics.median(stalls):.0f} ms a step (median), {sum(stalls) / 1000:.1f} s in all")
    if steps and (skipped := steps[-1].get("skipped_steps")):
        parts.append(f"{skipped} steps skipped because their gradient was not finite")
    return "; ".join(parts) + (
        ".\n\n- rho: share of the squared gradient norm in channels whose update is deferred to the host and so arrives a few"
        " steps late; the smaller, the closer to plain AdamW.\n"
        "- retention: share of the selected channels that the next selection kept.\n"
        "- stall: time within a step that the device (on a CPU: the training thread) waited for the host's updates."
    )


def _memory(training: Training) -> str:
    measured, config = training.optimizer.metrics(), training.optimizer.config
    params = [param for param in training.model.parameters() if param.requires_grad]
    count = sum(part_in(param).numel() for param in params)
    host, device = measured["host_bytes"], measured["device_bytes"]
    own, room = params[0].element_size(), config.max_update_interval
    S = f"S={measured['interval']}" + (f", with room for {room}" if room > measured["interval"] else "")
    how = f"{S}, topk_ratio={config.topk_ratio}" + _ranks(training, "of rank 0 of ")
    return (
        f"Memory of the optimizer ({how}): {host / count:.1f} bytes per parameter on the host ({host / 1e9:.2f} GB), "
        f"{device / count:.1f} on the device ({device / 1e9:.2f} GB); weights and gradients take {own} each besides."
    )


def _ranks(training: Training, words: str = "") -> str:
    return f", {words}{training.ranks}" if training.ranks.sharded else ""


def _settings(settings: FinetuneSettings, training: Training, data: Data) -> dict[str, Any]:
    """What was left to be decided, decided."""
    decided = {
        "warmup": warmup_steps(settings, training.steps),
        "steps": training.steps,
        "max_grad_norm": settings.clip or 0.0,
        "eval_size": len(data.held_out),
        "eval_every": settings.eval_interval(training.steps),
        "log_every": settings.log_interval(training.model.device.type),
    }
    return {name: value for name, value in (settings.model_dump(mode="json") | decided).items() if value is not None}


def _optimizer_fields(settings: FinetuneSettings, training: Training) -> dict[str, Any]:
    """Also those that the preset filled, and the room that memory allowed."""
    config = settings.optimizer_config()
    room = training.optimizer.config.max_update_interval
    return {name: getattr(config, name) for name in FIELDS} | {"max_update_interval": room}


def _derived(training: Training) -> str:
    config, interval = training.optimizer.config, training.optimizer.metrics()["interval"]
    calls = training.optimizer.engine.clock.warm_up
    warm_up = "all" if calls is None else f"the first {calls}"
    moves = [change for change in training.optimizer.interval_history if change.interval != change.before]
    before = "".join(f"{change.before} until call {change.call}, " for change in moves)
    return (
        f"interval S {before}{interval}, topk_ratio {config.topk_ratio}, lag {config.lag}, "
        f"look-ahead {config.lookahead_at(interval):g} steps; warm-up calls: {warm_up}"
    )


def verdict(score: float) -> str:
    """Of an answer, from the task's score."""
    return "right" if score >= 1 else f"wrong, score {score:.2f}"


def _samples(prompts: Sequence[Prompt], evaluations: list[dict[str, Any]]) -> str:
    fence = "````"
    parts = ["## Sample answers"]
    for place, prompt in enumerate(prompts):
        parts.append(f"Prompt:\n\n{fence}\n{prompt.text}\n{fence}")
        for record in evaluations:
            if "samples" in record:
                mark = f" ({verdict(record['sample_scores'][place])})" if "sample_scores" in record else ""
                when = f"after {record['step']} steps" if record["step"] else "before training"
                parts.append(f"Answer, {when}{mark}:\n\n{fence}\n{record['samples'][place]}\n{fence}")
        if prompt.expected is not None:
            parts.append(f"Answer, the data's own:\n\n{fence}\n{prompt.expected}\n{fence}")
    return "\n\n".join(parts)


def _finite(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [point for point in points if math.isfinite(point[1])]


def _finite_values(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if name in record and math.isfinite(record[name])]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
