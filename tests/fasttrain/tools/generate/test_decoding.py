"""Whole texts: Transformers' own, the same in any batch, and where they end."""

from typing import Any

import pytest
import torch

from fasttrain.tools.generate import Sampling, generate
from tests.fasttrain.tools.generate.models import SEQUENCE, VARIANTS, decoder, in_transformers, prompts

GREEDY = Sampling(temperature=0)


def made(model, given, **options):
    defaults: dict[str, Any] = dict(tokens=12, sampling=GREEDY)
    *_, texts = generate(model, given, **defaults | options)
    return texts


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_texts_are_those_of_transformers(variant):
    model = decoder(VARIANTS[variant])
    theirs = in_transformers(model)
    given = prompts(3, 17, 1, 30, 9)
    for prompt, text in zip(given, made(model, given, tokens=18), strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=18,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert text.ids == expected[0, len(prompt) :].tolist()
        assert len(set(text.ids)) > 2  # no text that any mistake would give as well


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0, top_k=0, seed=3), Sampling(top_p=0.9)], ids=str)
def test_a_text_is_the_same_in_any_batch(sampling):
    model, given = decoder(), prompts(3, 17, 1, 30)
    together = made(model, [*given, given[0]], sampling=sampling, samples=[0, 1, 2, 0, 4])
    for number, prompt in enumerate(given):
        (alone,) = made(model, [prompt], sampling=sampling, samples=[[0, 1, 2, 0][number]])
        assert alone.ids == together[number].ids
    assert together[0].ids != together[4].ids  # another sample of the same prompt
    assert made(model, given[:1], sampling=Sampling(temperature=1.0, top_k=0, seed=4))[0].ids != together[0].ids


def test_an_end_ends_its_own_text_only():
    model, given = decoder(), prompts(3, 17, 1)
    free = made(model, given)
    end = free[1].ids[4]
    texts = made(model, given, end=end)
    for text, whole in zip(texts, free, strict=True):
        length = whole.ids.index(end) if end in whole.ids else len(whole.ids)
        assert text.ids == whole.ids[:length]
        assert text.ended == ("separator" if end in whole.ids else "tokens")
    assert texts[1].ended == "separator"
    assert end not in made(model, given, never=end)[1].ids


def test_all_are_over_when_the_last_is():
    model, given = decoder(), prompts(3)
    end = made(model, given)[0].ids[3]
    steps = [list(texts[0].ids) for texts in generate(model, given, tokens=12, sampling=GREEDY, end=end)]
    first = made(model, given)[0].ids.index(end)
    assert len(steps) == first + 1
    assert steps == [steps[-1][: n + 1] for n in range(first)] + [steps[-1]]


def test_texts_end_with_the_context():
    given = prompts(SEQUENCE - 5, 20)
    texts = made(decoder(), given, tokens=20)
    assert [(len(text.ids), text.ended) for text in texts] == [(5, "context"), (20, "tokens")]
    (alone,) = made(decoder(), given[1:], tokens=20)
    assert alone.ids == texts[1].ids


def test_rows_that_mean_nothing_are_not_drawn():
    model = decoder()
    assert max(made(model, prompts(8), sampling=Sampling(temperature=50.0, top_k=0), vocab=7)[0].ids) < 7


def test_ended_by_whoever_listens():
    texts, lengths = [], []
    for texts in generate(decoder(), prompts(3, 5), tokens=9, sampling=GREEDY):
        lengths.append(len(texts[1].ids))
        if len(texts[0].ids) == 4:
            texts[0].ended = "enough"
    assert (len(texts[0].ids), texts[0].ended, lengths[-1]) == (4, "enough", 9)


@pytest.mark.parametrize(
    ("given", "tokens", "words"),
    [
        ([[]], 4, "the prompt is empty"),
        ([[1], [1] * SEQUENCE], 4, f"has {SEQUENCE} tokens, and the model knows texts of {SEQUENCE}"),
        ([[1]], 0, "0 tokens; ask for at least 1"),
    ],
)
def test_prompts_that_cannot_be(given, tokens, words):
    with pytest.raises(ValueError, match=words):
        made(decoder(), given, tokens=tokens)


def test_the_model_is_left_as_it_was():
    model = decoder().train()
    made(model, prompts(2))
    assert model.training
    steps: Any = generate(model, prompts(2), tokens=5, sampling=GREEDY)
    next(steps)
    steps.close()
    assert model.training
