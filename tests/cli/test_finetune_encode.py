"""Which tokens are learned, in what order sequences come, and that padding and splitting change nothing."""

import pytest
import torch

from stallfree.cli.errors import UsageError
from stallfree.cli.finetune.batches import Order, collate
from stallfree.cli.finetune.encode import Encoder, Example
from stallfree.cli.finetune.evaluation import token_losses
from stallfree.cli.finetune.models import load_model
from stallfree.cli.finetune.records import Chat, Pair, Text


def turns(*contents):
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


def spans(tokenizer, example):
    """The learned stretches, as text."""
    parts, previous = [], False
    for token, learned in zip(example.ids.tolist(), example.learned.tolist(), strict=True):
        if learned and not previous:
            parts.append("")
        if learned:
            parts[-1] += tokenizer.decode([token])
        previous = learned
    return parts


@pytest.fixture
def tokenizer():
    return load_model("tiny", torch.float32, 0)[1]


def test_chat_learns_the_answers(tokenizer):
    (example,) = Encoder(tokenizer, 200).encode([Chat("", turns("1+1?", "2", "and 3?", "5"))])
    assert tokenizer.decode(example.ids) == "User:\n1+1?\n\nAssistant:\n2<|end|>\n\nUser:\nand 3?\n\nAssistant:\n5<|end|>"
    assert spans(tokenizer, example) == ["2<|end|>", "5<|end|>"]
    assert tokenizer.decode(example.prompt) == "User:\n1+1?\n\nAssistant:\n"


def test_pair_learns_the_completion_verbatim(tokenizer):
    (example,) = Encoder(tokenizer, 200).encode([Pair("", "a b", " c")])
    assert tokenizer.decode(example.ids) == "a b c<|end|>"
    assert spans(tokenizer, example) == [" c<|end|>"]


def test_text_is_learned_once_and_whole(tokenizer):
    examples = Encoder(tokenizer, 8).encode([Text("", "0123456789"), Text("", "abcdefg")])
    learned = torch.cat([example.ids[example.learned] for example in examples])
    assert tokenizer.decode(learned) == "123456789<|end|>abcdefg<|end|>"
    assert [len(example.ids) for example in examples] == [8, 8, 5]


def test_template_that_rewrites_earlier_turns_teaches_the_last_answer(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:"
        "{{ m['content'] if loop.last or m['role'] == 'user' else '...' }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    encoder = Encoder(tokenizer, 100)
    (example,) = encoder.encode([Chat("", turns("p", "one", "q", "two"))])
    assert tokenizer.decode(example.ids) == "u:p;a:...;u:q;a:two;"
    assert spans(tokenizer, example) == ["two;"]
    assert example.question == "q"
    assert encoder.rewritten == 1


def test_template_that_refuses_is_named(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        UsageError, match="f, line 3: the model's chat template refuses this conversation: roles must alternate"
    ):
        Encoder(tokenizer, 100).encode([Chat("f, line 3", turns("a", "b"))])


def test_cut_and_dropped_are_counted(tokenizer):
    encoder = Encoder(tokenizer, 10)
    examples = encoder.encode([Pair("", "ab", "cd"), Pair("", "ab", "0123456789"), Pair("", "0123456789", "a")])
    assert [tokenizer.decode(example.ids) for example in examples] == ["abcd<|end|>", "ab01234567"]
    assert (encoder.cut, encoder.dropped) == (2, 1)
    with pytest.raises(UsageError, match="no answer fits into --seq-length 10: the longest prompt has 12 tokens; raise"):
        Encoder(tokenizer, 10).encode([Pair("", "0123456789ab", "c")])


def test_order_is_a_permutation_per_epoch_and_depends_on_the_position_alone():
    order = Order(7, seed=3)
    epochs = [order.indices(start, 7) for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert Order(7, seed=3).indices(5, 6) == (epochs[0] + epochs[1])[5:11]
    assert Order(7, seed=4).indices(0, 7) != epochs[0]


def test_padding_and_splitting_do_not_change_the_loss(tiny):
    model, tokenizer = tiny
    examples = Encoder(tokenizer, 64).encode([Pair("", "ab", "c"), Pair("", "abcdef", "0123456789"), Pair("", "a", "xyz")])
    with torch.no_grad():
        together = token_losses(model, collate(examples, tokenizer.pad_token_id))
        apart = sum(token_losses(model, collate([example], tokenizer.pad_token_id)) for example in examples)
        reference = sum(
            model(input_ids=e.ids[None]).logits[0, :-1].log_softmax(-1).gather(1, e.ids[1:, None])[:, 0][e.learned[1:]].sum()
            for e in examples
        )
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(together, -reference)


def test_batch_counts(tokenizer):
    example = Example(torch.tensor([5, 6, 7]), torch.tensor([False, False, True]))
    longer = Example(torch.tensor([1, 2, 3, 4]), torch.tensor([False, True, False, True]))
    batch = collate([example, longer], pad_id=9)
    assert batch.input_ids.tolist() == [[5, 6, 7, 9], [1, 2, 3, 4]]
    assert batch.columns.tolist() == [0, 1, 2]
    assert batch.labels.tolist() == [[-100, 7, -100], [2, -100, 4]]
    assert batch.learned == 3
