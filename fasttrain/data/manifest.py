"""dataset.json: what the files of a dataset are. The page docs/data.md explains the format."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fasttrain.data.sources import RECORD

FORMAT = "fasttrain dataset"
VERSION = 1
NAME = "dataset.json"
AGAIN = "copy it again, or prepare the dataset again"
PARTIAL = ".partial-"  # in the name of a directory that a writer has not finished


@dataclass(frozen=True, kw_only=True)
class File:
    """A file beside dataset.json."""

    name: str
    size: int  # bytes
    sha256: str

    def check_size(self, directory: Path) -> None:
        """Raise unless the file is there, whole by its size."""
        path = directory / self.name
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise FileNotFoundError(f"dataset: {path} is missing; {AGAIN}") from None
        if size != self.size:
            state = "truncated, or still being copied" if size < self.size else "not the file that was prepared"
            raise ValueError(f"dataset: {path} has {size} bytes instead of {self.size}: {state}; {AGAIN}")

    def check_content(self, directory: Path) -> None:
        """Raise unless the file is what was written. Reads it whole."""
        self.check_size(directory)
        with open(directory / self.name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise ValueError(
                f"dataset: {directory / self.name} has changed since it was prepared (sha256 {found[:12]}..., was "
                f"{self.sha256[:12]}...); {AGAIN}"
            )


@dataclass(frozen=True, kw_only=True)
class Split:
    """A stream of tokens, over several files, and where its documents end."""

    tokens: int
    documents: int
    bytes: int  # of text, before it became tokens
    shards: tuple[File, ...]
    index: File
    sources: File | None = None  # where each document came from (sources.py)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of dataset.json."""

    source: str  # where the text came from, for people
    dtype: str  # of a token on disk: uint16 or uint32
    vocab: int
    separator: int
    tokenizer: File
    splits: dict[str, Split]
    sources: File | None = None  # the files that documents came from
    report: File | None = None  # the documents that were left out, and why
    left_out: dict[str, int] | None = None  # how many, by reason

    def dump(self) -> str:
        return json.dumps(dict(format=FORMAT, version=VERSION) | _stated(asdict(self)), indent=1) + "\n"

    def without_origin(self) -> Manifest:
        """What is equal for equal data, wherever it came from."""
        splits = {name: replace(split, sources=None) for name, split in self.splits.items()}
        return replace(self, source="", sources=None, report=None, left_out=None, splits=splits)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raise an error that says what is wrong, and what to do, unless `directory` holds a finished dataset."""
        path = directory / NAME
        if PARTIAL in directory.name:  # it may have everything but its name
            raise ValueError(
                f"dataset: {directory} was never finished: its preparation stopped early; prepare it again"
            )
        try:
            text = path.read_text("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise _not_a_dataset(directory) from None
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"dataset: {path} is damaged ({error}); {AGAIN}") from None
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ValueError(f'dataset: {path} does not say "format": "{FORMAT}", so another program has written it')
        version = found.pop("version", None)
        if version != VERSION:
            raise ValueError(
                f"dataset: {path} has version {version}, this fasttrain reads version {VERSION}; prepare the dataset "
                "again, or use the fasttrain that wrote it"
            )
        try:
            manifest = _parsed(found)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"dataset: {path} is damaged ({error}); {AGAIN}") from None
        manifest._check(directory)
        return manifest

    def files(self) -> list[File]:
        shards = [file for split in self.splits.values() for file in (*split.shards, split.index, split.sources)]
        return [file for file in (self.tokenizer, self.sources, self.report, *shards) if file]

    def _check(self, directory: Path) -> None:
        """Sizes only: nothing but directory entries is read, whatever the size of the dataset."""
        for file in self.files():
            file.check_size(directory)
        width = {"uint16": 2, "uint32": 4}.get(self.dtype)
        for name, split in self.splits.items():
            written = sum(shard.size for shard in split.shards)
            if split.sources and split.sources.size != RECORD.itemsize * split.documents:
                raise ValueError(
                    f"dataset: {directory / NAME} contradicts itself: {name} has {split.documents} documents, and "
                    f"{split.sources.size} bytes of sources; {AGAIN}"
                )
            if width is None or written != width * split.tokens or split.index.size != 8 * split.documents:
                raise ValueError(
                    f"dataset: {directory / NAME} contradicts itself: {name} has {split.tokens} tokens of {self.dtype} "
                    f"in {written} bytes, {split.documents} documents in {split.index.size} bytes; {AGAIN}"
                )


def _parsed(found: dict[str, Any]) -> Manifest:
    splits = {
        name: Split(
            **split | dict(shards=tuple(File(**s) for s in split["shards"])) | _files(split, "index", "sources")
        )
        for name, split in found["splits"].items()
    }
    return Manifest(**found | _files(found, "tokenizer", "sources", "report") | dict(splits=splits))


def _files(found: dict[str, Any], *names: str) -> dict[str, File]:
    return {name: File(**found[name]) for name in names if name in found}


def _stated(value: Any) -> Any:
    """Without what is None: a dataset that has no sources does not mention them."""
    if isinstance(value, dict):
        return {key: _stated(inner) for key, inner in value.items() if inner is not None}
    return value


def _not_a_dataset(directory: Path) -> Exception:
    if not directory.exists():
        return FileNotFoundError(
            f"dataset: {directory} does not exist; name a prepared dataset, or none for Python's standard library"
        )
    if not directory.is_dir():
        return ValueError(f"dataset: {directory} is a file; name the directory that holds {NAME}")
    return ValueError(f"dataset: {directory} has no {NAME}: no dataset, or copied in part; copy it again")
