from pathlib import Path

import numpy as np
import pytest

from fasttrain.data.dataset import Dataset
from tests.datasets import DatasetWriter

SEPARATOR = 0


@pytest.fixture
def make_dataset(tmp_path: Path):
    """make_dataset([lengths of train documents], ...): tokens count up from 1, so that each says where it lies."""

    def make(train, validation=(), *, name="dataset", vocab=2**16, **options) -> Dataset:
        with DatasetWriter(
            tmp_path / name, tokenizer="{}", vocab=vocab, separator=SEPARATOR, source="a test", **options
        ) as writer:
            for split, lengths in (("train", train), ("validation", validation)):
                first = 1
                for length in lengths:  # the separator counted, so that ends are sums of lengths
                    writer.add(split, np.arange(first, first + length - 1), num_bytes=3 * length)
                    first += length - 1
        return Dataset(tmp_path / name)

    return make
