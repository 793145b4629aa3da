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
value.
"""

METRICS = """
## Metrics

`optimizer.metrics()` waits for the device and returns numbers of the last step (`..._total`: since construction).

| key | meaning |
|---|---|
| `call`, `interval`, `warming_up` | steps so far, S, whether the warm-up goes on |
| `grad_norm` | before clipping by `max_grad_norm` |
| `skipped_steps` | steps skipped because the gradient norm was not finite |
| `rho`, `rho_by_kind` | share of squared gradient norm in deferred channels, over all weights and by kind of parameter |
| `retention`, `retention_by_kind` | share of the last selection that the one before had chosen too |
| `stall_ms`, `stall_ms_total` | time in which training (with `async_transfers` the device) waited for the host |
| `bytes_down`, `bytes_up`, `..._total` | bytes copied to the host and to the device |
| `host_bytes`, `device_bytes` | memory of the optimizer's state and slots |
| `restages` | backward passes that came after a gradient had been staged |
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
    return "\n".join(lines) + "\n" + METRICS


if __name__ == "__main__":
    (HERE / "configuration.md").write_text(configuration(), encoding="utf-8")
    runpy.run_path(str(HERE / "pictures" / "draw_window.py"), run_name="__main__")
