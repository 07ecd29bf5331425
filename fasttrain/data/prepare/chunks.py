"""Inputs cut into pieces of a few megabytes, which workers turn into tokens.

A piece of a plain file is a range of it, which its worker reads. What only comes in a row (compressed files) or through
a library with caches of its own (Parquet) is read here, and goes to the worker with the piece. Where a piece ends does
not depend on the number of workers, nor on where a preparation was interrupted.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import IO, Any, NamedTuple

from fasttrain.data.prepare.inputs import Input

PIECE = 4 * 2**20  # bytes: tenths of a second of work, and some 100 MB of memory for its words
FILES = 256  # of a piece, at most
BLOCK = 2**16  # compressed bytes that are read at a time: a gzip block grows by up to a thousand times
LONGEST_LINE = 2**28
LOOK = 8192  # bytes at the start of a file that tell whether it is binary
NEAR = 2**20  # a text without a line end within this is cut anywhere


class Position(NamedTuple):
    """Where to go on: an input, and a byte or a row in it."""

    file: int = 0
    offset: int = 0


class Piece(NamedTuple):
    start: Position
    next: Position
    size: int  # bytes of the inputs as they are on disk
    data: bytes | list[str | None] | None = None  # None: the worker reads it


def cut(inputs: Sequence[Input], *, start: Position, text_key: str, longest: int) -> Iterator[Piece]:
    """All pieces from `start` on. longest: bytes of a text that is not cut."""
    file, offset = start
    while file < len(inputs):
        input = inputs[file]
        if input.packed or input.kind == "parquet":
            input.check_unchanged()  # others are checked by their workers
        if input.kind == "parquet":
            yield from _parquet(input, file, offset, text_key)
        elif input.packed:
            yield from _packed(input, file, offset, PIECE if input.kind == "jsonl" else longest)
        elif input.kind == "jsonl":
            yield from _ranges(input, file, offset, PIECE)
        elif input.size > longest and b"\0" in (start_of := _start(input)):
            yield Piece(Position(file), Position(file + 1), input.size, start_of)  # not to be read to its end
        elif input.size > longest:
            yield from _ranges(input, file, offset, longest)
        else:
            stop = _small_texts(inputs, file, longest)
            size = sum(input.size for input in inputs[file:stop])
            yield Piece(Position(file), Position(stop), size)
            file = stop - 1
        file, offset = file + 1, 0


def _start(input: Input) -> bytes:
    with open(input.path, "rb") as file:
        return file.read(LOOK)


def _small_texts(inputs: Sequence[Input], first: int, longest: int) -> int:
    """Where a run of small texts that make a piece ends."""
    size = stop = 0
    for stop in range(first, min(first + FILES, len(inputs))):
        input = inputs[stop]
        size += input.size
        if input.kind != "text" or input.packed or input.size > longest or (size > PIECE and stop > first):
            return stop
    return stop + 1


def _ranges(input: Input, file: int, offset: int, step: int) -> Iterator[Piece]:
    while True:
        stop = min(offset + step, input.size)
        end = Position(file + 1) if stop == input.size else Position(file, stop)
        yield Piece(Position(file, offset), end, stop - offset)
        if stop == input.size:
            return
        offset = stop


def _packed(input: Input, file: int, offset: int, step: int) -> Iterator[Piece]:
    """Whole lines of the decompressed content, about `step` bytes of them."""
    held = bytearray()
    with open(input.path, "rb") as packed:
        begin = done = 0
        for data in _unpacked(packed, input):
            held += data
            while stop := _whole_lines(held, step, input):
                size, done = packed.tell() - done, packed.tell()
                if begin >= offset:
                    yield Piece(Position(file, begin), Position(file, begin + stop), size, bytes(held[:stop]))
                begin += stop
                del held[:stop]
        yield Piece(Position(file, begin), Position(file + 1), input.size - done, bytes(held))


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
        while block := file.read(BLOCK):
            while block:
                if decoder.eof:  # several streams in a row are one
                    decoder, block = new(), block.lstrip(b"\0") if input.packed == "gzip" else block
                yield decoder.decompress(block)
                block = decoder.unused_data
    except errors as error:
        raise ValueError(
            f"prepare: {input.path} is damaged: {input.packed} fails near byte {file.tell()} ({error}); copy it again, "
            "or leave it out"
        ) from None
    if not decoder.eof:
        raise ValueError(
            f"prepare: {input.path} is truncated: its {input.packed} stream does not end within {file.tell()} bytes; "
            "copy it again, or leave it out"
        )


def _decoders(input: Input) -> tuple[Callable[[], Any], type[Exception]]:
    if input.packed == "gzip":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    try:
        import zstandard
    except ImportError:
        raise ImportError(f"prepare: {input.path} needs zstandard; pip install 'fasttrain[data]'") from None
    # the largest window that zstd itself can write, with --long=31
    return lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(), zstandard.ZstdError


def _parquet(input: Input, file: int, offset: int, text_key: str) -> Iterator[Piece]:
    """Rows of the text's column, about PIECE bytes of them."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"prepare: {input.path} needs pyarrow; pip install 'fasttrain[data]'") from None
    try:
        table = parquet.ParquetFile(input.path, pre_buffer=False)
        _check_column(table.schema_arrow, input, text_key)
        rows, counts = (
            table.metadata.num_rows,
            [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)],
        )
        ends = list(accumulate(counts))
        group = bisect_right(ends, offset)  # those before it are not read at all
        row = ends[group - 1] if group else 0
        held: list[str | None] = []
        first, size = offset, 0
        groups = list(range(group, len(counts)))
        for batch in table.iter_batches(64, row_groups=groups, columns=[text_key], use_threads=False):
            for text in batch.column(0).to_pylist():
                row += 1
                if row <= offset:
                    continue
                held.append(text)
                size += len(text or "")
                if size >= PIECE and row < rows:
                    weight = input.size * row // rows - input.size * first // rows
                    yield Piece(Position(file, first), Position(file, row), weight, held)
                    held, first, size = [], row, 0
        rest = input.size - input.size * first // max(rows, 1)
        yield Piece(Position(file, first), Position(file + 1), rest, held)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"prepare: {input.path} cannot be read as Parquet ({error}); copy it again, or leave it out"
        ) from None


def _check_column(schema: Any, input: Input, text_key: str) -> None:
    import pyarrow

    if text_key not in schema.names:
        raise ValueError(
            f"prepare: {input.path} has no column {text_key!r}, but {', '.join(schema.names)}; set --text-key"
        )
    kind = schema.field(text_key).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ValueError(f"prepare: the column {text_key!r} of {input.path} is {kind}, not text; set --text-key")


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
    limit = NEAR if input.kind == "text" else LONGEST_LINE
    while start - at < limit:
        line = file.readline(BLOCK)
        start += len(line)
        if not line or line.endswith(b"\n"):
            return start
    if input.kind != "text":
        _check_line(start - at, input)
    file.seek(at)
    return at + _character_start(file.read(4), 0)


def _character_start(data: bytes | bytearray, at: int) -> int:
    """From `at` on, where a UTF-8 character begins."""
    for place in range(at, min(at + 4, len(data))):
        if data[place] & 0xC0 != 0x80:
            return place
    return at


def _check_line(length: int, input: Input) -> None:
    if length >= LONGEST_LINE:
        raise ValueError(f"prepare: {input.path} has a line of more than {LONGEST_LINE >> 20} MB; is it JSONL?")
