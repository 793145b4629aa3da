"""What a person sees of a run on a terminal."""

import io
import re

import pytest
from rich.console import Console

from stallfree.cli.finetune.display import BAR_FROM, Display


@pytest.mark.parametrize("width", [80, BAR_FROM])
@pytest.mark.parametrize(("warming_up", "share"), [(True, "warm-up"), (False, "rho 0.123")])
def test_numbers_are_whole_where_the_terminal_is_narrow(width, warming_up, share):
    """And there is a bar where it is not."""
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=True, soft_wrap=True, markup=False)
    record = dict(step=12345, loss=1.23456, tokens=17000, seconds=1.0, rho=0.123, stall_ms=123.0, warming_up=warming_up)
    with Display(20000, console) as display:
        display.step(record)
    lines = re.sub("\x1b.*?[A-Za-z]", "", shown.getvalue()).splitlines()
    last = next(line for line in reversed(lines) if "loss" in line)
    assert f"12345/20000 loss 1.2346  17,000 tok/s  {share}  stall 123 ms" in last
    assert len(last) <= width
    assert ("━" in last) is (width >= BAR_FROM)
