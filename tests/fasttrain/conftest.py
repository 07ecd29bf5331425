from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.datasets import DatasetWriter
from tests.runs import train


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps, to look at and not to change."""
    run = tmp_path_factory.mktemp("small") / "run"
    train(run)
    return run


@pytest.fixture
def make_text():
    """make_text(path): a dataset of words, one token each, with tokenizer.json; half of it is held out."""

    def make(path: Path, *, words: int = 60, vocab: int | None = None, documents: int = 40, seed: int = 0) -> Path:
        known = {"<|end|>": 0, **{f"w{number}": number for number in range(1, words + 1)}}
        tokenizer = Tokenizer(models.WordLevel(known, unk_token="w1"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(["<|end|>"])
        draw = np.random.default_rng(seed)
        with DatasetWriter(
            path, tokenizer=tokenizer.to_str(), vocab=vocab or words + 1, separator=0, source="a test"
        ) as writer:
            for number in range(documents):
                ids = draw.integers(1, words + 1, draw.integers(5, 40))
                writer.add(("train", "validation")[number % 2], ids, num_bytes=3 * len(ids))
        return path

    return make
