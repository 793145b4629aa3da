"""What docs/ takes from the code is up to date."""

import gzip
import json
import re
import runpy
from pathlib import Path

from stallfree.config import FIELDS, PRESETS

DOCS = Path(__file__).parent.parent / "docs"


def test_the_configuration_page_is_what_the_code_says():
    made = runpy.run_path(str(DOCS / "make.py"))["configuration"]()
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == made, "run `make docs`"
    for name in (*FIELDS, *PRESETS):
        assert f"| `{name}` |" in page


def test_the_picture_of_a_window_is_what_the_schedule_says():
    made = runpy.run_path(str(DOCS / "pictures" / "draw_window.py"))["draw"]()
    assert (DOCS / "pictures" / "window.svg").read_text(encoding="utf-8") == made, "run `make docs`"


def test_a_trace_is_drawn_row_by_row(tmp_path, monkeypatch):
    def event(category, name, begin, duration):
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration}

    events = [
        *(event("user_annotation", "step", 1000 * step, 1000) for step in range(2)),
        event("user_annotation", "Optimizer.step#ZenFlowAdamW.step", 900, 100),
        event("kernel", "void gemm<float>(int)", 0, 400),
        event("kernel", "void gemm<float>(int)", 400, 500),  # right behind the other: one bar
        event("kernel", "split_kernel", 500, 20),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 520, 100),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1500, 50),
        event("host", "window 3", 1000, 400),
        event("cpu_op", "aten::mm", 0, 10),
    ]
    trace, picture, kept = tmp_path / "trace.json", tmp_path / "trace.svg", tmp_path / "kept.json.gz"
    trace.write_text(json.dumps({"traceEvents": events}))
    monkeypatch.setattr("sys.argv", ["draw_trace.py", str(trace), str(picture), "--keep", str(kept)])
    runpy.run_path(str(DOCS / "pictures" / "draw_trace.py"), run_name="__main__")
    drawn = picture.read_text()
    assert re.findall(r"step \d: \d+ ms", drawn) == ["step 1: 1 ms", "step 2: 1 ms"]
    assert drawn.count("<rect x=") == 6, "one bar in each row"
    assert len(json.loads(gzip.decompress(kept.read_bytes()))["traceEvents"]) == len(events) - 1
