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
from stallfree.cli.finetune.encode import Example
from stallfree.cli.finetune.ranks import Ranks
from stallfree.cli.finetune.settings import FinetuneSettings
from stallfree.cli.finetune.sharding import drop_gathered

SCORE_SECONDS = 60.0  # after which scoring before the training starts no further batch
SCORE_BATCH = 16
ANSWER_SLACK = 8  # tokens beyond the longest held-out answer before an answer is cut off
ANSWER_MOST, SAMPLE_TOKENS = 256, 64
SAMPLES = 3  # of the held-out prompts


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one evaluation saw."""

    step: int
    loss: float  # mean over the held-out learned tokens
    score: float | None = None  # mean of the task's own score over `scored` problems
    scored: int | None = None
    solved: int | None = None  # problems with the full score
    samples: list[str] | None = None  # answers to the sample prompts
    sample_scores: list[float] | None = None  # the task's own, where the prompts are its problems

    def record(self) -> dict[str, Any]:
        return {"kind": "eval"} | {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked for a sample answer."""

    ids: Tensor  # int64 [length]
    text: str
    expected: str | None  # what the data itself answers; None: not from the data


def token_losses(model: Any, batch: Batch) -> Tensor:
    """Sum of the cross entropies of a batch's learned tokens, fp32 scalar. Logits exist only where something is learned."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=batch.columns).logits
    else:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, batch.columns]
    return F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")


class Evaluator:
    """Evaluates one model on the held-out part of its data.

    Ranks share the batches of the loss. Answers they write together, all the same ones: a forward pass needs every shard.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        data: Data,
        settings: FinetuneSettings,
        check_stop: Callable[[], None],
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._model, self._tokenizer, self._data, self._settings = model, tokenizer, data, settings
        self._check_stop = check_stop  # raises when a stop was requested; called between batches
        by_length = sorted(data.held_out, key=lambda example: len(example.ids))  # little padding
        size = settings.micro_batch
        self._batches = [collate(by_length[i : i + size], tokenizer.pad_token_id) for i in range(0, len(by_length), size)]
        self.prompts = self._sample_prompts()

    def evaluate(self, step: int, *, answers: bool, scored_before: int | None) -> Evaluation:
        """Loss; with `answers`, score and samples too. `scored_before`: how many problems the earlier scoring had time for."""
        return self._ranks.same(self._evaluation(step, answers, scored_before))

    @torch.no_grad()
    def _evaluation(self, step: int, answers: bool, scored_before: int | None) -> Evaluation:
        self._model.eval()
        try:
            loss = self._loss()
            if not answers:
                return Evaluation(step, loss)
            answered, scores = self._score(scored_before)
            samples, sample_scores = self._samples(answered)
            if not scores:
                return Evaluation(step, loss, samples=samples, sample_scores=sample_scores)
            solved = sum(score >= 1 for score in scores)
            return Evaluation(step, loss, sum(scores) / len(scores), len(scores), solved, samples, sample_scores)
        finally:
            drop_gathered(self._model)
            self._model.train()

    def _loss(self) -> float:
        total, count, world = 0.0, 0, self._ranks.world
        for first in range(0, len(self._batches), world):
            self._check_stop()
            mine = first + self._ranks.rank
            batch = self._batches[min(mine, len(self._batches) - 1)]  # one too many, rather than none: all pass forward
            loss = float(token_losses(self._model, batch.to(self._model.device)))
            if mine < len(self._batches):
                total, count = total + loss, count + batch.learned
        total, counted = self._ranks.total(total, count)
        return total / counted

    def _score(self, scored_before: int | None) -> tuple[list[str], list[float]]:
        """Answers to the first held-out problems and their scores; empty without a task."""
        task = self._data.task
        size = min(self._settings.score_size, len(self._data.held_out)) if scored_before is None else scored_before
        answers: list[str] = []
        scores: list[float] = []
        if task is None:
            return answers, scores
        begun = time.monotonic()
        for start in range(0, size, SCORE_BATCH):
            late = self._ranks.same(scored_before is None and time.monotonic() - begun > SCORE_SECONDS)
            if scores and late:
                break
            prompts = [example.prompt for example in self._data.held_out[start : min(start + SCORE_BATCH, size)]]
            answers += self._answers(prompts, self._answer_tokens(size))
            scores += [task.score(start + place, answer) for place, answer in enumerate(answers[start:])]
        return answers, scores

    def _samples(self, scored: list[str]) -> tuple[list[str], list[float] | None]:
        """Answers to the sample prompts, taken from those that were scored where these suffice."""
        task = self._data.task if self._settings.sample_prompt is None else None
        if task is not None and len(scored) >= len(self.prompts):
            samples = scored[: len(self.prompts)]
        else:
            tokens = SAMPLE_TOKENS if task is None else self._answer_tokens(len(self.prompts))
            samples = self._answers([prompt.ids for prompt in self.prompts], tokens)
        return samples, None if task is None else [task.score(place, answer) for place, answer in enumerate(samples)]

    def _answer_tokens(self, size: int) -> int:
        longest = max(int(example.learned.sum()) for example in self._data.held_out[:size])
        return min(longest + ANSWER_SLACK, ANSWER_MOST)

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
            synced_gpus=self._ranks.world > 1,  # whoever rounds otherwise and has its answer earlier waits for the others
            max_new_tokens=max_new_tokens,
            eos_token_id=self._model.generation_config.eos_token_id or self._tokenizer.eos_token_id,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        return list(self._tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True))

    def _sample_prompts(self) -> list[Prompt]:
        text = self._settings.sample_prompt
        if text is None:
            return [self._held_out_prompt(example) for example in self._data.held_out[:SAMPLES]]
        if self._data.chats:
            message = [{"role": "user", "content": text}]
            written = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids = self._tokenizer(written, add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer(text)["input_ids"]
        return [Prompt(torch.tensor(ids), text, None)]

    def _held_out_prompt(self, example: Example) -> Prompt:
        text = example.question or self._words(example.prompt)
        return Prompt(example.prompt, text, self._words(example.ids[len(example.prompt) :][:SAMPLE_TOKENS]))

    def _words(self, ids: Tensor) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
