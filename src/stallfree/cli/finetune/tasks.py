"""Built-in tasks: problems that reasoning-gym generates and scores."""

from __future__ import annotations

from typing import Any

from stallfree.cli.errors import UsageError, did_you_mean
from stallfree.cli.finetune.records import Chat

PREFIX = "builtin:"


class Task:
    """`size` problems of a reasoning-gym task; problem i depends on (seed, i) alone."""

    def __init__(self, name: str, size: int, seed: int) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise UsageError("built-in tasks come from reasoning-gym: pip install reasoning-gym") from None
        if name not in DATASETS:
            some = "; try chain_sum, spell_backward or word_sorting"
            raise UsageError(f"reasoning-gym has no task {name!r}{did_you_mean(name, DATASETS, or_else=some)}")
        self.name = name
        try:
            self._problems = reasoning_gym.create_dataset(name, size=size, seed=seed)
            self._entries = [self._problems[index] for index in range(size)]
        except Exception as error:  # each task checks its own settings in its own way
            raise UsageError(f"task {name} cannot be generated ({error}): choose another") from error

    def records(self, held_out: int) -> tuple[list[Chat], list[Chat]]:
        """(training, held out): the first `held_out` problems, and those of the others that ask something else.

        Raises:
            UsageError: if the task has problems without one written answer.
        """
        chats = [self._chat(index, entry) for index, entry in enumerate(self._entries)]
        asked = {entry["question"] for entry in self._entries[:held_out]}
        train = [chat for chat in chats[held_out:] if chat.messages[0]["content"] not in asked]
        if not train:
            raise UsageError(f"task {self.name} has too few different problems to hold {held_out} out: lower --eval-size")
        return train, chats[:held_out]

    def score(self, index: int, answer: str) -> float:
        """The task's own score, 0 to 1, of an answer to problem `index`."""
        return float(self._problems.score_answer(answer.strip(), self._entries[index]))

    def _chat(self, index: int, entry: dict[str, Any]) -> Chat:
        if not isinstance(entry["answer"], str) or not entry["answer"]:
            raise UsageError(f"task {self.name} has problems without one written answer to learn from: choose another")
        messages = [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": entry["answer"]}]
        return Chat(f"{PREFIX}{self.name}, problem {index}", messages)
