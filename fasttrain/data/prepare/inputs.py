"""Which files are prepared, in which order, and how each is read."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

JSONL = (".jsonl", ".ndjson")
PACKED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
FORMATS = ("auto", "text", "jsonl", "parquet")


class Input(NamedTuple):
    path: str
    kind: str  # text, jsonl or parquet
    packed: str  # gzip, zstd, or empty
    size: int
    mtime_ns: int

    def check_unchanged(self) -> None:
        """Raise if the file is not what it was when the preparation began."""
        found = os.stat(self.path)
        if (found.st_size, found.st_mtime_ns) != (self.size, self.mtime_ns):
            raise ValueError(
                f"prepare: {self.path} has changed since the preparation began; wait until it is written, and prepare "
                "again with --restart"
            )


def find_inputs(
    names: Sequence[str | Path],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    format: str = "auto",
) -> list[Input]:
    """The files of `names`, each once: files, directories with all below them, and patterns.

    include, exclude: patterns of names, or of paths below a directory, for what is found in directories.
    """
    if not names:
        raise ValueError("prepare: there is no input; name files, directories or patterns such as 'data/*.jsonl'")
    found: list[Input] = []
    known: set[tuple[int, int]] = set()  # device and number: a file by two names is one file
    for name in names:
        paths = _expanded(str(name))
        files = [file for path in paths for file in (_below(path, include, exclude) if os.path.isdir(path) else [path])]
        if not files:
            only = f" that match --include {' '.join(include)}" if include else ""
            trouble = f"has no files{only}" if paths else "matches nothing"
            raise ValueError(f"prepare: {name} {trouble}; check the path")
        for file in files:
            state = os.stat(file)
            if (state.st_dev, state.st_ino) not in known:
                known.add((state.st_dev, state.st_ino))
                found.append(_input(file, state, format))
    return found


def _input(path: str, state: os.stat_result, format: str) -> Input:
    stem, ending = os.path.splitext(path.lower())
    packed = PACKED.get(ending, "")
    inner = os.path.splitext(stem)[1] if packed else ending
    kind = "text"
    if inner in JSONL or (packed and inner == ".json"):  # C4 and others name packed JSONL .json.gz
        kind = "jsonl"
    elif inner == ".parquet":
        kind = "parquet"
    return Input(os.path.abspath(path), kind if format == "auto" else format, packed, state.st_size, state.st_mtime_ns)


def _expanded(name: str) -> list[str]:
    name = os.path.expanduser(name)
    if os.path.lexists(name):
        return [name]
    if glob.has_magic(name):
        return sorted(glob.glob(name, recursive=True))
    raise FileNotFoundError(
        f"prepare: {name} does not exist; name files, directories or patterns such as 'data/*.jsonl'"
    )


def _below(top: str, include: Sequence[str], exclude: Sequence[str]) -> Iterator[str]:
    """Regular files in the order of names; nothing hidden (.git, .cache), no compiled Python."""
    entered: set[tuple[int, int]] = set()

    def walk(directory: str, inside: str) -> Iterator[str]:
        state = os.stat(directory)
        if (state.st_dev, state.st_ino) in entered:  # a link to a directory above, or to one that was read
            return
        entered.add((state.st_dev, state.st_ino))
        with os.scandir(directory) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            relative = f"{inside}{entry.name}"
            if entry.name.startswith(".") or entry.name == "__pycache__" or _matches(relative, exclude):
                continue
            if entry.is_symlink() and not os.path.exists(entry.path):  # a link to nowhere
                continue
            if entry.is_dir():
                yield from walk(entry.path, f"{relative}/")
            elif entry.is_file() and (not include or _matches(relative, include)):
                yield entry.path

    return walk(top, "")


def _matches(path: str, patterns: Sequence[str]) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatch(path if "/" in pattern else name, pattern) for pattern in patterns)
