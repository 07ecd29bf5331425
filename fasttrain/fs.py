"""Durable files and locks: what has its name is whole and on the disk, and one process at a time writes it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fasttrain.bounds import Bounds

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

DISK_SLACK = 1.02  # file systems round up, and small files come on top
DISK_RESERVE = 64 * 2**20  # bytes to leave: metrics and events are written to the same place

FILE_BYTES = Bounds(0, 2**62)

StatVfs = Callable[[Path], os.statvfs_result]
_held: set[int] = set()  # descriptors of the locks of this process, which a forked child inherits


@dataclass(frozen=True, kw_only=True)
class FileChecksum:
    """Size and content of a file, to be compared with what is on the disk later."""

    name: str
    size: Annotated[int, FILE_BYTES]
    sha256: str

    def __post_init__(self) -> None:
        if "/" in self.name or not self.name.isprintable() or self.name in ("", ".", ".."):  # leads anywhere
            raise ValueError(f"{self.name!r} is no name of a file beside it")

    def check_size(self, directory: Path) -> None:
        """Raise unless the file is there, whole by its size."""
        path = directory / self.name
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing") from None
        if size != self.size:
            state = "truncated, or still being copied" if size < self.size else "too long"
            raise ValueError(f"{path} is {state}: it has {size} bytes instead of {self.size}")

    def check(self, directory: Path) -> None:
        """Raise unless the file is what was written. Reads all of it, from the disk."""
        self.check_size(directory)
        found = sha256_of(directory / self.name)
        if found != self.sha256:
            raise ValueError(
                f"{directory / self.name} is corrupt: its sha256 is {found[:12]}... instead of {self.sha256[:12]}..."
            )


class HashedFile(io.BufferedWriter):
    """A file whose checksum is known as soon as it is written, and which is on the disk once closed."""

    def __init__(self, path: Path, *, keep: int | None = None, buffer: int = io.DEFAULT_BUFFER_SIZE) -> None:
        """keep: bytes of an existing file to append to; what is beyond them goes. None: the file must be new."""
        super().__init__(io.FileIO(path, "x" if keep is None else "r+" if keep else "w"), buffer)
        self._path, self._sha256, self._size = path, hashlib.sha256(), 0
        if not keep:
            return
        with open(path, "rb") as file:
            while self._size < keep and (data := file.read(min(2**20, keep - self._size))):
                self._sha256.update(data)
                self._size += len(data)
        if self._size < keep:
            raise ValueError(f"{path} has {self._size} bytes instead of {keep}")
        self.truncate(keep)
        self.seek(keep)

    def write(self, data: ReadableBuffer, /) -> int:
        self._sha256.update(data)
        self._size += memoryview(data).nbytes
        return super().write(data)

    def sync(self) -> int:
        """Have everything on the disk; the size."""
        self.flush()
        os.fsync(self.fileno())
        return self._size

    def close(self) -> None:
        try:
            if not self.closed:
                self.sync()
        finally:
            super().close()

    def finish(self) -> FileChecksum:
        """Close the file; its checksum."""
        self.close()
        return self.checksum()

    def checksum(self) -> FileChecksum:
        """The checksum of what has been written."""
        return FileChecksum(name=self._path.name, size=self._size, sha256=self._sha256.hexdigest())


def sha256_of(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        # Pages that are still in memory would say nothing about the disk. (Those not yet written are not dropped.)
        advise(file.fileno(), "DONTNEED")
        return hashlib.file_digest(file, "sha256").hexdigest()


def advise(descriptor: int, advice: str, begins: Iterable[int] = (0,), size: int = 0) -> None:
    """Tell the system how a file, or `size` bytes from each begin, is going to be read; macOS has no such call."""
    if sys.platform != "darwin":
        meaning = getattr(os, f"POSIX_FADV_{advice}")
        for begin in begins:
            os.posix_fadvise(descriptor, begin, size, meaning)


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, texts: Iterable[str]) -> FileChecksum:
    """Write a file: whoever opens it, now or after a crash, has the former content or this one, whole.

    One process at a time. What a killed one leaves beside it, the next one replaces.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with HashedFile(partial, keep=0, buffer=2**20) as file:
            for text in texts:
                file.write(text.encode("utf-8"))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)
    return replace(file.checksum(), name=path.name)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what another library writes: beside the path, renamed at the end; nothing stays if it fails."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_is_new(out: Path) -> None:
    """Raise if there is something where a directory is to be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        state = "is not empty" if out.is_dir() else "is a file"
        raise ValueError(f"{out} {state}; choose another --out, or delete it first")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Where to write a directory that is there whole or not at all: hidden beside it, renamed at the end."""
    check_is_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, taken = out.parent / f".{out.resolve().name}.partial", f"another process is writing {out}"
    if partial.exists():  # of a process that was killed
        with exclusive_lock(partial, taken):
            shutil.rmtree(partial)
    partial.mkdir()
    with exclusive_lock(partial, taken):
        try:
            yield partial
            for path in partial.iterdir():
                sync(path)
            sync(partial)
            os.rename(partial, out)  # also over an empty directory, and over no other
            sync(out.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def exclusive_lock(path: Path, taken: str | None) -> Iterator[bool]:
    """Hold a lock on a directory, or on a file that is made for it; False where the file system has no locks.

    The system frees the lock of a process that dies. taken: the error if another process holds it; None: wait for it.
    """
    locked = True
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if taken else 0))
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"{taken}; wait for it, or choose another --out") from None
    except OSError:  # a file system without locks
        locked = False
    _held.add(lock)
    try:
        yield locked
    finally:
        _held.discard(lock)
        os.close(lock)


def close_inherited_locks() -> None:
    """Leave the locks to the parent, in a forked child: they are free once the parent ends, even if it is killed."""
    for lock in _held:
        os.close(lock)
    _held.clear()


def is_in_place(lock: Path) -> bool:
    """Whether a file is still the one that this process locked: its directory was not deleted, moved or replaced."""
    try:
        found = os.stat(lock)
    except OSError as error:  # of another kind: it may still be there, and whoever writes is told
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
    return any(os.path.samestat(os.fstat(held), found) for held in _held)


def is_locked(path: Path) -> bool:
    """Whether a process of this machine holds the lock."""
    try:
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # none, or a file system without locks
        return False
    return False


def free_bytes(directory: Path, statvfs: StatVfs = os.statvfs) -> int:
    """Disk space that this user may fill in a directory, which may not exist yet."""
    while not directory.exists():
        directory = directory.parent
    status = statvfs(directory)
    return status.f_bavail * status.f_frsize
