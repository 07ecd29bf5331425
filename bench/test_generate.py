"""Tokens per second of generation, against Transformers' generate on the same weights, and against no cache.

Greedy, one thread, CPU time; interleaved runs, compared within a round. All generate the same text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from bench.figures import rate, ratio
from fasttrain.config import ModelConfig
from fasttrain.model import Decoder
from fasttrain.tools.generate import Sampling, generate
from tests.fasttrain.tools.generate.models import in_transformers

MODEL = ModelConfig()  # of the recipe tiny
VOCAB, SEQUENCE, PROMPT, ROUNDS = 4096, 256, 32, 3
TOKENS = {1: 64, 8: 32}  # by the number of texts
MARGIN = 0.3  # from run to run: without a cache, 8 texts took 7.6 to 9.6 times as long
# At least, a quarter below what is usual: the faster the matmuls of a whole sequence, the less a cache saves.
TRANSFORMERS, WITHOUT_CACHE = 0.7, {1: 2.4, 8: 4.5}
Texts = list[list[int]]


@pytest.mark.parametrize(("texts", "tokens"), TOKENS.items())
def test_tokens_per_second(texts: int, tokens: int, report: Callable[..., None], one_thread: None) -> None:
    model = Decoder(MODEL, vocab=VOCAB, sequence=SEQUENCE).eval().requires_grad_(False)
    model.init_weights(0)
    theirs = in_transformers(model)
    prompts = torch.randint(VOCAB, (texts, PROMPT), generator=torch.Generator().manual_seed(0))

    def ours() -> Texts:
        *_, made = generate(model, prompts.tolist(), tokens=tokens, sampling=Sampling(temperature=0))
        return [text.ids for text in made]

    def transformers() -> Texts:
        made = theirs.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=tokens,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return made[:, PROMPT:].tolist()

    def without_cache() -> Texts:
        ids = prompts
        for _ in range(tokens):
            ids = torch.cat([ids, model.logits(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids[:, PROMPT:].tolist()

    implementations = {"ours": ours, "transformers": transformers, "without a cache": without_cache}
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    expected = ours()
    for round in range(ROUNDS + 1):  # the first one warms up
        for name in (list(implementations) * 2)[round % 3 :][:3]:
            began = time.process_time()
            assert implementations[name]() == expected, f"{name} generates another text"
            if round:
                seconds[name].append(time.process_time() - began)
    table = {}
    for name, own in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(own, seconds["ours"], strict=True)]
        limit = {"transformers": TRANSFORMERS, "without a cache": WITHOUT_CACHE[texts]}.get(name)
        table[name] = {
            "CPU time, of ours": ratio(statistics.median(ratios), at_least=limit, margin=MARGIN) if limit else 1.0,
            "least": min(ratios),
            "most": max(ratios),
            "speed": rate(texts * tokens / statistics.median(own), "tokens/s"),
        }
    report(f"generate_{texts}: {tokens} tokens of {texts} text{'s' * (texts > 1)}, after prompts of {PROMPT}", table)
