"""The cost of linting: a pass over all tokens from page cache on one core, and the quick part.

Rates are of CPU time, which a busy machine disturbs least. The tokens are those of the default dataset many times over,
one in twenty changed, so that every check finds what it finds in text and little of it is copies.
"""

import time
from pathlib import Path

import numpy as np
import pytest

from bench.figures import rate, seconds
from fasttrain.data.datasets import open_dataset
from fasttrain.data.formats.dataset import ExternalDataset
from fasttrain.data.lint import lint
from fasttrain.data.stream import TokenStream

TOKENS_PER_SECOND = 20e6
QUICK_SECONDS = 1
TIMES, CHANGED = 16, 0.05
VOCABS = (4096, 50257, 128256)


class Many(ExternalDataset):
    """A dataset of `vocab`, without tokenizer: what decoding costs depends on the number of samples, not of tokens."""

    splits = ["train"]  # noqa: RUF012

    def __init__(self, path: Path, vocab: int) -> None:
        self.path, self.vocab, self._dtype = path, vocab, np.dtype("<u2" if vocab <= 2**16 else "<u4")
        default = open_dataset()
        stream, rng = default.split("train"), np.random.default_rng(0)
        scattered = np.append(0, 1 + rng.permutation(vocab - 1)[: default.vocab - 1])  # over all of the vocabulary
        tokens = np.tile(scattered[stream.windows(np.array([0]), len(stream))[0]], TIMES)
        self._ends = np.concatenate([np.asarray(stream.document_ends) + i * len(stream) for i in range(TIMES)])
        changed = rng.random(len(tokens)) < CHANGED
        changed[np.append(0, self._ends[:-1])] = False  # separators stay
        tokens[changed] = rng.integers(1, vocab, changed.sum())
        tokens.astype(self._dtype).tofile(path / f"{vocab}.tokens")
        self.tokens = len(tokens)

    def split(self, name: str) -> TokenStream:
        return TokenStream(
            [self.path / f"{self.vocab}.tokens"], [self.tokens], self._ends, dtype=self._dtype, separator=0
        )

    def tokenizer(self) -> None:
        return None


@pytest.mark.parametrize("vocab", VOCABS)
def test_all_tokens_are_linted_at_the_speed_of_a_disk(vocab, tmp_path, report):
    dataset = Many(tmp_path, vocab)
    lint(dataset)
    begin = time.process_time()
    found = lint(dataset)
    speed = rate(dataset.tokens / (time.process_time() - begin) / 1e6, "M/s", at_least=TOKENS_PER_SECOND / 1e6)
    assert not found.having("error")
    title = f"lint_{vocab}: {dataset.tokens / 1e6:.0f}M tokens, vocabulary {vocab}, one core"
    report(title, {"all": {"tokens": speed}})


def test_the_quick_part_takes_a_moment(report):
    dataset = open_dataset()
    begin = time.process_time()
    lint(dataset, quick=True)
    took = seconds(time.process_time() - begin, at_most=QUICK_SECONDS)
    report("lint_quick: the default dataset", {"quick": {"CPU": took}})
