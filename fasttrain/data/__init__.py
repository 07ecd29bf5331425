"""Which tokens a step trains on. docs/data.md explains the files, the order, and how a batch is made."""

from fasttrain.data.batches import IGNORED, Batch, Batches, DataCursor, MixtureComponent, Prefetcher, Skip
from fasttrain.data.corpus import standard_library
from fasttrain.data.dataset import Dataset
from fasttrain.data.datasets import AnyDataset, TrainingData, open_dataset, training_data
from fasttrain.data.formats.dataset import Described, ExternalDataset
from fasttrain.data.stream import TokenStream
from fasttrain.data.writer import DatasetWriter, holds_out

__all__ = [
    "IGNORED", "AnyDataset", "Batch", "Batches", "DataCursor", "Dataset", "DatasetWriter", "Described",
    "ExternalDataset", "MixtureComponent", "Prefetcher", "Skip", "TokenStream", "TrainingData", "holds_out",
    "open_dataset", "standard_library", "training_data",
]  # fmt: skip
