"""Token files of nanoGPT, llm.c and modded-nanogpt.

nanoGPT: train.bin and val.bin, each nothing but uint16 tokens; documents end with GPT-2's separator.
llm.c and modded-nanogpt: NAME_train_000001.bin, NAME_val_000000.bin, ...; a header of 256 int32 (magic, version,
number of tokens, zeros), then the tokens; documents begin with the separator.

All numbers are little-endian. Nothing else is known of these files, so that a document begins at every separator.
"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fasttrain.data.dataset import corrupt
from fasttrain.data.formats.dataset import GPT2, LLAMA3, REWRITE, FoundFiles
from fasttrain.data.stream import TokenStream

RAW = ("train.bin", "val.bin")
HEADER = 256 * 4  # bytes
# by magic number: version, type of tokens, vocabulary
HEADERS = {20240520: (1, "uint16", GPT2), 20240801: (7, "uint32", LLAMA3)}
QUESTIONS = 20240522  # llm.c's multiple-choice evaluations
DATES = range(20_230_000, 20_400_000)  # magic numbers of this family are dates
OTHERS = {
    b"PK\x03\x04": "a zip archive, as torch.save and numpy.savez write",
    b"\x80\x02\x8a\x0a": "a pickle of torch.save",
    b"\x93NUMPY": "a NumPy file, with a header",
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
}


class _Shard(NamedTuple):
    path: Path
    magic: int | None  # None: no header
    tokens: int


def split_of(path: Path) -> str | None:
    """The split that a file's name speaks of."""
    words = re.split(r"[^a-z]+", path.stem.lower())
    if {"val", "valid", "validation"} & set(words):
        return "validation"
    return "train" if "train" in words else None


def find(path: Path) -> FoundFiles | None:
    """The files of a directory, or one file, as the training data."""
    if path.is_file() and path.suffix != ".bin":
        _refuse_others(path)
        return None
    splits = {"train": [path]} if path.is_file() else _of_directory(path)
    if not splits:
        return None
    shards = {name: [_read(file) for file in files] for name, files in splits.items()}
    first = shards["train"][0]
    for shard in (shard for files in shards.values() for shard in files):
        if shard.magic != first.magic:
            one, other = (f"format {x.magic}" if x.magic else "no header" for x in (shard, first))
            both = f"({one}) and {first.path} ({other}) do not belong together"
            raise corrupt(shard.path, both, "keep them in directories of their own")
    kind, dtype, header, known = "raw tokens of nanoGPT", "uint16", 0, None
    if first.magic is not None:
        kind, header, (_, dtype, known) = "shards of llm.c", HEADER, HEADERS[first.magic]
    streams = {
        name: TokenStream(splits[name], [file.tokens for file in files], None, dtype=np.dtype(dtype), header=header)
        for name, files in shards.items()
    }
    return FoundFiles(kind, streams, known)


def _of_directory(path: Path) -> dict[str, list[Path]]:
    files = sorted(path.glob("*.bin"))
    splits = {name: [file for file in files if split_of(file) == name] for name in ("train", "validation")}
    if not splits["train"]:  # early llm.c did not name splits
        splits["train"] = [file for file in files if split_of(file) is None]
    if files and not splits["train"]:
        raise corrupt(path, f"holds validation data only: {files[0].name}", "name the file in validation.sets")
    return {name: chosen for name, chosen in splits.items() if chosen}


def _refuse_others(path: Path) -> bytes:
    """The first bytes of a file, unless they are those of something else."""
    with open(path, "rb") as file:
        head = file.read(HEADER)
    for beginning, meaning in OTHERS.items():
        if head.startswith(beginning):
            remedy = "prepare its text first, or write its tokens as uint16 to train.bin"
            raise corrupt(path, f"is {meaning}, not tokens", remedy)
    return head


def _read(path: Path) -> _Shard:
    """The file, if it is whole."""
    size = path.stat().st_size
    if not size:
        raise corrupt(path, "is empty", REWRITE)
    head = _refuse_others(path)
    magic = int.from_bytes(head[:4], "little")
    if magic in HEADERS:
        return _with_header(path, size, head)
    if magic in DATES:
        meaning = "holds questions, not text" if magic == QUESTIONS else "is of no kind that fasttrain reads"
        kinds = f"token files of llm.c begin with {' or '.join(map(str, HEADERS))}"
        raise corrupt(path, f"begins with {magic} and {meaning}", kinds)
    if path.name not in RAW:
        trouble = f"has no header of llm.c (it begins with {head[:4].hex(' ')})"
        raise corrupt(path, trouble, f"if it is tokens without header, call it {' or '.join(RAW)}")
    if size % 2:
        trouble = f"has {size} bytes, which is no whole number of uint16 tokens: truncated, or not tokens"
        raise corrupt(path, trouble, REWRITE)
    return _Shard(path, None, size // 2)


def _with_header(path: Path, size: int, head: bytes) -> _Shard:
    if len(head) < HEADER:
        raise corrupt(path, f"has {size} bytes, less than its header of {HEADER}: truncated", REWRITE)
    magic, version, tokens = map(int, np.frombuffer(head, "<i4")[:3])
    readable, dtype, _ = HEADERS[magic]
    if version != readable:
        trouble = f"has version {version} of format {magic}, fasttrain reads version {readable}"
        raise corrupt(path, trouble, "write it again with that version")
    if tokens <= 0:
        raise corrupt(path, f"has {tokens} tokens by its header", REWRITE)
    expected = HEADER + tokens * np.dtype(dtype).itemsize
    if size != expected:
        state = "truncated, or still being copied" if size < expected else "it holds more than its header says"
        wanted = f"instead of {expected}, for {tokens} tokens of {dtype}"
        raise corrupt(path, f"has {size} bytes {wanted}: {state}", REWRITE)
    return _Shard(path, magic, tokens)
