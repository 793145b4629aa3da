"""Held-out loss, the task's score and a sample answer, all with exact weights, and none of it changing the training."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stallfree.cli.finetune.batches import IGNORE, Batch, collate
from stallfree.cli.finetune.data import Data
from stallfree.cli.finetune.settings import FinetuneSettings

SCORE_SECONDS = 60.0  # after which scoring before the training starts no further batch
SCORE_BATCH = 16
ANSWER_SLACK = 8  # tokens beyond the longest held-out answer before an answer is cut off
ANSWER_MOST, SAMPLE_TOKENS = 256, 64


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one evaluation saw."""

    step: int
    loss: float  # mean over the held-out learned tokens
    score: float | None = None  # mean of the task's own score over `scored` problems
    scored: int | None = None
    sample: str | None = None  # answer to the sample prompt

    def record(self) -> dict[str, Any]:
        return {"kind": "eval"} | {name: value for name, value in asdict(self).items() if value is not None}


def token_losses(model: Any, batch: Batch) -> Tensor:
    """Sum of the cross entropies of a batch's learned tokens, fp32 scalar. Logits exist only where something is learned."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=batch.columns).logits
    else:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, batch.columns]
    return F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")


class Evaluator:
    """Evaluates one model on the held-out part of its data."""

    def __init__(
        self, model: Any, tokenizer: Any, data: Data, settings: FinetuneSettings, check_stop: Callable[[], None]
    ) -> None:
        self._model, self._tokenizer, self._data, self._settings = model, tokenizer, data, settings
        self._check_stop = check_stop  # raises when a stop was requested; called between batches
        by_length = sorted(data.held_out, key=lambda example: len(example.ids))  # little padding
        size = settings.micro_batch
        self._batches = [collate(by_length[i : i + size], tokenizer.pad_token_id) for i in range(0, len(by_length), size)]
        self.sample_prompt = self._encode_sample_prompt()

    @torch.no_grad()
    def evaluate(self, step: int, *, answers: bool, scored_before: int | None) -> Evaluation:
        """Loss; with `answers`, score and sample too. `scored_before`: how many problems the earlier scoring had time for."""
        self._model.eval()
        try:
            loss = self._loss()
            if not answers:
                return Evaluation(step, loss)
            score, scored = self._score(scored_before)
            return Evaluation(step, loss, score, scored, self._answers([self.sample_prompt], SAMPLE_TOKENS)[0])
        finally:
            self._model.train()

    def prompt_text(self) -> str:
        """The sample prompt in words."""
        given = self._settings.sample_prompt or self._data.held_out[0].question
        return given or str(self._tokenizer.decode(self.sample_prompt, skip_special_tokens=True))

    def expected_text(self) -> str | None:
        """What the data itself answers to the sample prompt."""
        if self._settings.sample_prompt is not None:
            return None
        example = self._data.held_out[0]
        answer = example.ids[len(example.prompt) :][:SAMPLE_TOKENS]
        return str(self._tokenizer.decode(answer, skip_special_tokens=True))

    def _loss(self) -> float:
        total, count = 0.0, 0
        for batch in self._batches:
            self._check_stop()
            total += float(token_losses(self._model, batch.to(self._model.device)))
            count += batch.learned
        return total / count

    def _score(self, scored_before: int | None) -> tuple[float | None, int | None]:
        task = self._data.task
        size = min(self._settings.score_size, len(self._data.held_out)) if scored_before is None else scored_before
        if task is None or not size:
            return None, None
        answer_tokens = max(int(example.learned.sum()) for example in self._data.held_out[:size]) + ANSWER_SLACK
        scores: list[float] = []
        begun = time.monotonic()
        for start in range(0, size, SCORE_BATCH):
            if scores and scored_before is None and time.monotonic() - begun > SCORE_SECONDS:
                break
            prompts = [example.prompt for example in self._data.held_out[start : min(start + SCORE_BATCH, size)]]
            answers = self._answers(prompts, min(answer_tokens, ANSWER_MOST))
            scores += [task.score(start + place, answer) for place, answer in enumerate(answers)]
        return sum(scores) / len(scores), len(scores)

    def _answers(self, prompts: Sequence[Tensor], max_new_tokens: int) -> list[str]:
        """Greedy continuations, without special tokens."""
        self._check_stop()
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self._tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        device = self._model.device
        out = self._model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._model.generation_config.eos_token_id or self._tokenizer.eos_token_id,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        return list(self._tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True))

    def _encode_sample_prompt(self) -> Tensor:
        text = self._settings.sample_prompt
        if text is None:
            return self._data.held_out[0].prompt
        if self._data.chats:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            return torch.tensor(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return torch.tensor(self._tokenizer(text)["input_ids"])
