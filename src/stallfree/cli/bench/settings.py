"""The settings of a measurement: from flags, checked before anything is built."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from stallfree.cli.errors import UsageError
from stallfree.cli.flags import flag, setting

FILES = ("output", "trace")  # settings that say nothing of what is measured
OUTPUT_FILE = "step.json"  # in a directory given as --output


class BenchSettings(BaseModel):
    """What is measured. The flags and the docs are made from these fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = setting(
        "",
        "0.5b, 1.5b, 3b, 7b (shapes of Qwen2.5), `tiny`, or a directory with a config.json.",
        shown="1.5b on a GPU, else tiny",
    )
    batch: int = setting(4, "Sequences per step.", ge=1)
    seq: int = setting(1024, "Tokens per sequence.", ge=2)
    modes: list[str] = setting(
        [],
        "What to measure, see above; the floor always is.",
        metavar="MODE...",
        shown="adamw, stallfree, zero-offload, peers where they are installed",
    )
    rounds: int = setting(5, "Rounds, in each of which every mode takes its turn.", ge=1)
    steps: int = setting(40, "Measured steps of a mode per round.", ge=1)
    warm_up: int = setting(12, "Steps of each mode before the first round.", ge=1)
    peer_steps: int | None = setting(
        None, "Measured steps of another library per round: some take nine times as long.", shown="as --steps", ge=1
    )
    peer_warm_up: int | None = setting(None, "Steps of another library before the first round.", shown="as --warm-up", ge=1)
    apart: bool = setting(
        False,
        "One mode in memory at a time, the floor measured before and after each.",
        shown="where not all modes fit at once",
    )
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass.")
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16", "Type of weights and gradients.")
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "Where to train; auto: the GPU if there is one.")
    output: Path | None = setting(
        None, f"Write the numbers as JSON to FILE.json, or to DIR/{OUTPUT_FILE}.", metavar="DIR|FILE.json"
    )
    trace: Path | None = setting(
        None, "Afterwards, record a few steps of the first Stallfree mode as a Chrome trace.", metavar="FILE.json"
    )

    @field_validator("trace")
    @classmethod
    def _check_trace(cls, value: Path | None) -> Path | None:
        if value is not None and value.suffix != ".json":
            raise ValueError("should be a file whose name ends in .json")
        return value

    def of_peers(self) -> BenchSettings:
        """These, with the steps that other libraries take."""
        return self.model_copy(update={"steps": self.peer_steps or self.steps, "warm_up": self.peer_warm_up or self.warm_up})


def command_line(settings: BenchSettings) -> str:
    """The command that these settings stand for, but for where its files go."""
    words = ["stallfree", "bench", "step"]
    for name in BenchSettings.model_fields:
        value = getattr(settings, name)
        if name in FILES or value == BenchSettings.model_fields[name].default:
            continue
        words.append(flag(name))
        if not isinstance(value, bool):
            words += value if isinstance(value, list) else [str(value)]
    return shlex.join(words)


def output_file(output: Path | None) -> Path | None:
    """The file that `--output` names.

    Raises:
        UsageError: if it cannot be written there.
    """
    if output is None or output.suffix == ".json":
        return output
    if output.is_file():
        raise UsageError(f"output {output} is a file: give a directory, or a file whose name ends in .json")
    return output / OUTPUT_FILE
