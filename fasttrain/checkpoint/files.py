"""Files that can be trusted: hashed on their way to the disk, and again on their way back.

The checksum of what was meant and that of what is there are different things. Only comparing them shows that a file
was written well; afterwards the same comparison shows that it has stayed so.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of a checkpoint."""

    name: str
    size: int  # bytes
    sha256: str

    def check(self, directory: Path) -> None:
        """Raise unless the file is what was written. Reads it whole, from the disk."""
        path = directory / self.name
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        if size != self.size:
            state = "truncated" if size < self.size else "too long"
            raise ValueError(f"{path} is {state}: it has {size} bytes instead of {self.size}")
        found = _digest(path)
        if found != self.sha256:
            raise ValueError(f"{path} is damaged: its sha256 is {found[:12]}... instead of {self.sha256[:12]}...")


class NewFile(io.BufferedWriter):
    """A file that knows the checksum of what is written to it, and is on the disk once closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))  # small buffer: torch writes pieces of 512 KB, which then pass it by
        self._sha256 = hashlib.sha256()
        self._size = 0

    def write(self, data: ReadableBuffer, /) -> int:
        self._sha256.update(data)
        self._size += memoryview(data).nbytes
        return super().write(data)

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()

    def record(self, name: str) -> File:
        return File(name=name, size=self._size, sha256=self._sha256.hexdigest())


def sync(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        # Pages that are still in memory would say nothing about the disk. (Those not yet written are not dropped.)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()
