"""A settings model -> a typer command and a table for the docs. Flags are defined by the model's fields alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

# What a command line may ask for beside the settings of a run: name -> (kind, help).
ACTIONS: dict[str, tuple[type, str]] = {
    "config": (str, "YAML file with settings, named like the flags; flags win."),
    "resume": (bool, "Continue the interrupted run in --output, bit for bit; its settings are read from there."),
    "overwrite": (bool, "Start anew in a --output that is not empty."),
    "debug": (bool, "Show the traceback of an error."),
}


def typer_command(function: Callable[[dict[str, Any]], None], settings: type[BaseModel]) -> Callable[..., None]:
    """A command with one flag per field of `settings` and per action; `function` gets those that were given, as text."""

    def command(**flags: Any) -> None:
        flags.pop("debug")  # read by main(), which also sees errors in the flags
        function({name: value for name, value in flags.items() if value is not None})

    annotations = {name: _option(name, field) for name, field in settings.model_fields.items()}
    for name, (kind, text) in ACTIONS.items():
        option = typer.Option(flag(name), help=text, metavar="FILE" if kind is str else None)
        annotations[name] = Annotated[kind | None, option]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    command.__annotations__ = annotations
    command.__doc__ = function.__doc__
    return command


def flag(name: str) -> str:
    """The flag of a setting: `micro_batch` -> `--micro-batch`."""
    return "--" + name.replace("_", "-")


def markdown_table(settings: type[BaseModel]) -> str:
    """Every flag, its value, default and meaning."""
    rows = ["| flag | value | default | meaning |", "|---|---|---|---|"]
    for name, field in settings.model_fields.items():
        cells = [f"`{flag(name)}`", _metavar(field) or "", _default(field), field.description or ""]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    rows += [f"| `{flag(name)}` | {'FILE' if kind is str else ''} | | {text} |" for name, (kind, text) in ACTIONS.items()]
    return "\n".join(rows)


def _option(name: str, field: FieldInfo) -> Any:
    # Values stay text: the settings model checks flags and YAML alike, with one wording.
    switch = field.annotation is bool
    kind = bool if switch else list[str] if get_origin(field.annotation) is dict else str
    names = f"{flag(name)}/--no-{flag(name)[2:]}" if switch else flag(name)
    default = _default(field)
    text = f"{field.description} [default: {default}]" if default else field.description
    option = typer.Option(names, help=text, metavar=_metavar(field), show_default=False)
    return Annotated[kind | None, option]


def _extra(field: FieldInfo) -> dict[str, Any]:
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def _metavar(field: FieldInfo) -> str | None:
    given: str | None = _extra(field)["metavar"]
    if given is not None or field.annotation is bool:
        return given
    kinds = [field.annotation, *get_args(field.annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return "|".join(get_args(kind))
    return "INT" if int in kinds else "FLOAT" if float in kinds else "TEXT"


def _default(field: FieldInfo) -> str:
    if shown := _extra(field)["shown"]:
        return str(shown)
    if field.is_required() or field.default is None or field.default is False or field.default == {}:
        return ""
    return ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
