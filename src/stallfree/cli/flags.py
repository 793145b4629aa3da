"""A settings model -> a typer command and a table for the docs. Flags are defined by the model's fields alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from stallfree.cli.errors import UsageError

# What a command line may ask for beside the settings of a run: name -> (kind, help).
DEBUG: dict[str, tuple[type, str]] = {"debug": (bool, "Show the traceback of an error.")}
ACTIONS: dict[str, tuple[type, str]] = {
    "config": (str, "YAML file with settings, named like the flags; flags win."),
    "resume": (
        bool,
        "Continue the interrupted run in --output, bit for bit, with its settings; how it logs and saves may change.",
    ),
    "overwrite": (bool, "Start anew in a --output that is not empty."),
    **DEBUG,
}
Settings = TypeVar("Settings", bound=BaseModel)
WORDS = "words"  # the parameter that takes what stands behind a flag's first value


def setting(default: Any, text: str, *, metavar: str | None = None, shown: str = "", **limits: Any) -> Any:
    """A field of a settings model. `metavar`, `shown`: how the value and the default are written, where it is not plain."""
    extra: dict[str, Any] = {"metavar": metavar, "shown": shown}
    return Field(default, description=text, json_schema_extra=extra, **limits)


def typer_command(
    function: Callable[[dict[str, Any]], None],
    settings: type[BaseModel],
    actions: Mapping[str, tuple[type, str]] = ACTIONS,
    *,
    words: str | None = None,
) -> Callable[..., None]:
    """A command with one flag per field of `settings` and per action; `function` gets those that were given, as text.

    words: a field that holds a list and also takes words without a flag: `--modes floor adamw`.
    """

    def command(**flags: Any) -> None:
        if words is not None and (more := flags.pop(WORDS)):
            flags[words] = [*(flags[words] or []), *more]
        function({name: value for name, value in flags.items() if value is not None})

    annotations = {name: _option(name, field) for name, field in settings.model_fields.items()}
    for name, (kind, text) in actions.items():
        option = typer.Option(flag(name), help=text, metavar="FILE" if kind is str else None)
        annotations[name] = Annotated[kind | None, option]
    if words is not None:
        annotations[WORDS] = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="[MODE]...")]
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


def parse_value(text: Any) -> Any:
    """What the text of NAME=VALUE means. YAML alone reads 1e-3 as text."""
    for read in (int, float, yaml.safe_load):
        try:
            return read(text) if isinstance(text, str) else text
        except (ValueError, yaml.YAMLError):
            continue
    return text


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """(field, or "" for the settings together; what is wrong with it)."""
    first = error.errors()[0]
    return str(first["loc"][0]) if first["loc"] else "", first["msg"].removeprefix("Value error, ").removeprefix("Input ")


def validated(settings: type[Settings], given: Mapping[str, Any]) -> Settings:
    """Settings from what the command line gave.

    Raises:
        UsageError: for an impossible value.
    """
    try:
        return settings.model_validate(given)
    except ValidationError as error:
        name, reason = first_mistake(error)
        raise UsageError(f"{flag(name)} {given[name]}: {reason[0].lower()}{reason[1:]}") from None


def markdown_table(settings: type[BaseModel], actions: Mapping[str, tuple[type, str]] = ACTIONS) -> str:
    """Every flag, its value, default and meaning."""
    rows = ["| flag | value | default | meaning |", "|---|---|---|---|"]
    for name, field in settings.model_fields.items():
        cells = [f"`{flag(name)}`", _metavar(field) or "", _default(field), field.description or ""]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    rows += [f"| `{flag(name)}` | {'FILE' if kind is str else ''} | | {text} |" for name, (kind, text) in actions.items()]
    return "\n".join(rows)


def _option(name: str, field: FieldInfo) -> Any:
    # Values stay text: the settings model checks flags and YAML alike, with one wording.
    switch = field.annotation is bool
    kind = bool if switch else list[str] if get_origin(field.annotation) in (dict, list) else str
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
    if field.is_required() or field.default is None or field.default is False or field.default in ({}, []):
        return ""
    return ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
