"""metrics.jsonl: one line per step and per evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends records; a resumed run first drops those that its checkpoint does not know."""

    def __init__(self, directory: Path, *, step: int = 0, evaluated: set[int] | None = None) -> None:
        self._path = directory / METRICS_FILE
        known = [
            record
            for record in read_metrics(directory)
            if (record["step"] <= step if record["kind"] == "step" else record["step"] in (evaluated or set()))
        ]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in known), encoding="utf-8")
        partial.replace(self._path)

    def append(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no numbers that are not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """All records in order; a line cut off by a crash is left out."""
    path = directory / METRICS_FILE
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
