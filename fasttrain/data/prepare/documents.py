"""The documents of a chunk, and what is dropped from it.

Workers count lines from the start of their chunk; only the process that sees all chunks in order knows the line of the
file.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from fasttrain.config import PrepareConfig
from fasttrain.data.prepare.inputs import CHUNK_BYTES, Input, InputChunk, Position, read_range, read_whole, split_inputs

BOM = "\ufeff"
EMPTY, BINARY, UNDECODABLE = "near-empty", "binary", "undecodable"
INVALID, NO_TEXT, DUPLICATE = "invalid JSON", "no text", "duplicate"
REASONS = (EMPTY, BINARY, UNDECODABLE, INVALID, NO_TEXT, DUPLICATE)
SAMPLE_BYTES = 32 * 2**20  # to train a tokenizer on: more text changes the tokens little
DIGEST = np.dtype("S16")  # compared byte by byte; zeros at the end, which numpy does not show, count as such


class InputSpan(NamedTuple):
    """The place of a document in the inputs: a RECORD, but for the line."""

    offset: int
    line: int  # from 1, in the chunk; 0: a row of a Parquet file
    file: int
    size: int


class Document(NamedTuple):
    span: InputSpan
    text: str
    data: bytes  # the text in UTF-8


class Dropped(NamedTuple):
    span: InputSpan
    reason: str
    detail: str = ""


class Content(NamedTuple):
    """Lines of a file from an offset on, or rows of a Parquet file."""

    file: int
    offset: int
    data: bytes | list[str | None]


def contents(chunk: InputChunk, inputs: Sequence[Input]) -> list[Content]:
    """The files of a chunk: a part of one, or several small ones."""
    file, offset = chunk.start
    if chunk.data is not None:
        return [Content(file, offset, chunk.data)]
    if chunk.next.file > file + 1:
        return [Content(number, 0, read_whole(inputs[number])) for number in range(file, chunk.next.file)]
    end = chunk.next.offset if chunk.next.file == file else inputs[file].size
    return [Content(file, *read_range(inputs[file], offset, end))]


def documents(content: Content, input: Input, settings: PrepareConfig) -> Iterator[Document | Dropped]:
    """All documents, in their order."""
    file, offset, data = content
    all_found: Iterable[tuple[InputSpan, str] | Dropped]
    if isinstance(data, list):
        all_found = _rows(file, offset, data)
    elif input.kind == "jsonl":
        all_found = _lines(file, offset, data, settings.text_key)
    else:  # a line that is longer than a part leaves nothing for the parts in which it continues
        all_found = [_text(file, offset, data)] if data or not offset else []
    for found in all_found:
        if isinstance(found, Dropped):
            yield found
            continue
        span, text = found
        if "\0" in text:
            yield Dropped(span, BINARY)
            continue
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:  # JSON can spell halves of characters
            yield Dropped(span, UNDECODABLE, f"half a character at {error.start}")
            continue
        if len(text.strip()) < settings.shortest:
            yield Dropped(span, EMPTY)
        elif len(encoded) <= settings.longest or input.kind == "text":  # long texts are split as they are read
            yield Document(span, text, encoded)
        else:
            for part in parts(text, settings.longest * len(text) // len(encoded)):
                yield Document(span, part, part.encode())


def parts(text: str, length: int) -> Iterator[str]:
    """Split a text after line ends, or anywhere where there are none, into parts of up to `length` characters."""
    begin = 0
    while len(text) - begin > length:
        stop = text.rfind("\n", begin, begin + length) + 1
        stop = stop if stop > begin else begin + length
        yield text[begin:stop]
        begin = stop
    yield text[begin:]


def _text(file: int, offset: int, data: bytes) -> tuple[InputSpan, str] | Dropped:
    span = InputSpan(offset, 1, file, len(data))
    if b"\0" in data:
        return Dropped(span, BINARY)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        return Dropped(span._replace(line=line), UNDECODABLE, f"byte {offset + error.start} is not UTF-8")
    return span, text.removeprefix(BOM) if offset == 0 else text


def _lines(file: int, offset: int, data: bytes, text_key: str) -> Iterator[tuple[InputSpan, str] | Dropped]:
    for number, line in enumerate(io.BytesIO(data), 1):
        span = InputSpan(offset, number, file, len(line))
        offset += len(line)
        if line.isspace():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            yield Dropped(span, UNDECODABLE, f"byte {span.offset + error.start} is not UTF-8")
            continue
        except (ValueError, RecursionError) as error:
            yield Dropped(span, INVALID, str(error))
            continue
        text = record.get(text_key) if isinstance(record, dict) else record
        if isinstance(text, str):
            yield span, text
        else:
            has = f"it has {', '.join(map(repr, record))}" if isinstance(record, dict) else f"it is {line[:40]!r}"
            yield Dropped(span, NO_TEXT, f"no string {text_key!r}; {has}"[:300])


def _rows(file: int, first: int, texts: list[str | None]) -> Iterator[tuple[InputSpan, str] | Dropped]:
    for row, text in enumerate(texts, first):
        if text is None:
            yield Dropped(InputSpan(row, 0, file, 0), NO_TEXT, "null")
        else:
            yield InputSpan(row, 0, file, len(text.encode("utf-8", "surrogatepass"))), text


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST.itemsize).digest()


class SeenDigests:
    """A set of digests in sorted arrays, each less than half as long as the one before: few, whatever their sum."""

    def __init__(self, digests: bytes = b"") -> None:
        self._arrays = [np.sort(np.frombuffer(digests, DIGEST))] if digests else []

    def add(self, digests: np.ndarray) -> np.ndarray:  # (n,) of DIGEST -> (n,) bool
        """Which of them are new, the first of equal ones; they are no longer."""
        fresh = np.zeros(len(digests), bool)
        fresh[np.unique(digests, return_index=True)[1]] = True
        for array in self._arrays:
            places = np.minimum(np.searchsorted(array, digests), len(array) - 1)
            fresh &= array[places] != digests
        if fresh.any():
            array = np.sort(digests[fresh])
            while self._arrays and len(self._arrays[-1]) <= 2 * len(array):
                # timsort: two sorted halves are merged
                array = np.sort(np.concatenate([self._arrays.pop(), array]), kind="stable")
            self._arrays.append(array)
        return fresh


def sample(inputs: Sequence[Input], settings: PrepareConfig, size: int = SAMPLE_BYTES) -> Iterator[str]:
    """Texts of about `size` bytes, always the same: every n-th chunk; the start of what is only read in order."""
    total = sum(input.size for input in inputs)
    in_order = [input for input in inputs if input.packed or input.kind == "parquet"]
    plain = [input for input in inputs if not (input.packed or input.kind == "parquet")]
    yield from _texts(plain, settings, slice(0, None, total // size + 1))
    for input in in_order[:: len(in_order) * CHUNK_BYTES // size + 1]:
        share = max(CHUNK_BYTES, size * input.size // total)
        yield from _texts([input], settings, slice(share // CHUNK_BYTES))


def _texts(inputs: Sequence[Input], settings: PrepareConfig, which: slice) -> Iterator[str]:
    """The documents of chunks."""
    chunks = split_inputs(inputs, start=Position(), text_key=settings.text_key, longest=settings.longest)
    for chunk in islice(chunks, which.start, which.stop, which.step):
        for content in contents(chunk, inputs):
            for found in documents(content, inputs[content.file], settings):
                if isinstance(found, Document):
                    yield found.text
