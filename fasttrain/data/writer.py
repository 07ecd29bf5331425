"""Writing a dataset: documents go to a directory with a temporary name, which gets its own name once it is whole.

A process that is killed leaves the former, .NAME.partial-..., which never opens as a dataset.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.dataset import NAME, Manifest, Split
from fasttrain.fs import FileChecksum, HashedFile, sync, write_file

TOKENIZER = "tokenizer.json"
SHARD_TOKENS = 2**30  # 2 or 4 GB: convenient to copy, and a trillion tokens still are a thousand files


def holds_out(document: bytes, share: float) -> bool:
    """Whether a document belongs to validation.

    Its content alone decides, so that adding documents moves none, and copies stay together.
    """
    digest = hashlib.blake2b(document, digest_size=8, person=b"fasttrain split").digest()
    return int.from_bytes(digest, "little") < share * 2**64


def refuse_to_overwrite(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"dataset: {path} exists; choose another directory, or delete it first")


class DatasetFiles:
    """The growing files of a dataset in a directory. state: what `sync` returned, to continue from there."""

    def __init__(
        self,
        directory: Path, *, vocab: int, separator: int, shard_tokens: int = SHARD_TOKENS,
        state: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._directory, self._vocab, self._separator, self._shard_tokens = directory, vocab, separator, shard_tokens
        self.dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
        self._splits = {
            name: _SplitWriter(directory, name, shard_tokens, split) for name, split in (state or {}).items()
        }

    def add(
        self,
        split: str,
        tokens: np.ndarray,  # (n,) of self.dtype: documents in a row, each begun by the separator
        *,
        lengths: np.ndarray,  # tokens of each document
        num_bytes: int,  # of their text
        sources: np.ndarray | None = None,  # a RECORD of each
    ) -> None:
        if not len(lengths):
            return
        if split not in self._splits:
            self._splits[split] = _SplitWriter(self._directory, split, self._shard_tokens, None)
        self._splits[split].add(tokens, lengths, num_bytes, sources)

    def sync(self) -> dict[str, Any]:
        """Have everything on the disk; the state to resume from."""
        return {name: files.sync() for name, files in self._splits.items()}

    def complete(
        self,
        path: Path,
        *,
        tokenizer: str,
        source: str,
        sources: Iterable[str] | None = None,  # lines
        report: FileChecksum | None = None,
        dropped: dict[str, int] | None = None,
    ) -> None:
        """Give the directory its name, with a dataset.json in it."""
        if not self._splits:
            raise ValueError(f"dataset: no documents for {path}; check the inputs")
        manifest = Manifest(
            source=source,
            dtype=self.dtype.name,  # type: ignore[arg-type]
            vocab=self._vocab,
            separator=self._separator,
            tokenizer=write_file(self._directory / TOKENIZER, [tokenizer]),
            # in the order of their names, whatever the order of documents
            splits={name: self._splits[name].close() for name in sorted(self._splits)},
            sources=None if sources is None else write_file(self._directory / "sources.jsonl", sources),
            report=report,
            dropped=dropped,
        )
        write_file(self._directory / NAME, [manifest.dump()])
        sync(self._directory)
        try:
            os.rename(self._directory, path)
        except OSError:
            refuse_to_overwrite(path)  # another process was faster
            raise
        sync(path.parent)


class _SplitWriter:
    """Shards, document index and sources of one split, growing."""

    def __init__(self, directory: Path, name: str, shard_tokens: int, state: dict[str, Any] | None) -> None:
        self._directory, self._name, self._shard_tokens = directory, name, shard_tokens
        state = state or dict(documents=0, tokens=0, bytes=0, shards=[], left=shard_tokens, open=dict(shard=0, index=0))
        self.documents, self._tokens, self._bytes = state["documents"], state["tokens"], state["bytes"]
        self._shards = [FileChecksum(**shard) for shard in state["shards"]]
        self._left = state["left"]  # tokens that fit into the shard
        self._open = {kind: self._opened(kind, size) for kind, size in state["open"].items()}

    def add(self, tokens: np.ndarray, lengths: np.ndarray, num_bytes: int, sources: np.ndarray | None) -> None:
        self._open["index"].write((self._tokens + np.cumsum(lengths)).astype("<i8").tobytes())
        self.documents += len(lengths)
        self._tokens += len(tokens)
        self._bytes += num_bytes
        if sources is not None:
            if "sources" not in self._open:
                self._open["sources"] = self._opened("sources")
            self._open["sources"].write(sources.tobytes())
        while len(tokens):
            if not self._left:
                self._shards.append(self._open["shard"].finish())
                self._open["shard"], self._left = self._opened("shard"), self._shard_tokens
            head, tokens = tokens[: self._left], tokens[self._left :]
            self._open["shard"].write(head.tobytes())
            self._left -= len(head)

    def sync(self) -> dict[str, Any]:
        return dict(
            documents=self.documents, tokens=self._tokens, bytes=self._bytes, left=self._left,
            shards=[asdict(shard) for shard in self._shards],
            open={kind: file.sync() for kind, file in self._open.items()},
        )  # fmt: skip

    def close(self) -> Split:
        last = {kind: file.finish() for kind, file in self._open.items()}
        return Split(
            tokens=self._tokens, documents=self.documents, bytes=self._bytes, shards=(*self._shards, last["shard"]),
            index=last["index"], sources=last.get("sources"),
        )  # fmt: skip

    def _opened(self, kind: str, size: int = 0) -> HashedFile:
        endings = dict(shard=f"-{len(self._shards):05}.tokens", index=".documents", sources=".sources")
        return appended(self._directory / f"{self._name}{endings[kind]}", size)


def appended(path: Path, keep: int) -> HashedFile:
    """A file that grows, with the first `keep` bytes of what is there."""
    try:
        return HashedFile(path, keep=keep, buffer=2**20)
    except ValueError as error:
        raise ValueError(f"dataset: {error}; start over with --restart") from None
