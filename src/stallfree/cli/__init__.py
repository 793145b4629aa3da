"""The `stallfree` command."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point: `app.main`, or a sentence if the command's libraries are not installed."""
    try:
        from stallfree.cli.app import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "stallfree":
            raise
        print(
            f"error: the command needs {error.name}: pip install 'stallfree[cli]', or -e '.[cli]' in the sources",
            file=sys.stderr,
        )
        return 2
    return run(arguments)


__all__ = ["main"]
