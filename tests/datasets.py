"""A dataset of given documents."""

import shutil
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from fasttrain.data.dataset import PARTIAL, RECORD, SourceFile
from fasttrain.data.writer import SHARD_TOKENS, DatasetFiles, refuse_to_overwrite


class DatasetWriter(AbstractContextManager["DatasetWriter"]):
    """Use as a context: leaving it completes the dataset, an exception within it discards everything."""

    def __init__(
        self,
        path: Path, *, tokenizer: str, vocab: int, separator: int, source: str, shard_tokens: int = SHARD_TOKENS,
        files: list[SourceFile] | None = None,  # that documents come from; `add` then says which, and where
    ) -> None:  # fmt: skip
        self._path, self._separator = path, separator
        refuse_to_overwrite(path)
        self._tokenizer, self._source, self._sources = tokenizer, source, files
        self._partial = path.parent / f".{path.name}{PARTIAL}{uuid.uuid4().hex[:8]}"
        self._partial.mkdir(parents=True)
        self._files = DatasetFiles(self._partial, vocab=vocab, separator=separator, shard_tokens=shard_tokens)

    def add(
        self,
        split: str,
        tokens: np.ndarray,  # (n,) integers
        *,
        num_bytes: int,
        source: tuple[int, int, int, int] | None = None,  # a RECORD
    ) -> None:
        """Append a document of `num_bytes` bytes of text. The separator is written here, once."""
        assert (source is None) == (self._sources is None), "all documents have a source, or none"
        whole = np.concatenate([[self._separator], tokens]).astype(self._files.dtype)
        sources = None if source is None else np.array([source], RECORD)
        self._files.add(split, whole, lengths=np.array([len(whole)]), num_bytes=num_bytes, sources=sources)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                sources = None if self._sources is None else [file.dump() for file in self._sources]
                self._files.complete(self._path, tokenizer=self._tokenizer, source=self._source, sources=sources)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)  # gone already once complete
