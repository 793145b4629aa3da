"""The two tasks of the study, from reasoning-gym, as fixed-length token tensors with the loss on the answer only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": dict(min_terms=2, max_terms=3, min_digits=2, max_digits=3),
    "spell_backward": dict(min_word_len=4, max_word_len=9),
}
LENGTH = 40  # tokens of a sequence; longer ones are left out
PADDING = 2


def generate(name: str, tokenizer: Any, *, train: int, held_out: int, seed: int = 0) -> dict[str, Tensor]:
    """Questions without repetition, the held-out ones first. Returns what `Task` reads."""
    import reasoning_gym

    rows, starts, ends, seen = [], [], [], set()
    source = reasoning_gym.create_dataset(name, size=20 * (train + held_out), seed=seed, **TASKS[name])
    for item in source:
        if item["question"] in seen or len(rows) == train + held_out:
            continue
        seen.add(item["question"])
        prompt = tokenizer(f"<|im_start|>user\n{item['question']}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        row = prompt + tokenizer(f"{item['answer']}<|im_end|>")["input_ids"]
        if len(row) <= LENGTH:
            rows.append(row + [PADDING] * (LENGTH - len(row)))
            starts.append(len(prompt))
            ends.append(len(row))
    return dict(
        tokens=torch.tensor(rows, dtype=torch.int32),
        starts=torch.tensor(starts),
        ends=torch.tensor(ends),
        held_out=torch.tensor(held_out),
    )


class Task:
    """Sequences on a device: tokens [N, T]; positions [N, C] to predict from; labels [N, C], -100 beyond the answer."""

    def __init__(self, data: dict[str, Tensor], device: torch.device | str) -> None:
        tokens, starts, ends = data["tokens"].long(), data["starts"], data["ends"]
        steps = torch.arange(int((ends - starts).max()))
        positions = (starts[:, None] - 1 + steps).clamp(max=tokens.shape[1] - 2)
        labels = torch.where(starts[:, None] + steps < ends[:, None], tokens.gather(1, positions + 1), -100)
        self.held_out = int(data["held_out"])
        self.sequences = tuple(tensor.to(device) for tensor in (tokens, positions, labels))

    def order(self, seed: int, steps: int, batch: int) -> Tensor:
        """[steps, batch] training sequences; a seed is an order of the data."""
        generator = torch.Generator().manual_seed(1000 + seed)
        count = len(self.sequences[0]) - self.held_out
        epochs = -(-steps * batch // count)
        order = torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])
        return self.held_out + order[: steps * batch].view(steps, batch).to(self.sequences[0].device)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [*, T], positions [*, C], labels [*, C] of the sequences `index`."""
        tokens, positions, labels = (tensor[index] for tensor in self.sequences)
        return tokens, positions, labels
