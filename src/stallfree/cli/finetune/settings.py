"""The settings of a fine-tuning run: from flags and a YAML file, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from stallfree.cli.errors import UsageError, did_you_mean
from stallfree.cli.flags import ACTIONS, flag
from stallfree.config import PRESETS

SETTINGS_FILE = "settings.yaml"  # in the output directory: what --resume reads
MODEL_NAMES = ("smollm2-135m", "tiny")  # that need no directory


def _setting(default: Any, text: str, panel: str, *, metavar: str | None = None, shown: str = "", **limits: Any) -> Any:
    extra: dict[str, Any] = {"panel": panel, "metavar": metavar, "shown": shown}
    return Field(default, description=text, json_schema_extra=extra, **limits)


class FinetuneSettings(BaseModel):
    """What a run is. The flags, the YAML keys and the docs are made from these fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = _setting(..., "Directory in Transformers format, `smollm2-135m`, or `tiny` (random, for trying out).", "What")
    data: str = _setting(..., "Text file, JSONL file, or `builtin:TASK` with the name of a reasoning-gym task.", "What")
    output: Path = _setting(Path("finetuned"), "Directory for the model, its log and report.", "What", metavar="DIR")

    lr: float = _setting(2e-5, "Peak learning rate.", "Training", gt=0)
    schedule: Literal["cosine", "linear", "constant"] = _setting(
        "cosine", "Learning rate after the warm-up: down to zero along a cosine or a line, or constant.", "Training"
    )
    warmup: float = _setting(0.05, "Steps over which the learning rate rises; below 1: a share of all steps.", "Training", ge=0)
    steps: int | None = _setting(None, "Optimizer steps.", "Training", ge=1)
    epochs: float | None = _setting(None, "Passes over the data, instead of --steps.", "Training", shown="1", gt=0)
    micro_batch: int = _setting(4, "Sequences per forward pass.", "Training", ge=1)
    accumulation: int = _setting(1, "Forward passes per optimizer step.", "Training", ge=1)
    seq_length: int = _setting(
        512, "Tokens per sequence, at most; longer text is split, longer answers are cut.", "Training", ge=8
    )
    weight_decay: float = _setting(0.01, "Of matrices; vectors (norms, biases) have none.", "Training", ge=0)
    betas: tuple[float, float] = _setting((0.9, 0.999), "AdamW's decay rates.", "Training", metavar="FLOAT,FLOAT")
    eps: float = _setting(1e-8, "AdamW's epsilon.", "Training", gt=0)
    max_grad_norm: float | None = _setting(
        None, "Clip the gradient norm to this; 0: no clipping.", "Training", shown="1, or 0 where the preset cannot clip", ge=0
    )
    gradient_checkpointing: bool = _setting(
        False, "Recompute activations in the backward pass: less memory, slower.", "Training"
    )
    dtype: Literal["float32", "bfloat16"] | None = _setting(
        None, "Type of weights and gradients.", "Training", shown="bfloat16 on a GPU, else float32"
    )
    device: Literal["cpu", "cuda"] | None = _setting(None, "Where to train.", "Training", shown="the GPU if there is one")
    seed: int = _setting(0, "Of the data's order, of the tasks and of `tiny`.", "Training", ge=0, lt=2**31)

    preset: str = _setting("stallfree", f"Row of optimizer settings: {', '.join(PRESETS)}.", "Optimizer", metavar="NAME")
    set: dict[str, Any] = _setting(
        {},
        "Any field of ZenFlowConfig over the preset; may be repeated.",
        "Optimizer",
        metavar="NAME=VALUE",
    )

    examples: int = _setting(2000, "Problems to generate for a `builtin:` task.", "Data and evaluation", ge=2)
    eval_size: int | None = _setting(
        None, "Sequences held out from training.", "Data and evaluation", shown="a tenth of the data, at most 64", ge=1
    )
    eval_every: int | None = _setting(
        None,
        "Steps between evaluations; 0: before and after only.",
        "Data and evaluation",
        shown="a quarter of the steps",
        ge=0,
    )
    score_size: int = _setting(
        32, "Held-out problems of a `builtin:` task to answer before and after; 0: none.", "Data and evaluation", ge=0
    )
    sample_prompt: str | None = _setting(
        None,
        "Prompt of the sample answers before and after.",
        "Data and evaluation",
        shown="the first held-out one",
        min_length=1,
    )
    log_every: int | None = _setting(
        None,
        "Steps between readings of rho, stall and the like: each makes a GPU wait. Loss and speed are logged at every step.",
        "Data and evaluation",
        shown="10 on a GPU, else 1",
        ge=1,
    )
    save_every: int = _setting(0, "Steps between checkpoints; 0: only when interrupted.", "Data and evaluation", ge=0)

    @property
    def clip(self) -> float | None:
        """The norm to clip to. Updates that begin during backward cannot know it: there, only an explicit value counts."""
        if self.max_grad_norm is None:
            return None if PRESETS.get(self.preset, {}).get("update_in_backward") else 1.0
        return self.max_grad_norm or None

    @field_validator("model", "data")
    @classmethod
    def _make_absolute(cls, value: str) -> str:
        """A run can be resumed from elsewhere."""
        return str(Path(value).absolute()) if value not in MODEL_NAMES and Path(value).exists() else value

    @field_validator("betas", mode="before")
    @classmethod
    def _split_betas(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both must be at least 0 and less than 1")
        return value

    @field_validator("set", mode="before")
    @classmethod
    def _parse_values(cls, value: Any) -> Any:
        return {name: _value(text) for name, text in value.items()} if isinstance(value, dict) else value


def load_settings(given: Mapping[str, Any], *, resume: bool = False) -> FinetuneSettings:
    """Settings from what the command line gave (`config` names a YAML file beneath it), or from the run to resume.

    Raises:
        UsageError: for an unknown, impossible or missing setting, and for one that would change a run being resumed.
    """
    given = dict(given)
    file = given.pop("config", None)
    merged = _read_yaml(Path(file)) if file else {}
    if "set" in given:
        given["set"] = merged.get("set", {}) | _assignments(given["set"])
    merged |= given
    if resume:
        return _resumed(merged)
    settings = _validate(merged)
    if settings.steps is not None and settings.epochs is not None:
        raise UsageError("--steps and --epochs both say how long to train: give one of them")
    return settings


def save_settings(settings: FinetuneSettings, directory: Path) -> None:
    """Write what `--resume` reads."""
    text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
    (directory / SETTINGS_FILE).write_text(text, encoding="utf-8")


def _resumed(given: dict[str, Any]) -> FinetuneSettings:
    directory = Path(given.get("output", FinetuneSettings.model_fields["output"].default))
    path = directory / SETTINGS_FILE
    if not path.is_file():
        raise UsageError(f"there is no run to resume in {directory}: give its directory as --output, or leave --resume out")
    saved = _validate(_read_yaml(path) | {"output": directory})
    asked = _validate(saved.model_dump() | given | {"set": saved.set | given.get("set", {})})
    for name in FinetuneSettings.model_fields:
        if getattr(saved, name) != getattr(asked, name):
            raise UsageError(
                f"{flag(name)} was {getattr(saved, name)} in the run in {directory}, not {getattr(asked, name)}: "
                f"leave it out, or start anew with --overwrite instead of --resume"
            )
    return saved


def _validate(values: Mapping[str, Any]) -> FinetuneSettings:
    try:
        return FinetuneSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "missing":
            raise UsageError(f"{flag(name)} is missing: {FinetuneSettings.model_fields[name].description}") from None
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise UsageError(f"{flag(name)} {values[name]}: {reason[0].lower()}{reason[1:]}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{path} is not a file: give a YAML file with settings as --config")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not isinstance(values.get("set", {}), dict):
        raise UsageError(f"{path} holds no settings: write lines like 'lr: 2e-5' or 'set: {{topk_ratio: 0.2}}'")
    values = {str(name).replace("-", "_"): value for name, value in values.items()}
    for name in values:
        if name in ACTIONS:
            raise UsageError(f"{path}: {name} belongs on the command line, as {flag(name)}")
        if name not in FinetuneSettings.model_fields:
            known = FinetuneSettings.model_fields
            raise UsageError(
                f"{path}: there is no setting {name!r}{did_you_mean(name, known, or_else='; see stallfree finetune --help')}"
            )
    return {name: value for name, value in values.items() if value is not None}


def _assignments(texts: list[str]) -> dict[str, str]:
    """`["topk_ratio=0.2"]` -> `{"topk_ratio": "0.2"}`."""
    if bad := [text for text in texts if "=" not in text]:
        raise UsageError(f"--set {bad[0]}: write NAME=VALUE, as in --set topk_ratio=0.2")
    return dict(text.split("=", 1) for text in texts)


def _value(text: Any) -> Any:
    """What a setting's text means. YAML alone reads 1e-3 as text."""
    for read in (int, float, yaml.safe_load):
        try:
            return read(text) if isinstance(text, str) else text
        except (ValueError, yaml.YAMLError):
            continue
    return text
