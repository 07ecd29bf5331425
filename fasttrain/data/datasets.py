"""The data of a run, by its settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fasttrain.data.batches import Component
from fasttrain.data.corpus import standard_library
from fasttrain.data.dataset import Dataset
from fasttrain.data.formats import NO_SEPARATOR, Described, ForeignDataset, open_foreign

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fasttrain import config

AnyDataset = Dataset | ForeignDataset


def open_dataset(
    path: Path | None = None,
    described: Described = Described(),  # noqa: B008  (frozen)
) -> AnyDataset:
    """A prepared dataset, or that of another program; None: Python's standard library, prepared on first use."""
    if path is None:
        return Dataset(standard_library())
    return open_foreign(path, described) or Dataset(path)


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
        """Of the components; empty for a single dataset."""
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
        """Of the content of each dataset."""
        return {name: dataset.digest for name, dataset in self.datasets.items()}

    def components(self, split: str) -> list[Component]:
        """The streams to mix."""
        if not self.mixture:
            return [Component("", self.first.split(split))]
        return [
            Component(name, self.datasets[name].split(split), component.weight, component.epochs)
            for name, component in self.mixture.items()
        ]

    def tokenizer(self) -> Tokenizer | None:
        """That of the first dataset that has one."""
        found = (dataset.tokenizer() for dataset in self.datasets.values())
        return next((tokenizer for tokenizer in found if tokenizer is not None), None)

    def notes(self) -> list[str]:
        """What was assumed, for people."""
        return [
            line
            for dataset in self.datasets.values()
            if isinstance(dataset, ForeignDataset)
            for line in dataset.notes()
        ]


def open_data(settings: config.DataConfig) -> AnyDataset:
    """The dataset of data.path."""
    (dataset,) = _opened({"": settings.path}, settings).values()
    return dataset


def training_data(settings: config.DataConfig) -> TrainingData:
    """What a run trains on: data.path, or data.mixture."""
    if not settings.mixture:
        return TrainingData(datasets={"": open_data(settings)}, mixture={})
    datasets = _opened({name: component.path for name, component in settings.mixture.items()}, settings)
    (first, one), *others = datasets.items()
    for name, other in others:
        if difference := tokenizers_differ(one, other):
            raise ValueError(
                f"data.mixture: {first} ({one.path}) and {name} ({other.path}) have different tokenizers: "
                f"{difference}; prepare them with the same one (of data that does not say: data.tokenizer, data.vocab, "
                "data.separator)"
            )
    return TrainingData(datasets=datasets, mixture=settings.mixture)


def _opened(paths: Mapping[str, Path | None], settings: config.DataConfig) -> dict[str, AnyDataset]:
    described = Described(settings.tokenizer, settings.vocab, settings.separator)
    datasets = {name: open_dataset(path, described) for name, path in paths.items()}
    if described and not any(isinstance(dataset, ForeignDataset) for dataset in datasets.values()):
        raise ValueError(
            "data.tokenizer, data.vocab and data.separator are for data that does not say: "
            f"{next(iter(datasets.values())).path} is a prepared dataset and does; leave them out"
        )
    return datasets


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
