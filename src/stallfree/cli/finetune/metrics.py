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
        partial.write_text("".join(map(_line, known)), encoding="utf-8")
        partial.replace(self._path)
        self._owed = ""  # what a full disk has not taken

    def append(self, record: dict[str, Any]) -> None:
        """Raises OSError if there is no room; the next call writes this record first."""
        self._owed += _line(record)
        rest = memoryview(self._owed.encode())
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)  # half a line would spoil the next one
                raise
        self._owed = ""


def _line(record: dict[str, Any]) -> str:
    """JSON has no numbers that are not finite: null stands for them."""
    plain = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """All records in order, with NaN for what was not finite; what a crash or an editor made of a line is left out."""
    path = directory / METRICS_FILE
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int) or record["kind"] not in ("step", "eval"):
                continue
        except (ValueError, LookupError, TypeError):
            continue
        records.append({name: math.nan if value is None else value for name, value in record.items()})
    return records
