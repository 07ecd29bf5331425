"""With the cache, every token has the logits that it has without."""

import pytest
import torch
import torch.nn.functional as F

from fasttrain.tools.generate import Cache
from tests.fasttrain.tools.generate.models import SEQUENCE, TINY, VARIANTS, VOCAB, decoder, prompts


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to all of them: what float32 rounds."""
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("lengths", [(1,), (5, 5, 5), (3, 17, 1, 30)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_whole_text(variant, lengths):
    model = decoder(VARIANTS[variant])
    texts = prompts(*(SEQUENCE for _ in lengths))
    steps = SEQUENCE - max(lengths)
    cache = Cache(model, [text[:n] for text, n in zip(texts, lengths, strict=True)], slots=max(lengths) + steps)
    whole = model.logits(torch.tensor(texts))  # (B, T, V)
    logits = cache.prefill()
    for step in range(steps + 1):
        expected = torch.stack([whole[row, n + step - 1] for row, n in enumerate(lengths)])
        assert error(logits, expected) < 4e-6
        if step < steps:
            logits = cache.step(torch.tensor([text[n + step] for text, n in zip(texts, lengths, strict=True)]))


def test_a_row_that_is_full_disturbs_no_other():
    model, (one, other) = decoder(), prompts(10, 4)
    cache = Cache(model, [one, other], slots=12)
    cache.prefill()
    following = prompts(1, 1, 1, 1, 1)
    for (token,) in following:
        logits = cache.step(torch.tensor([token, token]))
    expected = model.logits(torch.tensor([other + [token for (token,) in following]]))[0, -1]
    assert error(logits[1], expected) < 4e-6


def test_keys_have_the_dtype_of_the_weights():
    model = decoder().bfloat16()
    model._build_rotary_table(None)
    cache = Cache(model, prompts(3, 1), slots=5)
    logits = cache.prefill()
    assert logits.shape == (2, VOCAB)
    assert cache._kv is not None
    assert cache._kv.dtype == torch.bfloat16
    assert cache._kv.shape == (TINY.layers, 2, 2, 5, TINY.kv_heads, TINY.head_dim)
    assert cache._kv[:, :, 1, 1:].count_nonzero() == 0  # the second prompt has one token
    logits = cache.step(torch.tensor([1, 2]))
    text = torch.tensor([prompts(3)[0] + [1]])
    similarity = F.cosine_similarity(logits[0].float(), model.logits(text)[0, -1].float(), dim=0)
    assert similarity > 0.999
