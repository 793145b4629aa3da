"""The rows as a table on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (
    "mode",
    "mean ms",
    "× floor",
    "rounds ms",
    "median",
    "p99",
    "p99/mean",
    "max",
    "stall ms",
    "host ms",
    "B/param down, up",
    "host B/param",
    "peak GiB",
    "growth MiB host, GPU",
)

MODE_WIDTH = 20  # at least
GAP = 2  # between columns


def show_table(rows: list[dict[str, Any]], width: int) -> None:
    """Print one line per mode; – for what a mode does not count. Where the width is too small for it, no number is cut."""
    cells = [_cells(entry) for entry in rows]
    columns = list(zip(COLUMNS, *cells, strict=True))[1:]
    widths = [MODE_WIDTH, *(max(map(len, [*name.split(), *numbers])) for name, *numbers in columns)]
    made = Table(box=None, pad_edge=False)
    for name, least in zip(COLUMNS, widths, strict=True):
        first = name == COLUMNS[0]
        made.add_column(name, justify="left" if first else "right", overflow="fold", min_width=least)
    for line in cells:
        made.add_row(*line)
    Console(highlight=False, width=max(width, sum(widths) + GAP * (len(widths) - 1))).print(made)


def _cells(entry: dict[str, Any]) -> list[str]:
    if "mean_ms" not in entry:
        return [breakable(entry["mode"]), *["–"] * (len(COLUMNS) - 1)]
    rounds = entry["round_ms"]
    growth = [entry[name] for name in ("host_growth_MiB", "device_growth_MiB") if name in entry]
    return [
        breakable(entry["mode"]),
        f"{entry['mean_ms']:.1f}",
        _number(entry.get("ratio"), ".3f"),
        f"{min(rounds):.1f}–{max(rounds):.1f}",
        f"{entry['median_ms']:.1f}",
        f"{entry['p99_ms']:.1f}",
        f"{entry['p99_to_mean']:.2f}",
        f"{entry['max_ms']:.1f}",
        _number(entry.get("stall_ms"), ".1f"),
        _number(entry.get("host_ms"), ".1f"),
        ", ".join(_number(entry.get(f"{way}_bytes_per_parameter"), ".2f") for way in ("down", "up")),
        _number(entry.get("host_bytes_per_parameter"), ".1f"),
        _number(entry.get("device_peak_GiB"), ".2f"),
        ", ".join(f"{value:.0f}" for value in growth),
    ]


def breakable(mode: str) -> str:
    """With room to break lines between settings."""
    return mode.replace(":", ": ").replace(",", ", ")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
