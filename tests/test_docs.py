"""What docs/ takes from the code is up to date."""

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
