"""Writing a dataset: documents go to a directory with a temporary name, which gets its own name once it is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from pathlib import Path

import numpy as np

from fasttrain.data.manifest import NAME, PARTIAL, File, Manifest, Split

SHARD_TOKENS = 2**30  # 2 or 4 GB: convenient to copy, and a trillion tokens still are a thousand files


def holds_out(document: bytes, share: float) -> bool:
    """Whether a document belongs to validation.

    Its content alone decides, so that adding documents moves none, and copies stay together.
    """
    digest = hashlib.blake2b(document, digest_size=8, person=b"fasttrain split").digest()
    return int.from_bytes(digest, "little") < share * 2**64


class DatasetWriter:
    """Use as a context: leaving it publishes the dataset, an exception within it discards everything.

    A process that is killed leaves a directory named .NAME.partial-..., which never opens as a dataset.
    """

    def __init__(
        self, path: Path, *, tokenizer: str, vocab: int, separator: int, source: str, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self.path = Path(path)
        self._refuse_to_overwrite()
        self._tokenizer, self._vocab, self._separator, self._source = tokenizer, vocab, separator, source
        self._dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
        self._shard_tokens = shard_tokens
        self._splits: dict[str, _SplitFiles] = {}
        self._partial = self.path.parent / f".{self.path.name}{PARTIAL}{uuid.uuid4().hex[:8]}"
        self._partial.mkdir(parents=True)

    def add(self, split: str, tokens: np.ndarray, *, num_bytes: int) -> None:  # (n,) integers
        """Append a document of `num_bytes` bytes of text. The separator is written here, once."""
        if len(tokens) == 0:
            raise ValueError(f"dataset: document {self._count(split)} of {split} is empty; leave empty documents out")
        if tokens.min() < 0 or tokens.max() >= self._vocab:
            raise ValueError(
                f"dataset: document {self._count(split)} of {split} has tokens from {tokens.min()} to {tokens.max()}, "
                f"outside the vocabulary of {self._vocab}; is this the right tokenizer?"
            )
        if (tokens == self._separator).any():
            raise ValueError(
                f"dataset: document {self._count(split)} of {split} contains the separator {self._separator}, which is "
                "added between documents; encode text without special tokens"
            )
        if split not in self._splits:
            self._splits[split] = _SplitFiles(self._partial, split, self._shard_tokens)
        self._splits[split].add(np.concatenate([[self._separator], tokens]).astype(self._dtype), num_bytes)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)  # gone already once published

    def _publish(self) -> None:
        if not self._splits:
            raise ValueError(f"dataset: no documents for {self.path}; check the inputs")
        tokenizer = _GrowingFile(self._partial / "tokenizer.json")
        tokenizer.write(self._tokenizer.encode())
        manifest = Manifest(
            source=self._source,
            dtype=self._dtype.name,
            vocab=self._vocab,
            separator=self._separator,
            tokenizer=tokenizer.close(),
            splits={name: files.close() for name, files in self._splits.items()},
        )
        description = _GrowingFile(self._partial / NAME)
        description.write(manifest.dump().encode())
        description.close()
        _sync(self._partial)
        try:
            os.rename(self._partial, self.path)
        except OSError:
            self._refuse_to_overwrite()  # another process was faster
            raise
        _sync(self.path.parent)

    def _refuse_to_overwrite(self) -> None:
        if self.path.exists():
            raise FileExistsError(f"dataset: {self.path} exists; choose another directory, or delete it first")

    def _count(self, split: str) -> int:
        return self._splits[split].documents if split in self._splits else 0


class _SplitFiles:
    """Shards and document index of one split, growing."""

    def __init__(self, directory: Path, name: str, shard_tokens: int) -> None:
        self._directory, self._name, self._shard_tokens = directory, name, shard_tokens
        self.documents = self._tokens = self._bytes = 0
        self._shards: list[File] = []
        self._shard = self._next_shard()
        self._room = shard_tokens
        self._index = _GrowingFile(directory / f"{name}.documents")

    def add(self, tokens: np.ndarray, num_bytes: int) -> None:
        self.documents += 1
        self._tokens += len(tokens)
        self._bytes += num_bytes
        self._index.write(np.array([self._tokens], "<i8").tobytes())
        while len(tokens):
            if not self._room:
                self._shards.append(self._shard.close())
                self._shard, self._room = self._next_shard(), self._shard_tokens
            piece, tokens = tokens[: self._room], tokens[self._room :]
            self._shard.write(piece.tobytes())
            self._room -= len(piece)

    def close(self) -> Split:
        return Split(
            tokens=self._tokens,
            documents=self.documents,
            bytes=self._bytes,
            shards=(*self._shards, self._shard.close()),
            index=self._index.close(),
        )

    def _next_shard(self) -> _GrowingFile:
        return _GrowingFile(self._directory / f"{self._name}-{len(self._shards):05}.tokens")


class _GrowingFile:
    """A file whose checksum is known as soon as it is written, and which is on the disk when closed."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._file = open(path, "wb", buffering=2**20)  # noqa: SIM115 (lives as long as this)
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def close(self) -> File:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return File(name=self._name, size=self._size, sha256=self._hash.hexdigest())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
