"""The data of a run, by its settings."""

from __future__ import annotations

from pathlib import Path

from fasttrain import config
from fasttrain.data.corpus import standard_library
from fasttrain.data.dataset import Dataset
from fasttrain.data.foreign import NO_SEPARATOR, Described, ForeignDataset, open_foreign

AnyDataset = Dataset | ForeignDataset


def open_dataset(
    path: Path | None = None,
    described: Described = Described(),  # noqa: B008  (frozen)
) -> AnyDataset:
    """A prepared dataset, or that of another program; None: Python's standard library, prepared on first use."""
    if path is None:
        return Dataset(standard_library())
    return open_foreign(path, described) or Dataset(path)


def open_data(settings: config.Data) -> AnyDataset:
    """The training data."""
    described = Described(settings.tokenizer, settings.vocab, settings.separator)
    dataset = open_dataset(settings.path, described)
    if described and not isinstance(dataset, ForeignDataset):
        raise ValueError(
            f"data.tokenizer, data.vocab and data.separator are for data that does not say: {dataset.path} is a "
            "prepared dataset and does; leave them out"
        )
    return dataset


def described_by(dataset: AnyDataset) -> Described:
    """What a dataset knows, for one that belongs to it and does not say."""
    return Described(
        dataset.tokenizer_path, dataset.vocab, NO_SEPARATOR if dataset.separator is None else dataset.separator
    )


def tokenizers_differ(one: AnyDataset, other: AnyDataset) -> str:
    """In what, as far as it is known; empty: in nothing."""
    for name in ("vocab", "separator", "tokenizer_digest"):
        first, second = getattr(one, name), getattr(other, name)
        known = name != "tokenizer_digest" or None not in (first, second)
        if known and first != second:
            return f"{name.replace('_', ' ')} {first} and {second}"
    return ""
