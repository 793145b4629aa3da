"""The entry point, before any command."""

import sys

from stallfree.cli import main


def test_without_its_libraries_the_command_says_what_to_install(monkeypatch, capsys):
    for module in [name for name in sys.modules if name.startswith("stallfree.cli.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["--version"]) == 2
    assert "stallfree[cli]" in capsys.readouterr().err
