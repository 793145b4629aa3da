"""The entry point: commands, and how their errors reach the terminal.

Heavy imports (transformers, reasoning-gym) happen inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape

from stallfree import __version__
from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.errors import OTHER_NAMES, UsageError, did_you_mean
from stallfree.cli.finetune.settings import FinetuneSettings, load_settings
from stallfree.cli.flags import ACTIONS, DEBUG, flag, typer_command, validated
from stallfree.cli.plan import PlanSettings, make_plan
from stallfree.config import FIELDS

EXIT_USAGE = 2
OTHERS: dict[str, tuple[str, type[BaseModel]]] = {"plan": ("plan", PlanSettings), "step": ("bench step", BenchSettings)}

# Rich would cut long names off at 80 columns.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stallfree {__version__}")
        raise typer.Exit


@app.callback()
def stallfree(
    version: Annotated[
        bool | None, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = None,
) -> None:
    """Train models whose optimizer state does not fit on the GPU, without letting the GPU wait."""


class StartRanks(Exception):
    """The command is to run as several ranks, which are to be started."""

    def __init__(self, count: int) -> None:
        self.count = count


def finetune(given: dict[str, Any]) -> None:
    """Fine-tune a causal language model on a text file, a JSONL file or a built-in task."""
    from stallfree.cli.finetune.ranks import joined

    resume, overwrite, debug = (given.pop(name, False) for name in ("resume", "overwrite", "debug"))
    with joined(silence=not debug) as ranks:
        settings = load_settings(given, resume=resume)
        if settings.nproc and not ranks.sharded:
            raise StartRanks(int(given.get("nproc", settings.nproc)))
        from stallfree.cli.finetune.run import finetune as run

        raise typer.Exit(run(settings, ranks, resume=resume, overwrite=overwrite))


def bench_step(given: dict[str, Any]) -> None:
    """Time of a training step against its floor, forward and backward alone.

    A mode is `floor`, `adamw` (torch's, on the device), a preset with settings (stallfree:update_interval=4,topk_ratio=0.2),
    `idle-host:update_interval=4` (the same without the host's work), or another library: `deepspeed-zenflow`,
    `deepspeed-zero-offload`, `torchao`. docs/bench.md says how to read the numbers.
    """
    from stallfree.cli.bench.run import bench_step as run

    given.pop("debug", None)  # read by main(), which also sees errors in the flags
    raise typer.Exit(run(validated(BenchSettings, given)))


def plan(given: dict[str, Any]) -> None:
    """GPU and host memory that a model will need, and what a step moves, by settings. Needs neither memory nor GPU.

    A mode is a preset with settings: stallfree:update_interval=4,moments_dtype=bfloat16. docs/plan.md has an example.
    """
    given.pop("debug", None)  # read by main(), which also sees errors in the flags
    raise typer.Exit(make_plan(validated(PlanSettings, given)))


def bench(context: typer.Context) -> None:
    """Measure this machine."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)


app.command("finetune")(typer_command(finetune, FinetuneSettings))
app.command("plan")(typer_command(plan, PlanSettings, DEBUG, words="modes"))
benchmarks = typer.Typer(add_completion=False, rich_markup_mode=None, callback=bench, invoke_without_command=True)
benchmarks.command("step")(typer_command(bench_step, BenchSettings, DEBUG, words="modes"))
app.add_typer(benchmarks, name="bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for a mistake in the input, 128 + n after signal n."""
    # Nothing is ever fetched: a model or tokenizer is local or it is refused. Read when the libraries are imported.
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(arguments or ["--help"], standalone_mode=False) or 0
        return code if arguments else EXIT_USAGE
    except StartRanks as wanted:
        from stallfree.cli.finetune.launch import launch

        return launch(wanted.count, arguments)
    except (UsageError, OSError) as error:
        if "--debug" in arguments:
            raise
        return _report(_sentence(error))
    except typer.Abort:  # Ctrl-C before there is anything to save
        return 128 + signal.SIGINT
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a flag that typer refused
            return _report(_unknown_flag(error) or error.format_message())
        raise


def _unknown_flag(error: Any) -> str:
    given = getattr(error, "option_name", None)
    if given is None or not hasattr(error, "possibilities"):
        return ""
    if (name := getattr(error.ctx, "info_name", None)) in OTHERS:
        command, settings = OTHERS[name]
        known = [flag(name) for name in (*settings.model_fields, *DEBUG)]
        return f"there is no flag {given}{did_you_mean(given, known, or_else=f'; see stallfree {command} --help')}"
    field = given.lstrip("-").replace("-", "_")
    meant = OTHER_NAMES.get(field, field)
    if meant in FIELDS and meant not in FinetuneSettings.model_fields:
        return f"there is no flag {given}; did you mean --set {meant}=...?"
    known = [flag(name) for name in (*FinetuneSettings.model_fields, *ACTIONS)]
    return f"there is no flag {given}{did_you_mean(given, known, or_else='; see stallfree finetune --help')}"


def _sentence(error: UsageError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _report(message: str) -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(message)}")
    return EXIT_USAGE
