"""Time of a training step against its floor, forward and backward alone, on one GPU.

    python benchmarks/step.py --model 1.5b --batch 4 --modes floor adamw stallfree:update_interval=4

A mode is "floor", "adamw" (torch's fused AdamW on the GPU) or a preset with settings: PRESET[:NAME=VALUE,...]. Every mode has
a model of its own; rounds of steps alternate between the modes, so that other load on the machine hits all of them. Within a
round nothing synchronizes; a round's time is that of the whole round, and the times of single steps come from events on the
device.

Columns: mean ms per step over all rounds, its ratio to the floor's, p99 / mean of single steps, stall as the optimizer reports
it, bytes per parameter and step each way, host memory grown per parameter, device peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config

from stallfree import ZenFlowAdamW, channel_dims

SHAPES = {  # Qwen2.5: hidden, inner, layers, heads, key-value heads
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "3b": (2048, 11008, 36, 16, 2),
    "7b": (3584, 18944, 28, 28, 4),
}


def build_model(name: str) -> torch.nn.Module:
    hidden, inner, layers, heads, kv_heads = SHAPES[name]
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=name != "7b",
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    return model.train()


class Mode:
    """One way to train, with its own model and its times so far."""

    def __init__(self, spec: str, args: argparse.Namespace) -> None:
        self.spec = spec
        before = psutil.Process().memory_info().rss
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        self.model = build_model(args.model)
        self.parameters = sum(param.numel() for param in self.model.parameters())
        self.optimizer = self.build_optimizer()
        self.ids = torch.randint(0, 151936, (args.batch, args.seq), device="cuda")
        for _ in range(args.warm_up):
            self.step()
        torch.cuda.synchronize()
        self.device_peak = torch.cuda.max_memory_allocated() - allocated
        self.host_growth = psutil.Process().memory_info().rss - before
        self.seconds = 0.0
        self.single: list[float] = []

    def build_optimizer(self) -> torch.optim.Optimizer | None:
        preset, _, settings = self.spec.partition(":")
        if preset == "floor":
            return None
        if preset == "adamw":
            return torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        pairs = (item.split("=", 1) for item in settings.split(",") if item)
        overrides: dict[str, Any] = {"full_warm_up_rounds": 4} | {name: yaml.safe_load(value) for name, value in pairs}
        dims = channel_dims(self.model)
        return ZenFlowAdamW(self.model.named_parameters(), lr=1e-5, preset=preset, channel_dim=dims, **overrides)

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def round(self, steps: int) -> None:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.single += [first.elapsed_time(second) for first, second in pairwise(events)]

    def report(self) -> dict[str, Any]:
        mean = self.seconds * 1e3 / len(self.single)
        ordered = sorted(self.single)
        row = {
            "mode": self.spec,
            "mean_ms": round(mean, 2),
            "median_ms": round(ordered[len(ordered) // 2], 2),
            "p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))], 2),
            "steps": len(self.single),
            "host_bytes_per_parameter": round(self.host_growth / self.parameters, 2),
            "device_peak_GiB": round(self.device_peak / 2**30, 2),
        }
        if isinstance(self.optimizer, ZenFlowAdamW):
            metrics = self.optimizer.metrics()
            row |= {
                "stall_ms": round(metrics["stall_ms_total"] / metrics["call"], 2),
                "down_bytes_per_parameter": round(metrics["bytes_down_total"] / metrics["call"] / self.parameters, 3),
                "up_bytes_per_parameter": round(metrics["bytes_up_total"] / metrics["call"] / self.parameters, 3),
                "interval": metrics["interval"],
            }
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="1.5b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--modes", nargs="+", default=["floor", "adamw", "stallfree", "zero-offload"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of a mode in a round")
    parser.add_argument("--warm-up", type=int, default=12)
    parser.add_argument("--apart", action="store_true", help="one mode after the other, where all do not fit at once")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    groups = [[spec] for spec in args.modes] if args.apart else [args.modes]
    for specs in groups:
        modes = [Mode(spec, args) for spec in specs]
        for _ in range(args.rounds):
            for mode in modes:
                mode.round(args.steps)
        rows += [mode.report() for mode in modes]
        for mode in modes:
            if isinstance(mode.optimizer, ZenFlowAdamW):
                mode.optimizer.close()
        del modes
        gc.collect()
        torch.cuda.empty_cache()
    floor = next((row["mean_ms"] for row in rows if row["mode"] == "floor"), None)
    for row in rows:
        ratio = "" if floor is None else f"{row['mean_ms'] / floor:6.3f} x floor"
        print(
            f"{row['mode']:<40} {row['mean_ms']:8.1f} ms {ratio}  p99/mean {row['p99_ms'] / row['mean_ms']:.2f}  {row}",
            flush=True,
        )
    if args.output:
        environment = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": date.today().isoformat(),
            "arguments": {name: str(value) for name, value in vars(args).items() if name != "output"},
        }
        args.output.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
