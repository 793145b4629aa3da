"""Draws what ran when in some training steps, from a trace of `stallfree bench step --trace`:

    python docs/pictures/draw_trace.py trace.json docs/pictures/trace.svg --keep benchmarks/results/trace.json.gz

One row for each of the training thread's calls of `step()`, the GPU's kernels, its copies in both directions and the host's
updates. Spans that lie closer together than a pixel are drawn as one. `--keep` writes the events that were drawn, for
chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, LEFT, TOP, ROW, TEXT = 860, 165, 40, 44, "#333333"
OWN = re.compile("[a-z_]+_kernel")  # names of the optimizer's kernels: others' have arguments or namespaces


class Row(NamedTuple):
    label: str
    color: str
    spans: list[tuple[float, float]]  # microseconds


def read(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event for event in json.loads(data)["traceEvents"] if drawn(event)]


def drawn(event: dict[str, Any]) -> bool:
    """Whether a row below is made of it."""
    category, name = event.get("cat"), event.get("name", "")
    if category == "user_annotation":
        return name == "step" or name.startswith("Optimizer.step")
    return event.get("ph") == "X" and category in ("kernel", "gpu_memcpy", "host")


def rows(events: Iterable[dict[str, Any]]) -> list[Row]:
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        category, name = event["cat"], event["name"]
        if category == "kernel":
            kind = "own" if OWN.fullmatch(name) else "other"
        elif category == "gpu_memcpy":
            kind = "down" if "DtoH" in name else "up" if "HtoD" in name else "other"
        else:
            kind = "host" if category == "host" else name if name == "step" else "optimizer"
        spans.setdefault(kind, []).append((event["ts"], event["ts"] + event["dur"]))
    return [
        Row("training thread: step()", "#7a6fb0", spans.get("optimizer", [])),
        Row("GPU: forward, backward", "#9a9a9a", spans.get("other", [])),
        Row("GPU: optimizer", "#3f8f5f", spans.get("own", [])),
        Row("copies down", "#8fb8de", spans.get("down", [])),
        Row("host: replay", "#e8a33d", spans.get("host", [])),
        Row("copies up", "#4d7ea8", spans.get("up", [])),
    ]


def merged(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin - joined[-1][1] < gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def draw(events: list[dict[str, Any]]) -> str:
    steps = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "step")
    first, last = steps[0][0], steps[-1][1]
    scale = WIDTH / (last - first)
    table = rows(events)
    bottom = TOP + ROW * len(table)
    parts = []
    for number, (begin, end) in enumerate(steps, 1):
        x = LEFT + (begin - first) * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#cccccc"/>')
        label = f"step {number}: {(end - begin) / 1e3:.0f} ms"
        parts.append(f'<text x="{x + (end - begin) * scale / 2:.1f}" y="{TOP - 14}" text-anchor="middle">{label}</text>')
    for place, row in enumerate(table):
        y = TOP + place * ROW
        parts.append(f'<text x="{LEFT - 10}" y="{y + 24}" text-anchor="end">{row.label}</text>')
        inside = [(max(begin, first), min(end, last)) for begin, end in row.spans if end > first and begin < last]
        for begin, end in merged(inside, 1 / scale):
            x, width = LEFT + (begin - first) * scale, max(0.5, (end - begin) * scale)
            parts.append(f'<rect x="{x:.1f}" y="{y + 8}" width="{width:.1f}" height="{ROW - 18}" fill="{row.color}"/>')
    body = "\n".join(['<rect width="100%" height="100%" fill="white"/>', *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {bottom + 10}" '
        f'font-family="sans-serif" font-size="12" fill="{TEXT}">\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--keep", type=Path, help="a .json.gz for the events that are drawn")
    args = parser.parse_args()
    events = read(args.trace)
    args.picture.write_text(draw(events), encoding="utf-8")
    if args.keep:
        args.keep.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


if __name__ == "__main__":
    main()
