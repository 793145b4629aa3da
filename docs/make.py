"""Makes the parts of docs/ that come from the code: configuration.md from config.py, pictures/window.svg from the schedule."""

import ast
import dataclasses
import inspect
import runpy
from pathlib import Path

from stallfree import config as config_module
from stallfree.config import PRESETS, ZenFlowConfig

HERE = Path(__file__).parent
SHOWN = ("topk_ratio", "update_interval", "stagger", "lag", "rule", "lookahead", "overlap_step", "update_in_backward")
INTRO = """# Configuration

<!-- Made by `make docs` from src/stallfree/config.py. -->

Pass settings as keywords, `ZenFlowAdamW(params, lr=1e-5, update_interval=4)`, or as a `ZenFlowConfig`, which also reads and
writes dicts, JSON and YAML (`ZenFlowConfig.load("zenflow.yaml")`). It is frozen and checked at construction; an unknown name is
refused with the closest known one (by the optimizer, `from_dict` and `load`). A setting that you leave out takes its preset's
value; some that change nothing beside the others are named in a warning.
"""

AUTO = """
## `update_interval="auto"`

S is 1 during the warm-up and 2 after it. Then the optimizer measures: the time between two calls (the median of eight,
without stalls) and the host's time for a full update. It takes the smallest S with which the busiest call's part of it
fits 70% of a call: windows close at different calls, but not all calls have equally much to do (one with a large embedding, or
two of eight phases where S is 6, has more); if there is none, the S that leaves the least undone in a call. How
host time depends on S follows from bytes at first, and from measurements once S has had two values. Where a GPU has done
almost all it was given whenever a call ends, training is launch-bound, and the share is 35%: the host at work slows the
launching thread. S grows when calls stall, and shrinks only to one whose work fits with 25% to spare. It decides again, at
most every 64 calls, when a time has changed by more than 15%.

- `staleness_budget` bounds what that may cost: rho * (S + 1) / 2, a gradient's mean delay in calls, weighted by the share of
  the squared gradient norm that is deferred. At rho 0.2 the budget of 1.0 allows S up to 9, at rho 0.7 only S=1:
  it is a guard, and no promise about the loss. For that give `max_update_interval=2`.
- `max_update_interval`, if it is not given, is the largest of 8, 4 and 2 with which a tenth of the available host memory stays
  free, decided before anything is allocated. A resumed run keeps that of the run that saved.
- Every change is in `optimizer.interval_history`, with its reason, in checkpoints, and in the log
  (`logging.basicConfig(); logging.getLogger("stallfree").setLevel(logging.INFO)`). If no S hides the host's work, a warning
  says what would help.
- This is the only place where timing influences a result. To repeat a run bit for bit, take its settings and its record:
  `optimizer.config.replace(interval_schedule={change.call: change.interval for change in optimizer.interval_history})`.
- `optimizer.set_update_interval(n)` turns it off, and ends an `interval_schedule`; the log says so.
"""

METRICS = """
## Metrics

`optimizer.metrics()` waits for the device. Numbers are of the last step; `..._total` counts since this optimizer was built, and
these since training began, because checkpoints carry them on:

| key | meaning |
|---|---|
| `call`, `interval_changes` | steps so far, skipped ones included; how often S changed |
| `skipped_steps` | how many of them were skipped because the gradient norm was not finite |
| `last_skipped_call` | the call of the last of these, or `None` |
| `last_skipped_kinds` | kinds of parameters with gradients not finite in it; small ones of a dtype are named together |

The others:

| key | meaning |
|---|---|
| `interval`, `warming_up` | S, 1 during the warm-up (a block adopts another S at its next close); whether that goes on |
| `grad_norm` | before clipping by `max_grad_norm`; after `clip_grad_norm_`, if the loop calls it |
| `rho`, `rho_by_kind` | share of squared gradient norm in deferred channels, over all weights and by kind of parameter |
| `retention`, `retention_by_kind` | share of the last selection that the one before had chosen too |
| `stall_ms`, `stall_ms_total` | time in which training (on a GPU: the device) waited for the host |
| `crowding_ms`, `crowding_ms_total` | the part of that in which gradients waited for staging memory, on their way down |
| `host_ms_total`, `host_threads` | time in which the host worked on windows, and the threads of ours that work now |
| `bytes_down`, `bytes_up`, `..._total` | bytes copied to the host and to the device |
| `host_bytes`, `device_bytes` | memory of the optimizer's state and slots, without gradients that come and go |
| `restages`, `restages_total` | staged gradients that one more backward pass added to: in an accumulating loop at first |
| `reselections_total` | selections of blocks |
"""


def field_docs() -> dict[str, str]:
    """The string under each field of ZenFlowConfig."""
    tree = ast.parse(inspect.getsource(config_module))
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ZenFlowConfig")
    docs = {}
    for field, text in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def configuration() -> str:
    default = ZenFlowConfig()
    lines = [INTRO, "## Settings\n", "| setting | default | meaning |", "|---|---|---|"]
    docs = field_docs()
    for field in dataclasses.fields(ZenFlowConfig):
        value = getattr(default, field.name)
        lines.append(f"| `{field.name}` | `{value!r}` | {docs[field.name].replace('|', '/')} |")
    lines += ["", "## Presets\n", f"| preset | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    for name in PRESETS:
        preset = ZenFlowConfig(preset=name)
        lines.append(f"| `{name}` | {' | '.join(str(getattr(preset, column)) for column in SHOWN)} |")
    return "\n".join(lines) + "\n" + AUTO + METRICS


if __name__ == "__main__":
    (HERE / "configuration.md").write_text(configuration(), encoding="utf-8")
    runpy.run_path(str(HERE / "pictures" / "draw_window.py"), run_name="__main__")
