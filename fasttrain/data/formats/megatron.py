"""Megatron's indexed datasets: PREFIX.bin holds tokens, PREFIX.idx where sequences and documents lie.

PREFIX.idx, little-endian and without gaps, S sequences, D documents:

    "MMIDIDX\\0\\0", uint64 version 1, uint8 type of tokens, uint64 S, uint64 D + 1,
    S int32 lengths of sequences in tokens, S int64 offsets of sequences in bytes,
    D + 1 int64 numbers of the sequences that documents begin with, the last one being S
"""

import struct
from pathlib import Path

import numpy as np

from fasttrain.data.dataset import corrupt
from fasttrain.data.formats.bins import split_of
from fasttrain.data.formats.dataset import REWRITE, FoundFiles
from fasttrain.data.stream import TokenFile, TokenStream, document_ends, gather

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
    return TokenStream([data], [ends.total], document_ends(bounds - 1, ends.at), dtype=dtype)


class Ends:
    """Where documents end, in tokens, by the three arrays of the index."""

    def __init__(self, index: Path, data: Path, width: int, sequences: int, bounds: int) -> None:
        self._width, self._sequences = width, sequences
        lengths, offsets = HEADER.size, HEADER.size + 4 * sequences
        self._offsets = TokenFile(index, np.dtype("<i8"), sequences, header=offsets)
        self._bounds = TokenFile(index, np.dtype("<i8"), bounds, header=offsets + 8 * sequences)
        last = TokenFile(index, np.dtype("<i4"), sequences, header=lengths).read(sequences - 1, sequences)
        self.total = (int(self._offsets.read(sequences - 1, sequences)[0]) + int(last[0]) * width) // width
        size, expected = data.stat().st_size, self.total * width
        if expected != size or self._offsets.read(0, 1)[0] != 0:
            trouble = f"has {size} bytes instead of {expected} by {index}: truncated, or they do not belong together"
            raise corrupt(data, trouble, "copy both again")
        begin, end = (int(self._bounds.read(number, number + 1)[0]) for number in (0, bounds - 1))
        if begin != 0 or end != sequences:
            raise corrupt(index, f"has documents from sequence {begin} to {end}, but {sequences} sequences", REWRITE)

    def at(self, numbers: np.ndarray) -> np.ndarray:  # (n,) -> (n,)
        """The ends of these documents: where the sequence lies that begins the next one."""
        sequences = np.clip(gather(self._bounds, numbers + 1), 0, self._sequences)
        offsets = gather(self._offsets, np.minimum(sequences, self._sequences - 1)) // self._width
        return np.where(sequences == self._sequences, self.total, offsets)


def _with(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)
