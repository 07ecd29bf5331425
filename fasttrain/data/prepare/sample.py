"""Some of the text, from all over the inputs, to train a tokenizer on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from fasttrain.data.prepare.chunks import PIECE, Piece, Position, cut
from fasttrain.data.prepare.documents import Document, contents, documents
from fasttrain.data.prepare.inputs import Input
from fasttrain.data.prepare.settings import Settings

SIZE = 32 * 2**20  # bytes: more text changes the tokens little


def sample(inputs: Sequence[Input], settings: Settings, size: int = SIZE) -> Iterator[str]:
    """Texts of about `size` bytes, always the same: every n-th piece, and of what only comes in a row, the start."""
    total = sum(input.size for input in inputs)
    in_a_row = [input for input in inputs if input.packed or input.kind == "parquet"]
    plain = [input for input in inputs if not (input.packed or input.kind == "parquet")]
    yield from _texts(islice(_cut(plain, settings), 0, None, total // size + 1), plain, settings)
    for input in in_a_row[:: len(in_a_row) * PIECE // size + 1]:
        share = max(PIECE, size * input.size // total)
        yield from _texts(islice(_cut([input], settings), share // PIECE), [input], settings)


def _cut(inputs: Sequence[Input], settings: Settings) -> Iterator[Piece]:
    return cut(inputs, start=Position(), text_key=settings.text_key, longest=settings.longest)


def _texts(pieces: Iterator[Piece], inputs: Sequence[Input], settings: Settings) -> Iterator[str]:
    for piece in pieces:
        for content in contents(piece, inputs):
            for found in documents(content, inputs[content.file], settings):
                if isinstance(found, Document):
                    yield found.text
