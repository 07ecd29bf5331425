"""The files to prepare, in their order, split into chunks of a few megabytes, which workers turn into tokens.

A chunk of a plain file is a range of it, which its worker reads. What can only be read in order (compressed files) or
through a library with caches of its own (Parquet) is read here, and goes to the worker with the chunk. Where a chunk
ends does not depend on the number of workers, nor on where a preparation was interrupted.
"""

import glob
import importlib
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

JSONL = (".jsonl", ".ndjson")
PACKED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
REMEDY = "copy it again, or exclude it"
NAMING = "name files, directories or patterns such as 'data/*.jsonl'"
CHUNK_BYTES = 4 * 2**20  # tenths of a second of work, and some 100 MB of memory for its words
MAX_FILES = 256  # of a chunk, at most
READ_BYTES = 2**16  # compressed bytes that are read at a time: a gzip block grows by up to a thousand times
LONGEST_LINE = 2**28
SNIFF_BYTES = 8192  # at the start of a file: they tell whether it is binary
LINE_SEARCH_BYTES = 2**20  # a text without a line end within this is split anywhere


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
            remedy = "wait until it is written, and prepare again with --restart"
            raise unusable(self, "has changed since the preparation began", remedy)


def unusable(input: Input, trouble: str, remedy: str = REMEDY) -> ValueError:
    return ValueError(f"prepare: {input.path} {trouble}; {remedy}")


def find_inputs(
    names: Sequence[str | Path], *, include: Sequence[str] = (), exclude: Sequence[str] = (), format: str = "auto"
) -> list[Input]:
    """The files of `names`, each once: files, directories with all below them, and patterns.

    include, exclude: patterns of names, or of paths below a directory, for what is found in directories.
    """
    if not names:
        raise ValueError(f"prepare: there is no input; {NAMING}")
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
    kind = "parquet" if inner == ".parquet" else "text"
    if inner in JSONL or (packed and inner == ".json"):  # C4 and others name packed JSONL .json.gz
        kind = "jsonl"
    return Input(os.path.abspath(path), kind if format == "auto" else format, packed, state.st_size, state.st_mtime_ns)


def _expanded(name: str) -> list[str]:
    name = os.path.expanduser(name)
    if os.path.lexists(name):
        return [name]
    if glob.has_magic(name):
        return sorted(glob.glob(name, recursive=True))
    raise FileNotFoundError(f"prepare: {name} does not exist; {NAMING}")


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


class Position(NamedTuple):
    """Where to continue: an input, and a byte or a row in it."""

    file: int = 0
    offset: int = 0


class InputChunk(NamedTuple):
    """Some of the inputs, from `start` up to `next`."""

    start: Position
    next: Position
    size: int  # bytes of the inputs as they are on disk
    data: bytes | list[str | None] | None = None  # None: the worker reads it


def split_inputs(inputs: Sequence[Input], *, start: Position, text_key: str, longest: int) -> Iterator[InputChunk]:
    """All chunks from `start` on. longest: bytes of a text that is not split."""
    file, offset = start
    while file < len(inputs):
        input = inputs[file]
        if input.packed or input.kind == "parquet":
            input.check_unchanged()  # others are checked by their workers
        if input.kind == "parquet":
            yield from _parquet(input, file, offset, text_key)
        elif input.packed:
            yield from _packed(input, file, offset, CHUNK_BYTES if input.kind == "jsonl" else longest)
        elif input.kind == "jsonl":
            yield from _ranges(input, file, offset, CHUNK_BYTES)
        elif input.size > longest:
            with open(input.path, "rb") as opened:
                start_of = opened.read(SNIFF_BYTES)
            if b"\0" in start_of:  # not to be read to its end
                yield InputChunk(Position(file), Position(file + 1), input.size, start_of)
            else:
                yield from _ranges(input, file, offset, longest)
        else:
            stop = _small_texts(inputs, file, longest)
            size = sum(input.size for input in inputs[file:stop])
            yield InputChunk(Position(file), Position(stop), size)
            file = stop - 1
        file, offset = file + 1, 0


def _small_texts(inputs: Sequence[Input], first: int, longest: int) -> int:
    """Where a run of small texts that make a chunk ends."""
    size = stop = 0
    for stop in range(first, min(first + MAX_FILES, len(inputs))):
        input = inputs[stop]
        size += input.size
        if input.kind != "text" or input.packed or input.size > longest or (size > CHUNK_BYTES and stop > first):
            return stop
    return stop + 1


def _ranges(input: Input, file: int, offset: int, step: int) -> Iterator[InputChunk]:
    for begin in range(offset, max(input.size, offset + 1), step):  # an empty file is a chunk too
        stop = Position(file, begin + step) if begin + step < input.size else Position(file + 1)
        yield InputChunk(Position(file, begin), stop, min(step, input.size - begin))


def _packed(input: Input, file: int, offset: int, step: int) -> Iterator[InputChunk]:
    """Whole lines of the decompressed content, about `step` bytes of them."""
    held = bytearray()
    with open(input.path, "rb") as packed:
        begin = done = 0
        for data in _unpacked(packed, input):
            held += data
            while stop := _whole_lines(held, step, input):
                size, done = packed.tell() - done, packed.tell()
                if begin >= offset:
                    yield InputChunk(Position(file, begin), Position(file, begin + stop), size, bytes(held[:stop]))
                begin += stop
                del held[:stop]
        yield InputChunk(Position(file, begin), Position(file + 1), input.size - done, bytes(held))


def _whole_lines(data: bytearray, step: int, input: Input) -> int:
    """Where about `step` bytes of lines end; 0: not in what was read so far."""
    if len(data) <= step:
        return 0
    if stop := data.rfind(b"\n", 0, step) + 1:
        return stop
    if input.kind == "text":
        return _character_start(data, step)
    stop = data.find(b"\n", step) + 1
    _check_line(stop or len(data), input)
    return stop


def _unpacked(file: IO[bytes], input: Input) -> Iterator[bytes]:
    new, errors = _decoders(input)
    decoder = new()
    try:
        while block := file.read(READ_BYTES):
            while block:
                if decoder.eof:  # several streams in a row are one
                    decoder, block = new(), block.lstrip(b"\0") if input.packed == "gzip" else block
                yield decoder.decompress(block)
                block = decoder.unused_data
    except errors as error:
        trouble = f"is corrupt: {input.packed} fails near byte {file.tell()} ({error})"
        raise unusable(input, trouble) from None
    if not decoder.eof:
        raise unusable(input, f"is truncated: its {input.packed} stream does not end within {file.tell()} bytes")


def _decoders(input: Input) -> tuple[Callable[[], Any], type[Exception]]:
    if input.packed == "gzip":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    zstandard = _imported("zstandard", input)
    # the largest window that zstd itself can write, with --long=31
    return lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(), zstandard.ZstdError


def check_columns(inputs: Sequence[Input], text_key: str) -> None:
    """Raise if a Parquet file does not have the text: before minutes of work, not after them."""
    for input in inputs:
        if input.kind == "parquet":
            with _opened_parquet(input, text_key):
                pass


@contextmanager
def _opened_parquet(input: Input, text_key: str) -> Iterator[Any]:
    """A Parquet file that has a column of text."""
    pyarrow, parquet = _imported("pyarrow", input), _imported("pyarrow.parquet", input)
    try:
        with parquet.ParquetFile(input.path, pre_buffer=False) as table:
            _check_column(table.schema_arrow, pyarrow.types, input, text_key)
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        raise unusable(input, f"cannot be read as Parquet ({error})") from None


def _parquet(input: Input, file: int, offset: int, text_key: str) -> Iterator[InputChunk]:
    """Rows of the text's column, about CHUNK_BYTES bytes of them."""
    with _opened_parquet(input, text_key) as table:
        rows = table.metadata.num_rows
        ends = list(accumulate(table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)))
        group = bisect_right(ends, offset)  # those before it are not read at all
        skipped, groups = ends[group - 1] if group else 0, list(range(group, len(ends)))
        batches = table.iter_batches(64, row_groups=groups, columns=[text_key], use_threads=False)
        texts = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        held: list[str | None] = []
        first, size = offset, 0
        for row, text in enumerate(islice(texts, offset - skipped, None), offset + 1):
            held.append(text)
            size += len(text or "")
            if size >= CHUNK_BYTES and row < rows:
                weight = input.size * row // rows - input.size * first // rows
                yield InputChunk(Position(file, first), Position(file, row), weight, held)
                held, first, size = [], row, 0
        rest = input.size - input.size * first // max(rows, 1)
        yield InputChunk(Position(file, first), Position(file + 1), rest, held)


def _check_column(schema: Any, types: Any, input: Input, text_key: str) -> None:
    if text_key not in schema.names:
        raise unusable(input, f"has no column {text_key!r}, but {', '.join(schema.names)}", "set --text-key")
    kind = schema.field(text_key).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise unusable(input, f"has {kind}, not text, in its column {text_key!r}", "set --text-key")


def _imported(module: str, input: Input) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ImportError(f"prepare: {input.path} needs {package}; pip install 'fasttrain[data]'") from None


def read_whole(input: Input) -> bytes:
    """The content of a file; of a binary one, its start."""
    input.check_unchanged()
    with open(input.path, "rb") as file:
        start = file.read(SNIFF_BYTES)
        return start if b"\0" in start else start + file.read()


def read_range(input: Input, begin: int, end: int) -> tuple[int, bytes]:
    """The lines that begin in [begin, end), and the offset of the first."""
    with open(input.path, "rb") as file:
        input.check_unchanged()
        first, stop = _line_start(file, input, begin), _line_start(file, input, end)
        file.seek(first)
        return first, file.read(stop - first)


def _line_start(file: IO[bytes], input: Input, at: int) -> int:
    """The first start of a line from `at` on. In a text whose lines are very long, of a character."""
    if at == 0 or at >= input.size:
        return min(at, input.size)
    file.seek(at - 1)
    start = at - 1
    limit = LINE_SEARCH_BYTES if input.kind == "text" else LONGEST_LINE
    while start - at < limit:
        line = file.readline(READ_BYTES)
        start += len(line)
        if not line or line.endswith(b"\n"):
            return start
    if input.kind != "text":
        _check_line(start - at, input)
    file.seek(at)
    return at + _character_start(file.read(4), 0)


def _character_start(data: bytes | bytearray, at: int) -> int:
    """Where a UTF-8 character begins, from `at` on."""
    places = range(at, min(at + 4, len(data)))
    return next((place for place in places if data[place] & 0xC0 != 0x80), at)


def _check_line(length: int, input: Input) -> None:
    if length >= LONGEST_LINE:
        raise unusable(input, f"has a line of more than {LONGEST_LINE >> 20} MB", "is it JSONL?")
