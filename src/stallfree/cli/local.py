"""What Transformers reads for us: from the disk alone, and never code."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stallfree.cli.errors import UsageError

ONLY_FILES = {"local_files_only": True, "trust_remote_code": False}  # unset, it would ask whether to run a model's own code


def read(what: str, path: Path, load: Callable[..., Any], **options: Any) -> Any:
    """`load(path)`, as `AutoModel.from_pretrained`.

    Raises:
        UsageError: whatever is wrong with what is there.
    """
    try:
        return load(path, **ONLY_FILES, **options)
    except Exception as error:  # transformers, safetensors and tokenizers each have their own
        if "trust_remote_code" in str(error):
            why = "has code of its own, which is never run: take one that Transformers knows"
            raise UsageError(f"the {what} in {path} {why}") from error
        raise UsageError(f"the {what} in {path} cannot be loaded ({type(error).__name__}: {shortened(error)})") from error


def shortened(error: Exception) -> str:
    """Its message on one line, as far as anybody reads it."""
    return textwrap.shorten(str(error), 300, placeholder=" ...")


def how_to_fetch(name: str, files: str = "") -> str:
    """The end of a refusal, where a name looks like one of a hub's."""
    what = f"{name} {files}".rstrip()
    return f"; to use one from a hub, download it first (hf download {what} --local-dir DIR)" if name.count("/") == 1 else ""
