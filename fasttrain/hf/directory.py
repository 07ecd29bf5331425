"""A directory that is there whole or not at all: written under a hidden name beside it, and renamed at the end."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_is_free(out: Path) -> None:
    """Raise if there is something where the directory is to be."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        state = "is not empty" if out.is_dir() else "is a file"
        raise ValueError(f"export: {out} {state}; choose another --out, or delete it first")


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """Where to write. What it holds at the end is on the disk before it is named `out`; after an error it is gone."""
    check_is_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.resolve().name}.partial"
    lock = _begun(partial)
    try:
        yield partial
        for path in partial.iterdir():
            path.chmod(partial.stat().st_mode & 0o666)  # safetensors keeps its files to the user alone
            _sync(path)
        _sync(partial)
        os.rename(partial, out)  # also over an empty directory, and over no other
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _begun(partial: Path) -> int:
    """Make it, in place of what a killed process has left; a descriptor that holds it."""
    if partial.exists():
        lock = _locked(partial)
        shutil.rmtree(partial)
        os.close(lock)
    partial.mkdir()
    return _locked(partial)


def _locked(partial: Path) -> int:
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"export: another process is writing {partial}; wait for it, or choose another --out"
        ) from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
