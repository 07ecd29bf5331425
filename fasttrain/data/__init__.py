"""Which tokens a step trains on. docs/data.md explains the files, the order, and how a batch is made."""

from __future__ import annotations

from pathlib import Path

from fasttrain.data.batches import IGNORED, Batch, Batches, Origin
from fasttrain.data.corpus import standard_library
from fasttrain.data.dataset import Dataset
from fasttrain.data.prefetch import Prefetcher
from fasttrain.data.stream import TokenStream
from fasttrain.data.writer import DatasetWriter, holds_out

__all__ = [
    "IGNORED",
    "Batch",
    "Batches",
    "Dataset",
    "DatasetWriter",
    "Origin",
    "Prefetcher",
    "TokenStream",
    "holds_out",
    "open_dataset",
    "standard_library",
]


def open_dataset(path: Path | None = None) -> Dataset:
    """A prepared dataset; None: Python's standard library, prepared on first use."""
    return Dataset(standard_library() if path is None else path)
