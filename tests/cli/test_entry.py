"""The entry point, before any command."""

import runpy
import sys

import pytest

from stallfree.cli import main


def test_without_its_libraries_the_command_says_what_to_install(monkeypatch, capsys):
    for module in [name for name in sys.modules if name.startswith("stallfree.cli.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["--version"]) == 2
    assert "stallfree[cli]" in capsys.readouterr().err


def test_python_m_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stallfree", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("stallfree", run_name="__main__")
    assert end.value.code == 0
    assert "stallfree" in capsys.readouterr().out
