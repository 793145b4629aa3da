"""Records -> token sequences with the tokens to be learned marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import torch
from torch import Tensor

from stallfree.cli.errors import UsageError
from stallfree.cli.finetune.records import Chat, Pair, Record, Text

# For tokenizers without a chat template. It is saved with the tokenizer, so that whoever uses the model writes the same.
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence."""

    ids: Tensor  # int64 [length]
    learned: Tensor  # bool [length]: tokens whose prediction is trained; never the first
    question: str | None = None  # what is asked, without the template around it; None: plain text

    @property
    def prompt(self) -> Tensor:
        """The tokens before the first learned one; of plain text, the first quarter."""
        if self.question is None:
            return self.ids[: max(1, len(self.ids) // 4)]
        return self.ids[: int(self.learned.nonzero()[0])]


@dataclass(slots=True)
class Encoder:
    """Encodes with one tokenizer and counts what did not fit."""

    tokenizer: Any
    seq_length: int
    cut: int = 0  # sequences that lost their end
    dropped: int = 0  # sequences of which no learned token was left
    longest_prompt: int = 0
    rewritten: int = 0  # conversations of which only the last answer can be learned

    def __post_init__(self) -> None:
        if self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = PLAIN_CHAT_TEMPLATE

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Plain texts are joined and split into sequences of `seq_length`; every other record is one sequence.

        Raises:
            UsageError: if nothing fits, or the chat template refuses a conversation.
        """
        examples = list(self._split([record for record in records if isinstance(record, Text)]))
        for record in records:
            if not isinstance(record, Text):
                examples += self._fit(*self._pieces(record))
        if not examples and self.dropped:
            raise UsageError(
                f"no answer fits into --seq-length {self.seq_length}: the longest prompt has {self.longest_prompt} tokens; "
                f"raise --seq-length"
            )
        return examples

    def _split(self, texts: list[Text]) -> Iterator[Example]:
        """Sequences overlap by one token, so that every token but the very first is learned once."""
        stream: list[Tensor] = []
        for text in texts:
            tokens = [*self._tokens(text.text, special=True), self.tokenizer.eos_token_id]
            stream.append(torch.tensor(tokens, dtype=torch.int64))
        ids = torch.cat(stream) if stream else torch.empty(0, dtype=torch.int64)
        for start in range(0, len(ids) - 1, self.seq_length - 1):
            part = ids[start : start + self.seq_length].clone()
            learned = torch.ones(len(part), dtype=torch.bool)
            learned[0] = False
            yield Example(part, learned)

    def _fit(self, pieces: list[tuple[list[int], bool]], question: str) -> Iterator[Example]:
        ids = torch.tensor([token for tokens, _ in pieces for token in tokens], dtype=torch.int64)
        learned = torch.tensor([answer for tokens, answer in pieces for _ in tokens], dtype=torch.bool)
        learned[:1] = False
        self.longest_prompt = max(self.longest_prompt, len(pieces[0][0]))
        self.cut += len(ids) > self.seq_length
        ids, learned = ids[: self.seq_length], learned[: self.seq_length]
        if learned.any():
            yield Example(ids, learned, question)
        else:
            self.dropped += 1

    def _pieces(self, record: Pair | Chat) -> tuple[list[tuple[list[int], bool]], str]:
        """[(tokens, whether they are learned)] in order, and what the first of them that is learned answers.

        Prompt and answer are tokenized apart, as they are in generation.
        """
        if isinstance(record, Pair):
            answer = [*self._tokens(record.completion), self.tokenizer.eos_token_id]
            return [(self._tokens(record.prompt, special=True), False), (answer, True)], record.prompt
        turns, question = self._turns(record)
        return [(self._tokens(text), learned) for text, learned in turns], question

    def _turns(self, chat: Chat) -> tuple[list[tuple[str, bool]], str]:
        messages = chat.messages
        answers = [index for index, message in enumerate(messages) if index and message["role"] == "assistant"]
        pieces = self._cut_at(chat, answers)
        if pieces is None:  # the template writes earlier turns differently once there are later ones
            self.rewritten += 1
            answers = answers[-1:]
            pieces = self._cut_at(chat, answers)
        if pieces is None:
            raise UsageError(
                f"{chat.where}: the model's chat template does not put its answer behind the prompt that it writes"
            )
        return pieces, messages[answers[0] - 1]["content"]

    def _cut_at(self, chat: Chat, answers: list[int]) -> list[tuple[str, bool]] | None:
        """The conversation up to the last of `answers`, cut around each; None where the template rewrites earlier turns."""
        done, pieces = "", []
        for index in answers:
            prompt = self._render(chat, chat.messages[:index], add_generation_prompt=True)
            whole = self._render(chat, chat.messages[: index + 1])
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                return None
            answer = whole[len(prompt) :].rstrip()  # what the template puts behind the end of a turn is no part of it
            pieces += [(prompt[len(done) :], False), (answer, True)]
            done = prompt + answer
        return pieces

    def _render(self, chat: Chat, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
            )
        except jinja2.TemplateError as error:
            raise UsageError(f"{chat.where}: the model's chat template refuses this conversation: {error}") from None

    def _tokens(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
