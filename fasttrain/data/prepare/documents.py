"""The documents of a piece, and what is left out of it.

Workers count lines from the start of their piece; only the process that sees all pieces in a row knows the line of the
file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fasttrain.data.prepare.chunks import LOOK, Piece, read_range
from fasttrain.data.prepare.inputs import Input
from fasttrain.data.prepare.settings import Settings

BOM = "\ufeff"


class Place(NamedTuple):
    file: int
    offset: int
    size: int
    line: int  # from 1, in the piece; 0: a row of a Parquet file


class Document(NamedTuple):
    place: Place
    text: str
    data: bytes  # the text in UTF-8


class LeftOut(NamedTuple):
    place: Place
    reason: str
    detail: str = ""


EMPTY, BINARY, UNDECODABLE = "near-empty", "binary", "undecodable"
INVALID, NO_TEXT, DUPLICATE = "invalid JSON", "no text", "duplicate"
REASONS = (EMPTY, BINARY, UNDECODABLE, INVALID, NO_TEXT, DUPLICATE)


class Content(NamedTuple):
    """Lines of a file from an offset on, or rows of a Parquet file."""

    file: int
    offset: int
    data: bytes | list[str | None]

    @property
    def lines(self) -> int:
        return self.data.count(b"\n") if isinstance(self.data, bytes) else 0


def contents(piece: Piece, inputs: Sequence[Input]) -> list[Content]:
    """What a piece consists of: a part of one file, or several small ones."""
    file, offset = piece.start
    if piece.data is not None:
        return [Content(file, offset, piece.data)]
    if piece.next.file > file + 1:
        return [Content(number, 0, _whole(inputs[number])) for number in range(file, piece.next.file)]
    end = piece.next.offset if piece.next.file == file else inputs[file].size
    return [Content(file, *read_range(inputs[file], offset, end))]


def documents(content: Content, input: Input, settings: Settings) -> Iterator[Document | LeftOut]:
    """In their order."""
    for found in _found(content, input.kind, settings.text_key):
        if isinstance(found, LeftOut):
            yield found
            continue
        place, text = found
        if "\0" in text:
            yield LeftOut(place, BINARY)
            continue
        try:
            data = text.encode()
        except UnicodeEncodeError as error:  # JSON can spell halves of characters
            yield LeftOut(place, UNDECODABLE, f"half a character at {error.start}")
            continue
        if len(text.strip()) < settings.shortest:
            yield LeftOut(place, EMPTY)
        elif len(data) <= settings.longest or input.kind == "text":  # long texts are cut as they are read
            yield Document(place, text, data)
        else:
            for part in parts(text, settings.longest * len(text) // len(data)):
                yield Document(place, part, part.encode())


def parts(text: str, length: int) -> Iterator[str]:
    """A text cut after line ends, or anywhere where there are none, into parts of up to `length` characters."""
    begin = 0
    while len(text) - begin > length:
        stop = text.rfind("\n", begin, begin + length) + 1
        stop = stop if stop > begin else begin + length
        yield text[begin:stop]
        begin = stop
    yield text[begin:]


def _found(content: Content, kind: str, text_key: str) -> Iterator[tuple[Place, str] | LeftOut]:
    file, offset, data = content
    if isinstance(data, list):
        return _rows(file, offset, data)
    if kind == "jsonl":
        return _lines(file, offset, data, text_key)
    # a line that is longer than a part leaves nothing for the parts in which it goes on
    return iter([_text(file, offset, data)] if data or not offset else [])


def _whole(input: Input) -> bytes:
    input.check_unchanged()
    with open(input.path, "rb") as file:
        start = file.read(LOOK)
        return start if b"\0" in start else start + file.read()


def _text(file: int, offset: int, data: bytes) -> tuple[Place, str] | LeftOut:
    place = Place(file, offset, len(data), 1)
    if b"\0" in data:
        return LeftOut(place, BINARY)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        return LeftOut(place._replace(line=line), UNDECODABLE, f"byte {offset + error.start} is not UTF-8")
    return place, text.removeprefix(BOM) if offset == 0 else text


def _lines(file: int, offset: int, data: bytes, text_key: str) -> Iterator[tuple[Place, str] | LeftOut]:
    for number, line in enumerate(io.BytesIO(data), 1):
        place = Place(file, offset, len(line), number)
        offset += len(line)
        if line.isspace():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            yield LeftOut(place, UNDECODABLE, f"byte {place.offset + error.start} is not UTF-8")
            continue
        except (ValueError, RecursionError) as error:
            yield LeftOut(place, INVALID, str(error))
            continue
        text = record.get(text_key) if isinstance(record, dict) else record
        if isinstance(text, str):
            yield place, text
        else:
            has = f"it has {', '.join(map(repr, record))}" if isinstance(record, dict) else f"it is {line[:40]!r}"
            yield LeftOut(place, NO_TEXT, f"no string {text_key!r}; {has}"[:300])


def _rows(file: int, first: int, texts: list[str | None]) -> Iterator[tuple[Place, str] | LeftOut]:
    for row, text in enumerate(texts, first):
        if text is None:
            yield LeftOut(Place(file, row, 0, 0), NO_TEXT, "null")
        else:
            yield Place(file, row, len(text.encode("utf-8", "surrogatepass")), 0), text
