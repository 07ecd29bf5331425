"""The data of a run, by its settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fasttrain.data.batches import MixtureComponent
from fasttrain.data.corpus import standard_library
from fasttrain.data.dataset import NAME, Dataset
from fasttrain.data.formats import bins, megatron
from fasttrain.data.formats.dataset import NO_SEPARATOR, Described, ExternalDataset
from fasttrain.data.stream import spread

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fasttrain import config

AnyDataset = Dataset | ExternalDataset


def open_dataset(
    path: Path | None = None,
    described: Described = Described(),  # noqa: B008  (frozen)
) -> AnyDataset:
    """Open a prepared dataset, or that of another program; None: Python's standard library, prepared on first use."""
    if path is None:
        return Dataset(standard_library())
    # a directory, a file, or Megatron's prefix of two files
    found = None if (path / NAME).exists() else megatron.find(path) or bins.find(path)
    return ExternalDataset(path, found, described) if found else Dataset(path)


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """A dataset, whose name is empty, or several by name. All have the same tokenizer."""

    datasets: dict[str, AnyDataset]
    mixture: dict[str, config.ComponentConfig]  # empty for a single dataset

    @property
    def first(self) -> AnyDataset:
        return next(iter(self.datasets.values()))

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the components; empty for a single dataset."""
        return {name: component.weight for name, component in self.mixture.items()}

    @property
    def digest(self) -> str:
        """Equal for equal data in equal proportions."""
        if not self.mixture:
            return self.first.digest
        parts = [(name, self.datasets[name].digest, c.weight, c.epochs) for name, c in self.mixture.items()]
        return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each dataset's content."""
        return {name: dataset.digest for name, dataset in self.datasets.items()}

    def components(self, split: str) -> list[MixtureComponent]:
        """The streams to mix."""
        if not self.mixture:
            return [MixtureComponent("", self.first.split(split))]
        return [
            MixtureComponent(name, self.datasets[name].split(split), component.weight, component.epochs)
            for name, component in self.mixture.items()
        ]

    def embedding_rows(self, settings: config.Config) -> int:
        """As the settings say, or enough for the vocabulary."""
        needed = self.first.vocab
        rows = settings.model.vocab or -(-needed // 64) * 64
        if rows < needed:
            remedy = "raise it, or remove it"
            if settings.from_hf is not None:
                remedy = f"it is that of {settings.from_hf}: prepare the data with --tokenizer {settings.from_hf}"
            trouble = f"is smaller than the vocabulary of the data, {needed} ({self.first.path})"
            raise ValueError(f"model.vocab ({rows}) {trouble}; {remedy}")
        return rows

    def repeated(self) -> float:
        """Share of the tokens of the training split that are the same as the one before, by a sample."""
        windows = [spread(dataset.split("train"), 2**16, whole=2**16) for dataset in self.datasets.values()]
        weights = list(self.weights.values()) or [1.0]
        return float(np.average([(tokens[:, 1:] == tokens[:, :-1]).mean() for tokens in windows], weights=weights))

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the first dataset that has one."""
        found = (dataset.tokenizer() for dataset in self.datasets.values())
        return next((tokenizer for tokenizer in found if tokenizer is not None), None)

    def notes(self) -> list[str]:
        """Assumptions about the data, for people."""
        external = (dataset for dataset in self.datasets.values() if isinstance(dataset, ExternalDataset))
        return [line for dataset in external for line in dataset.notes()]


def training_data(settings: config.DataConfig) -> TrainingData:
    """Open what a run trains on: data.path, or data.mixture."""
    mixture: dict[str, Path | None] = {name: component.path for name, component in settings.mixture.items()}
    described = Described(settings.tokenizer, settings.vocab, settings.separator)
    datasets = {name: open_dataset(path, described) for name, path in (mixture or {"": settings.path}).items()}
    (first, one), *others = datasets.items()
    if described and not any(isinstance(dataset, ExternalDataset) for dataset in datasets.values()):
        raise ValueError(
            "data.tokenizer, data.vocab and data.separator are for data that does not say: "
            f"{one.path} is a prepared dataset and does; remove them"
        )
    for name, other in others:
        if difference := tokenizers_differ(one, other):
            both = f"{first} ({one.path}) and {name} ({other.path})"
            raise ValueError(
                f"data.mixture: {both} have different tokenizers: {difference}; prepare them with the same one "
                "(of data that does not say: data.tokenizer, data.vocab, data.separator)"
            )
    return TrainingData(datasets=datasets, mixture=settings.mixture)


def described_by(dataset: AnyDataset) -> Described:
    """The description that a dataset gives one which belongs to it and does not say."""
    separator = NO_SEPARATOR if dataset.separator is None else dataset.separator
    return Described(dataset.tokenizer_path, dataset.vocab, separator)


def tokenizers_differ(one: AnyDataset, other: AnyDataset) -> str:
    """How two tokenizers differ, as far as is known; empty: not at all."""
    for name in ("vocab", "separator", "tokenizer_digest"):
        first, second = getattr(one, name), getattr(other, name)
        known = name != "tokenizer_digest" or None not in (first, second)
        if known and first != second:
            return f"{name.replace('_', ' ')} {first} and {second}"
    return ""
