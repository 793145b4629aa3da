"""The settings of a fine-tuning run: from flags and a YAML file, checked before anything else happens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from stallfree.cli.errors import UsageError, did_you_mean
from stallfree.cli.flags import ACTIONS, first_mistake, flag, parse_value, setting
from stallfree.config import FIELDS, PRESETS, ZenFlowConfig

SETTINGS_FILE = "settings.yaml"  # in the output directory: what --resume reads
MODEL_NAMES = ("smollm2-135m", "tiny")  # that need no directory
FREE = frozenset({"log_every", "save_every", "on_save_error"})  # of what is written: a resumed run may change them


class FinetuneSettings(BaseModel):
    """What a run is. The flags, the YAML keys and the docs are made from these fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = setting(..., "Directory in Transformers format, `smollm2-135m`, or `tiny` (random, for trying out).")
    data: str = setting(..., "Text file, JSONL file, or `builtin:TASK` with the name of a reasoning-gym task.")
    output: Path = setting(Path("finetuned"), "Directory for the model, its log and report.", metavar="DIR")

    lr: float = setting(2e-5, "Peak learning rate.", gt=0)
    schedule: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "Learning rate after the warm-up: down to zero along a cosine or a line, or constant."
    )
    warmup: float = setting(0.05, "Steps over which the learning rate rises; below 1: a share of all steps.", ge=0)
    steps: int | None = setting(None, "Optimizer steps.", ge=1)
    epochs: float | None = setting(None, "Passes over the data, instead of --steps.", shown="1", gt=0)
    micro_batch: int = setting(4, "Sequences per forward pass.", ge=1)
    accumulation: int = setting(1, "Forward passes per optimizer step.", ge=1)
    nproc: int | None = setting(
        None,
        "Processes (ranks) that share model and batch: one per GPU, or without GPUs on the CPU. The batch of a step is "
        "micro-batch x accumulation x nproc.",
        shown="one process, unsharded; under torchrun its ranks",
        ge=1,
    )
    seq_length: int = setting(512, "Tokens per sequence, at most; longer text is split, longer answers are cut.", ge=8)
    weight_decay: float = setting(0.01, "Of matrices; vectors (norms, biases) have none.", ge=0)
    betas: tuple[float, float] = setting((0.9, 0.999), "AdamW's decay rates.", metavar="FLOAT,FLOAT")
    eps: float = setting(1e-8, "AdamW's epsilon.", gt=0)
    max_grad_norm: float | None = setting(
        None, "Clip the gradient norm to this; 0: no clipping.", shown="1, or 0 where the preset cannot clip", ge=0
    )
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass: less memory, slower.")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Type of weights and gradients; auto: bfloat16 where the device computes it in hardware, else float32."
    )
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "Where to train; auto: the GPU if there is one.")
    seed: int = setting(0, "Of the data's order, of the tasks and of `tiny`.", ge=0, lt=2**31)

    preset: str = setting("stallfree", f"Row of optimizer settings: {', '.join(PRESETS)}.", metavar="NAME")
    set: dict[str, Any] = setting(
        {},
        "Any field of ZenFlowConfig over the preset; may be repeated.",
        metavar="NAME=VALUE",
    )

    examples: int = setting(2000, "Problems to generate for a `builtin:` task.", ge=2)
    eval_size: int | None = setting(None, "Sequences held out from training.", shown="a tenth of the data, at most 64", ge=1)
    eval_every: int | None = setting(
        None,
        "Steps between evaluations; 0: before and after only.",
        shown="a quarter of the steps",
        ge=0,
    )
    score_size: int = setting(32, "Held-out problems of a `builtin:` task to answer before and after; 0: none.", ge=0)
    sample_prompt: str | None = setting(
        None,
        "Prompt of the sample answers before and after.",
        shown="the first three held-out ones",
        min_length=1,
    )
    log_every: int | None = setting(
        None,
        "Steps between readings of rho, stall and the like: each makes a GPU wait. Loss and speed are logged at every step.",
        shown="10 on a GPU, else 1",
        ge=1,
    )
    save_every: int = setting(0, "Steps between checkpoints; 0: only when interrupted.", ge=0)
    on_save_error: Literal["stop", "continue"] = setting(
        "stop", "What to do when a checkpoint on the way cannot be written, as on a full disk. Older ones stay either way."
    )

    @property
    def batch(self) -> int:
        """Sequences per optimizer step, over all ranks that the run began with."""
        return self.micro_batch * self.accumulation * (self.nproc or 1)

    @property
    def clip(self) -> float | None:
        """The norm to clip to. Updates that begin during backward cannot know it: there, only an explicit value counts."""
        if self.max_grad_norm is None:
            return None if PRESETS.get(self.preset, {}).get("update_in_backward") else 1.0
        return self.max_grad_norm or None

    def decisive(self) -> dict[str, Any]:
        """Those that the rest of a run depends on, as they are saved. Data and tokenizer have a fingerprint instead."""
        return self.model_dump(mode="json", exclude={"model", "data", "output", "nproc", "device", *FREE})

    def eval_interval(self, steps: int) -> int:
        """Steps between evaluations in a run of `steps`; 0: before and after only."""
        return math.ceil(steps / 4) if self.eval_every is None else self.eval_every

    def log_interval(self, device: str) -> int:
        """Steps between readings of the optimizer's metrics."""
        return self.log_every or (1 if device == "cpu" else 10)

    def optimizer_config(self) -> ZenFlowConfig:
        """`preset` with `set` over it.

        Raises:
            ValueError: for an unknown field or an impossible value.
        """
        own: dict[str, Any] = {"preset": self.preset, "seed": self.seed, "max_grad_norm": self.clip}
        return ZenFlowConfig.from_dict(own | self.set)

    @model_validator(mode="after")
    def _check_optimizer(self) -> FinetuneSettings:
        try:
            self.optimizer_config()
        except TypeError as error:
            raise ValueError(str(error)) from None
        return self

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
        return {name: parse_value(text) for name, text in value.items()} if isinstance(value, dict) else value


def load_settings(given: Mapping[str, Any], *, resume: bool = False) -> FinetuneSettings:
    """Settings from what the command line gave (`config` names a YAML file beneath it), or from the run to resume.

    Raises:
        UsageError: for an unknown, impossible or missing setting, and for one that would change a run being resumed.
    """
    given = dict(given)
    file = given.pop("config", None)
    from_file = _read_yaml(Path(file)) if file else {}
    if given.keys() & {"steps", "epochs"}:  # either says how long to train
        from_file = {name: value for name, value in from_file.items() if name not in ("steps", "epochs")}
    if "set" in given:
        given["set"] = from_file.get("set", {}) | _assignments(given["set"])
    merged = from_file | given
    if resume:
        return _resumed(merged)
    settings = _validate(merged, file, from_file.keys() - given.keys())
    if settings.steps is not None and settings.epochs is not None:
        raise UsageError("--steps and --epochs both say how long to train: give one of them")
    return settings


def save_settings(settings: FinetuneSettings, directory: Path) -> None:
    """Write what `--resume` reads; a full disk leaves what was there."""
    text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
    path = directory / SETTINGS_FILE
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _resumed(given: dict[str, Any]) -> FinetuneSettings:
    directory = Path(given.get("output", FinetuneSettings.model_fields["output"].default))
    path = directory / SETTINGS_FILE
    if not path.is_file():
        raise UsageError(f"there is no run to resume in {directory}: give its directory as --output, or leave --resume out")
    given = {name: value for name, value in given.items() if name not in ("dtype", "device") or value != "auto"}  # decided then
    values = _read_yaml(path)
    saved = _validate(values | {"output": directory}, path, values.keys())
    asked = _validate(saved.model_dump() | given | {"set": saved.set | given.get("set", {})})
    if saved.nproc is None and asked.nproc is not None:
        raise UsageError(f"the run in {directory} began as one process, and can go on as that only: leave --nproc out")
    # Any number of ranks can go on, with the batch of the number that is saved.
    for name in FinetuneSettings.model_fields:
        if name not in {*FREE, "nproc"} and getattr(saved, name) != getattr(asked, name):
            raise UsageError(
                f"{flag(name)} was {getattr(saved, name)} in the run in {directory}, not {getattr(asked, name)}: "
                f"leave it out, or start anew with --overwrite instead of --resume"
            )
    return saved.model_copy(update={name: getattr(asked, name) for name in FREE})


def _validate(
    values: Mapping[str, Any], file: str | Path | None = None, from_file: AbstractSet[str] = frozenset()
) -> FinetuneSettings:
    """`from_file`: names whose values come from `file` alone, for the error."""
    try:
        return FinetuneSettings.model_validate(values)
    except ValidationError as error:
        name, reason = first_mistake(error)
        if not name:
            place = f"{file}: preset, set" if from_file & {"preset", "set"} else "--preset, --set"
            raise UsageError(f"optimizer settings ({place}): {reason}") from None
        if name not in values:
            raise UsageError(f"{flag(name)} is missing: {FinetuneSettings.model_fields[name].description}") from None
        place = f"{file}: {name}" if name in from_file else flag(name)
        raise UsageError(f"{place} {values[name]}: {reason[0].lower()}{reason[1:]}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{path} is not a file: give a YAML file with settings as --config")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not isinstance(values.get("set", {}), dict):
        raise UsageError(f"{path} holds no settings: write lines like 'lr: 2e-5' or 'set: {{topk_ratio: 0.2}}'")
    values = {str(name).replace("-", "_"): value for name, value in values.items()}
    for name in values:
        if name in ACTIONS:
            raise UsageError(f"{path}: {name} belongs on the command line, as {flag(name)}")
        if name not in FinetuneSettings.model_fields:
            hint = did_you_mean(name, FinetuneSettings.model_fields, or_else="; see stallfree finetune --help")
            raise UsageError(f"{path}: there is no setting {name!r}{hint}")
    for name, value in values.get("set", {}).items():
        _check_assignment(f"{path}: {name}: {value} in set", str(name))
    return {name: value for name, value in values.items() if value is not None}


def _assignments(texts: list[str]) -> dict[str, str]:
    """`["topk_ratio=0.2"]` -> `{"topk_ratio": "0.2"}`."""
    for text in texts:
        if "=" not in text:
            raise UsageError(f"--set {text}: write NAME=VALUE, as in --set topk_ratio=0.2")
        if text.count("=") > 1:
            raise UsageError(f"--set {text}: write --set for each, as in --set topk_ratio=0.2 --set update_interval=4")
    pairs = dict(text.split("=", 1) for text in texts)
    for name, value in pairs.items():
        _check_assignment(f"--set {name}={value}", name)
    return pairs


def _check_assignment(where: str, name: str) -> None:
    """Refuse what is no field of ZenFlowConfig where a better name is known; ZenFlowConfig itself refuses the rest."""
    own = {"preset", "seed", "max_grad_norm"} | (FinetuneSettings.model_fields.keys() - set(FIELDS))
    if name in own:
        raise UsageError(f"{where}: this one is a flag of its own, {flag(name)}")
    if name not in FIELDS and (hint := did_you_mean(name, FIELDS)):
        raise UsageError(f"{where}: ZenFlowConfig has no setting {name!r}{hint}")
