"""Where the documents of a dataset came from: a record for each document, and the list of the files they name."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

# offset, line and size are those of Source; line 0: a row of a Parquet file
RECORD = np.dtype([("offset", "<u8"), ("line", "<u8"), ("file", "<u4"), ("size", "<u4")])


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A line of sources.jsonl: a file as it was when it was prepared."""

    path: Path
    size: int
    mtime_ns: int

    def dump(self) -> str:
        return json.dumps(dict(path=str(self.path), size=self.size, mtime_ns=self.mtime_ns)) + "\n"

    def is_unchanged(self) -> bool:
        """Whether the file is still there, with the size and the time of then."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the text of a document is."""

    file: SourceFile
    offset: int  # in bytes, in the decompressed content of the file; of a Parquet file, the row, from 0
    size: int  # in bytes: of the text, or of the line of a JSONL file
    line: int | None  # from 1; None for a row of a Parquet file

    def __str__(self) -> str:
        return f"{self.file.path}, row {self.offset}" if self.line is None else f"{self.file.path}:{self.line}"


def read_files(files: Path) -> list[SourceFile]:
    """All lines of sources.jsonl."""
    with open(files, encoding="utf-8") as lines:
        return [_file(line) for line in lines]


def read_source(
    records: Path,  # NAME.sources, an array of RECORD
    files: Path,  # sources.jsonl
    document: int,
) -> Source:
    """Reads one record, and the list of files up to the one that it names."""
    with open(records, "rb") as file:
        file.seek(document * RECORD.itemsize)
        record = np.frombuffer(file.read(RECORD.itemsize), RECORD)[0]
    with open(files, encoding="utf-8") as lines:
        found = _file(next(islice(lines, int(record["file"]), None)))
    return Source(
        file=found,
        offset=int(record["offset"]),
        size=int(record["size"]),
        line=int(record["line"]) or None,
    )


def _file(line: str) -> SourceFile:
    found = json.loads(line)
    return SourceFile(**found | dict(path=Path(found["path"])))
