"""Megatron's indexed datasets: PREFIX.bin holds tokens, PREFIX.idx where sequences and documents lie.

PREFIX.idx, little-endian and without gaps, S sequences, D documents:

    "MMIDIDX\\0\\0", uint64 version 1, uint8 type of tokens, uint64 S, uint64 D + 1,
    S int32 lengths of sequences in tokens, S int64 offsets of sequences in bytes,
    D + 1 int64 numbers of the sequences that documents begin with, the last one being S

A header of 34 bytes leaves every number unaligned, and NumPy searches aligned arrays only: it would copy the whole
index. So the search is written out here, and reads some pages.
"""

import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fasttrain.data.dataset import corrupt
from fasttrain.data.formats.bins import split_of
from fasttrain.data.formats.dataset import REWRITE, FoundFiles
from fasttrain.data.stream import MappedFile, TokenStream

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floats


def find(path: Path) -> FoundFiles | None:
    """One dataset, by its prefix or either file, or a directory with one for each split."""
    prefixes = {}
    if path.is_dir():
        prefixes = _of_directory(path)
    elif path.suffix == ".idx" or (path.suffix == ".bin" and path.with_suffix(".idx").exists()):
        prefixes = {"train": path.with_suffix("")}
    elif not path.exists() and (_with(path, ".idx").exists() or _with(path, ".bin").exists()):
        prefixes = {"train": path}
    splits = {name: _read(prefix) for name, prefix in prefixes.items()}
    return FoundFiles("a dataset of Megatron", splits) if splits else None


def _of_directory(path: Path) -> dict[str, Path]:
    prefixes: dict[str, Path] = {}
    for index in sorted(path.glob("*.idx")):
        name = split_of(index) or "train"
        if name in prefixes:
            trouble = f"holds several datasets of Megatron: {prefixes[name].name} and {index.stem}"
            raise corrupt(path, trouble, f"name one of them ({path / index.stem}), or mix them (data.mixture)")
        prefixes[name] = index.with_suffix("")
    if prefixes and "train" not in prefixes:
        only = prefixes["validation"].name
        raise corrupt(path, f"holds validation data only: {only}", "name it in validation.sets")
    return prefixes


def _read(prefix: Path) -> TokenStream:
    """The two files, if they are whole and belong together."""
    index, data = _with(prefix, ".idx"), _with(prefix, ".bin")
    for missing, other in ((index, data), (data, index)):
        if not missing.exists():
            raise FileNotFoundError(f"dataset: {missing} is missing, which {other} belongs to (Megatron); copy both")
    with open(index, "rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise corrupt(index, f"begins with {head[:9]!r} instead of {MAGIC!r}: not an index of Megatron", REWRITE)
    if len(head) < HEADER.size:
        raise corrupt(index, f"has {len(head)} bytes: truncated", REWRITE)
    _, version, code, sequences, bounds = HEADER.unpack(head)
    if version != VERSION:
        raise corrupt(index, f"has version {version}, fasttrain reads version {VERSION}", "write it again with that")
    if code not in TYPES:
        types = ", ".join(f"{name} ({code})" for code, name in TYPES.items())
        raise corrupt(index, f"has tokens of type {code}", f"tokens are integers: {types}")
    if not sequences or bounds < 2:
        raise corrupt(index, f"has {sequences} sequences in {max(0, bounds - 1)} documents: empty", REWRITE)
    size, expected = index.stat().st_size, HEADER.size + 12 * sequences + 8 * bounds
    if size != expected:
        state = "truncated, or still being copied" if size < expected else "it holds more, as of several modes"
        wanted = f"instead of {expected}, for {sequences} sequences in {bounds - 1} documents"
        raise corrupt(index, f"has {size} bytes {wanted}: {state}", REWRITE)
    dtype = np.dtype(TYPES[code])
    ends = Ends(index, data, dtype.itemsize, sequences, bounds)
    return TokenStream([data], [ends.total], ends, dtype=dtype)


class Ends:
    """Where documents end, in tokens, read from the index one by one."""

    def __init__(self, index: Path, data: Path, width: int, sequences: int, bounds: int) -> None:
        self._width = width
        mapping = MappedFile(index, np.dtype("u1")).array
        self._lengths = np.frombuffer(mapping, "<i4", sequences, HEADER.size)
        self._offsets = np.frombuffer(mapping, "<i8", sequences, HEADER.size + 4 * sequences)
        self._bounds = np.frombuffer(mapping, "<i8", bounds, HEADER.size + 12 * sequences)
        self.total = (int(self._offsets[-1]) + int(self._lengths[-1]) * width) // width
        size, expected = data.stat().st_size, self.total * width
        if expected != size or self._offsets[0] != 0:
            trouble = f"has {size} bytes instead of {expected} by {index}: truncated, or they do not belong together"
            raise corrupt(data, trouble, "copy both again")
        first, last = int(self._bounds[0]), int(self._bounds[-1])
        if first != 0 or last != sequences:
            raise corrupt(index, f"has documents from sequence {first} to {last}, but {sequences} sequences", REWRITE)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, numbers: Any) -> np.ndarray:
        """Where the documents of these numbers end; -1 is the last one."""
        sequences = self._bounds[np.asarray(numbers) % len(self) + 1]  # the one that begins the next document
        inside = np.minimum(sequences, len(self._offsets) - 1)
        return np.where(sequences == len(self._offsets), self.total, self._offsets[inside] // self._width)

    def searchsorted(self, positions: np.ndarray, /, side: Literal["left", "right"]) -> np.ndarray:
        """Count, as that of an array: how many documents end before each position, or (right) at it."""
        low, high = np.zeros(len(positions), np.int64), np.full(len(positions), len(self), np.int64)
        while (low < high).any():  # halved each time, for all positions at once
            middle = (low + high) // 2
            ends = self[np.minimum(middle, len(self) - 1)]
            before = (ends <= positions if side == "right" else ends < positions) & (low < high)
            low, high = np.where(before, middle + 1, low), np.where(before, high, middle)
        return low


def _with(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)
