"""A prepared dataset: a directory of token shards, document indices, a tokenizer and dataset.json."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fasttrain.data.manifest import Manifest
from fasttrain.data.sources import RECORD, Source, SourceFile, read_files, read_source
from fasttrain.data.stream import TokenStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Dataset:
    """Opening reads dataset.json and compares file sizes; the data itself is mapped when it is used."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)

    @property
    def vocab(self) -> int:
        """Token ids are below this."""
        return self.manifest.vocab

    @property
    def separator(self) -> int:
        """The token that begins every document, and thereby ends the one before."""
        return self.manifest.separator

    @property
    def splits(self) -> list[str]:
        """Names that `split` takes."""
        return list(self.manifest.splits)

    @property
    def tokenizer_path(self) -> Path:
        """tokenizer.json."""
        return self.path / self.manifest.tokenizer.name

    @property
    def tokenizer_digest(self) -> str:
        """Equal for equal tokenizers."""
        return self.manifest.tokenizer.sha256

    @property
    def digest(self) -> str:
        """Equal for equal data, wherever it came from: dataset.json holds the checksums of everything else."""
        return hashlib.sha256(self.manifest.without_origin().dump().encode()).hexdigest()

    def split(self, name: str) -> TokenStream:
        """ "train" or "validation"."""
        if name not in self.manifest.splits:
            raise ValueError(
                f"dataset: {self.path} has no split {name!r}, only {', '.join(self.manifest.splits)}; prepare it with "
                "more documents or a larger share of validation"
            )
        split, dtype = self.manifest.splits[name], np.dtype(self.manifest.dtype)
        return TokenStream(
            [self.path / shard.name for shard in split.shards],
            [shard.size // dtype.itemsize for shard in split.shards],
            self.path / split.index.name,
            dtype=dtype,
            separator=self.separator,
        )

    def bytes_per_token(self, name: str) -> float:
        """Text bytes per token, separators counted as tokens: bits per byte = nats per token / ln 2 / this."""
        split = self.manifest.splits[name]
        return split.bytes / split.tokens

    def source(self, name: str, document: int) -> Source | None:
        """The file and place that a document of a split came from; None if the dataset does not know."""
        split = self.manifest.splits[name]
        if not 0 <= document < split.documents:
            raise ValueError(f"dataset: {self.path} has no document {document} in {name}, which has {split.documents}")
        if split.sources is None or self.manifest.sources is None:
            return None
        return read_source(self.path / split.sources.name, self.path / self.manifest.sources.name, document)

    def source_files(self) -> list[SourceFile]:
        """All files that documents came from; none if the dataset does not know."""
        return [] if self.manifest.sources is None else read_files(self.path / self.manifest.sources.name)

    def source_records(self, name: str) -> np.ndarray:  # (documents,) RECORD
        """Of every document of a split, its place in one of these files."""
        file = self.manifest.splits[name].sources
        return np.empty(0, RECORD) if file is None else np.memmap(self.path / file.name, RECORD, "r")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, verified."""
        from tokenizers import Tokenizer

        self.manifest.tokenizer.check_content(self.path)
        return Tokenizer.from_file(str(self.path / self.manifest.tokenizer.name))

    def verify(self, most: int | None = None) -> None:
        """Compare every file with its checksum. Reads everything, or nothing if that is more than `most` bytes."""
        files = self.manifest.files()
        if most is None or sum(file.size for file in files) <= most:
            for file in files:
                file.check_content(self.path)
