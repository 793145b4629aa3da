"""The page that a finished run leaves: report.md with the numbers, loss.svg with the curve."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import yaml

from stallfree.cli.finetune.metrics import read_metrics
from stallfree.cli.finetune.settings import FinetuneSettings

REPORT_FILE, CURVE_FILE = "report.md", "loss.svg"
WIDTH, HEIGHT, MARGIN = 640, 320, 48


def write_report(directory: Path, settings: FinetuneSettings, prompt: str, expected: str | None) -> Path:
    """Write the report of the run in `directory` from its metrics log; returns its path."""
    records = read_metrics(directory)
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    (directory / CURVE_FILE).write_text(curve_svg(steps, evaluations), encoding="utf-8")
    parts = [
        "# Fine-tuning report",
        f"`{settings.model}` on `{settings.data}`: {len(steps)} steps, {sum(r['tokens'] for r in steps):,} tokens "
        f"in {_duration(sum(r['seconds'] for r in steps))} of training.",
        _results(evaluations),
        f"![loss]({CURVE_FILE})",
        _optimizer(steps, settings.preset),
        _samples(prompt, expected, evaluations),
        "## Use it",
        f"```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(directory.absolute())!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(directory.absolute())!r})\n```",
        "## Settings",
        f"```yaml\n{yaml.safe_dump(settings.model_dump(mode='json', exclude_none=True), sort_keys=False)}```",
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
    return "\n".join(rows)


def _optimizer(steps: list[dict[str, Any]], preset: str) -> str:
    parts = [f"Optimizer: preset `{preset}`"]
    settled = [record for record in steps if not record.get("warming_up")]  # before that every channel is deferred
    if rhos := [record["rho"] for record in settled if "rho" in record]:
        parts.append(f"rho {statistics.fmean(rhos):.3f} on average")
    if kept := [record["retention"] for record in settled if "retention" in record]:
        parts.append(f"retention {statistics.fmean(kept):.3f}")
    if stalls := [record["stall_ms"] for record in steps if "stall_ms" in record]:
        parts.append(f"stall {statistics.median(stalls):.0f} ms a step (median), {sum(stalls) / 1000:.1f} s in all")
    if steps and (skipped := steps[-1].get("skipped_steps")):
        parts.append(f"{skipped} steps skipped because their gradient was not finite")
    return "; ".join(parts) + "."


def _samples(prompt: str, expected: str | None, evaluations: list[dict[str, Any]]) -> str:
    answers = [(f"after {record['step']} steps", record["sample"]) for record in evaluations if "sample" in record]
    answers += [("the data's own", expected)] if expected is not None else []
    fence = "````"
    return "\n\n".join(
        ["## A sample answer", f"Prompt:\n\n{fence}\n{prompt}\n{fence}"]
        + [f"Answer, {when}:\n\n{fence}\n{answer}\n{fence}" for when, answer in answers]
    )


def _finite(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [point for point in points if point[1] - point[1] == 0]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
