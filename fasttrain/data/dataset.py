"""A prepared dataset: a directory of token shards, document indices, a tokenizer and dataset.json.

dataset.json says what the other files are; docs/data.md explains the format. A record for each document, and the list
of the files that records name, say where documents came from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from fasttrain.bounds import Bounds
from fasttrain.config import VOCAB
from fasttrain.data.stream import TokenFile, TokenStream
from fasttrain.fs import FILE_BYTES, FileChecksum
from fasttrain.schema import build, parse

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = "fasttrain dataset"
VERSION = 1
NAME = "dataset.json"
REMEDY = "copy it again, or prepare the dataset again"
# where a document came from: offset, line and size are those of DocumentSource; line 0: a row of a Parquet file
RECORD = np.dtype([("offset", "<u8"), ("line", "<u8"), ("file", "<u4"), ("size", "<u4")])
COUNT = Bounds(1, 2**62)
PARTIAL = ".partial-"  # in the name of a directory that a writer has not finished


def corrupt(path: Path, trouble: str, remedy: str = REMEDY) -> ValueError:
    """The error of a file that is not what it should be."""
    return ValueError(f"dataset: {path} {trouble}; {remedy}")


@contextmanager
def with_remedy() -> Iterator[None]:
    """Add what to do to the errors of a file that is not what was prepared."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"dataset: {error}; {REMEDY}") from None


def read_tokenizer(path: Path, asked: str) -> Tokenizer:
    """Read a tokenizer.json. asked: the command or setting that names it, for the error."""
    from tokenizers import Tokenizer

    with tokenizer_errors(f"{asked}: {path} is no tokenizer.json of Hugging Face tokenizers"):
        tokenizer = Tokenizer.from_file(str(path))
        numbers = tokenizer.get_vocab().values()
        if max(numbers, default=2**32) > 2 * len(numbers) + 2**20:  # the library makes space for all in between
            raise ValueError(f"of its {len(numbers)} tokens, one has number {max(numbers, default='none')}")
        Tokenizer.from_str(tokenizer.to_str())  # tokens that two numbers have, or of merges that are none, show here
        return tokenizer


@contextmanager
def tokenizer_errors(trouble: str) -> Iterator[None]:
    """The library has no class of its own for errors; a panic of Rust is not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{trouble} ({error})") from None


@dataclass(frozen=True, kw_only=True)
class Split:
    """A stream of tokens, over several files, and where its documents end."""

    tokens: Annotated[int, COUNT]
    documents: Annotated[int, COUNT]
    bytes: Annotated[int, FILE_BYTES]  # of text, before it became tokens
    shards: tuple[FileChecksum, ...]
    index: FileChecksum
    sources: FileChecksum | None = None  # where each document came from: an array of RECORD


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of dataset.json."""

    source: str  # where the text came from, for people
    dtype: Literal["uint16", "uint32"]  # of a token on disk
    vocab: Annotated[int, VOCAB]
    separator: Annotated[int, FILE_BYTES]
    tokenizer: FileChecksum
    splits: dict[str, Split]
    sources: FileChecksum | None = None  # the files that documents came from
    report: FileChecksum | None = None  # the documents that were dropped, and why
    dropped: dict[str, int] | None = None  # how many, by reason

    def dump(self) -> str:
        return json.dumps(dict(format=FORMAT, version=VERSION) | _stated(asdict(self)), indent=1) + "\n"

    def without_origin(self) -> Manifest:
        """A manifest that is equal for equal data, wherever it came from."""
        splits = {name: replace(split, sources=None) for name, split in self.splits.items()}
        return replace(self, source="", sources=None, report=None, dropped=None, splits=splits)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raise an error that says what is wrong, and what to do, unless `directory` holds a finished dataset."""
        path = directory / NAME
        if PARTIAL in directory.name:  # it may have everything but its name
            raise corrupt(directory, "was never finished: its preparation stopped early", "prepare it again")
        if not directory.exists():
            raise FileNotFoundError(
                f"dataset: {directory} does not exist; name a prepared dataset, or none for Python's standard library"
            )
        if not directory.is_dir():
            raise corrupt(directory, "is a file", f"name the directory that holds {NAME}")
        if not path.exists():
            raise corrupt(directory, f"has no {NAME}: no dataset, or copied in part", "copy it again")
        try:
            found = parse(path.read_text("utf-8"))
        except ValueError as error:
            raise corrupt(path, f"is corrupt ({error})") from None
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise corrupt(path, f'does not say "format": "{FORMAT}"', "another program has written it")
        if (version := found.pop("version", None)) != VERSION:
            remedy = "prepare the dataset again, or use the fasttrain that wrote it"
            raise corrupt(path, f"has version {version}, this fasttrain reads version {VERSION}", remedy)
        try:
            manifest: Manifest = build(cls, found)
        except ValueError as error:
            raise corrupt(path, f"is corrupt ({error})") from None
        manifest._check(directory)
        return manifest

    def files(self) -> list[FileChecksum]:
        shards = [file for split in self.splits.values() for file in (*split.shards, split.index, split.sources)]
        return [file for file in (self.tokenizer, self.sources, self.report, *shards) if file]

    def _check(self, directory: Path) -> None:
        """Compare sizes: nothing but directory entries is read, whatever the size of the dataset."""
        with with_remedy():
            for file in self.files():
                file.check_size(directory)
        if self.separator >= self.vocab:
            raise corrupt(directory / NAME, f"has separator {self.separator} in a vocabulary of {self.vocab} tokens")
        width = np.dtype(self.dtype).itemsize
        for name, split in self.splits.items():
            written, contradicts = sum(shard.size for shard in split.shards), f"contradicts itself: {name} has"
            if split.sources and split.sources.size != RECORD.itemsize * split.documents:
                sources = f"{split.documents} documents, and {split.sources.size} bytes of sources"
                raise corrupt(directory / NAME, f"{contradicts} {sources}")
            if written != width * split.tokens or split.index.size != 8 * split.documents:
                tokens = f"{split.tokens} tokens of {self.dtype} in {written} bytes"
                documents = f"{split.documents} documents in {split.index.size} bytes"
                raise corrupt(directory / NAME, f"{contradicts} {tokens}, {documents}")


def _stated(value: Any) -> Any:
    """Remove what is None: a dataset that has no sources does not mention them."""
    if isinstance(value, dict):
        return {key: _stated(inner) for key, inner in value.items() if inner is not None}
    return value


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A line of sources.jsonl: a file as it was when it was prepared."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> SourceFile:
        state = os.stat(path)
        return cls(path=path, size=state.st_size, mtime_ns=state.st_mtime_ns)

    @classmethod
    def of(cls, line: str) -> SourceFile:
        return build(cls, parse(line))

    def dump(self) -> str:
        return json.dumps(dict(path=str(self.path), size=self.size, mtime_ns=self.mtime_ns)) + "\n"


@dataclass(frozen=True, kw_only=True)
class DocumentSource:
    """The place of a document's text."""

    file: SourceFile
    offset: int  # in bytes, in the decompressed content of the file; of a Parquet file, the row, from 0
    size: int  # in bytes: of the text, or of the line of a JSONL file
    line: int | None  # from 1; None for a row of a Parquet file

    def __str__(self) -> str:
        return f"{self.file.path}, row {self.offset}" if self.line is None else f"{self.file.path}:{self.line}"


class Dataset:
    """Opening reads dataset.json and compares file sizes; the data itself is read when it is used."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        self.vocab = self.manifest.vocab
        """Token ids are below this."""
        self.separator = self.manifest.separator
        """The token that begins every document, and thereby ends the one before."""
        self.splits = list(self.manifest.splits)
        """Names that `split` takes."""
        self.tokenizer_path = self.path / self.manifest.tokenizer.name
        self.tokenizer_digest = self.manifest.tokenizer.sha256

    @property
    def digest(self) -> str:
        """Equal for equal data, wherever it came from: dataset.json holds the checksums of everything else."""
        return hashlib.sha256(self.manifest.without_origin().dump().encode()).hexdigest()

    def split(self, name: str) -> TokenStream:
        """ "train" or "validation"."""
        if name not in self.manifest.splits:
            remedy = "prepare it with more documents or a larger share of validation"
            raise corrupt(self.path, f"has no split {name!r}, only {', '.join(self.manifest.splits)}", remedy)
        split, dtype = self.manifest.splits[name], np.dtype(self.manifest.dtype)
        paths = [self.path / shard.name for shard in split.shards]
        lengths = [shard.size // dtype.itemsize for shard in split.shards]
        return TokenStream(paths, lengths, self.path / split.index.name, dtype=dtype, separator=self.separator)

    def bytes_per_token(self, name: str) -> float:
        """Text bytes per token, separators counted as tokens: bits per byte = nats per token / ln 2 / this."""
        split = self.manifest.splits[name]
        return split.bytes / split.tokens

    def source(self, name: str, document: int) -> DocumentSource | None:
        """The file and place that a document of a split came from; None if the dataset does not know."""
        split = self.manifest.splits[name]
        if not 0 <= document < split.documents:
            raise ValueError(f"dataset: {self.path} has no document {document} in {name}, which has {split.documents}")
        if split.sources is None:
            return None
        records = TokenFile(self.path / split.sources.name, RECORD, split.documents)
        offset, line, file, size = records.read(document, document + 1)[0].tolist()
        source_files = self.source_files(file, file + 1)
        if not source_files:
            raise corrupt(self.path, f"has no source file number {file}, which document {document} of {name} came from")
        return DocumentSource(file=source_files[0], offset=offset, size=size, line=line or None)

    def source_files(self, first: int = 0, stop: int | None = None) -> list[SourceFile]:
        """Files that documents came from, by their numbers; none if the dataset does not know."""
        if self.manifest.sources is None:
            return []
        path = self.path / self.manifest.sources.name
        try:
            with open(path, encoding="utf-8") as lines:
                return [SourceFile.of(line) for line in islice(lines, first, stop)]
        except ValueError as error:
            raise corrupt(path, f"is corrupt ({error})") from None

    def source_records(self, name: str) -> np.ndarray:  # (documents,) RECORD
        """The place of every document of a split in one of these files."""
        file = self.manifest.splits[name].sources
        return np.empty(0, RECORD) if file is None else np.fromfile(self.path / file.name, RECORD)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, verified."""
        with with_remedy():
            self.manifest.tokenizer.check(self.path)
        return read_tokenizer(self.tokenizer_path, "dataset")

    def verify(self, most: int | None = None) -> None:
        """Compare every file with its checksum. Reads everything, or nothing if that is more than `most` bytes."""
        files = self.manifest.files()
        if most is None or sum(file.size for file in files) <= most:
            with with_remedy():
                for file in files:
                    file.check(self.path)
