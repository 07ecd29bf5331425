"""What a worker does: a piece of the input becomes tokens, in numpy arrays that are quick to send and to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fasttrain.data.prepare.chunks import Piece
from fasttrain.data.prepare.documents import EMPTY, Document, LeftOut, contents, documents
from fasttrain.data.prepare.encoder import Encoder
from fasttrain.data.prepare.inputs import Input
from fasttrain.data.prepare.seen import DIGEST, digest
from fasttrain.data.prepare.settings import Settings
from fasttrain.data.prepare.tokenizer import Vocabulary
from fasttrain.data.sources import RECORD
from fasttrain.data.writer import holds_out


class Encoded(NamedTuple):
    """N documents of a piece."""

    tokens: np.ndarray  # all of them in a row, each begun by the separator
    lengths: np.ndarray  # (N,) tokens
    num_bytes: np.ndarray  # (N,) of text
    held_out: np.ndarray  # (N,) bool
    digests: np.ndarray  # (N,) of their text
    sources: np.ndarray  # (N,) RECORD; lines counted in the piece
    left_out: list[LeftOut]
    lines: int  # of the last file in it
    spelled: int  # documents that spell the separator, which is text there


class Worker:
    """worker(piece): a process's share of the work."""

    def __init__(self, inputs: Sequence[Input], vocabulary: Vocabulary, settings: Settings, dtype: np.dtype) -> None:
        self._inputs, self._vocabulary, self._settings, self._dtype = inputs, vocabulary, settings, dtype
        self._encoder = Encoder(vocabulary, dtype)
        self._separator = np.array([vocabulary.separator], dtype).tobytes()

    def __call__(self, piece: Piece) -> Encoded:
        kept: list[Document] = []
        left_out: list[LeftOut] = []
        read = contents(piece, self._inputs)
        for content in read:
            for found in documents(content, self._inputs[content.file], self._settings):
                if isinstance(found, LeftOut):
                    left_out.append(found)
                else:
                    kept.append(found)
        tokens = self._encoder.encode([document.text for document in kept])
        for number in [number for number, ids in enumerate(tokens) if not ids][::-1]:  # a normalizer left nothing
            left_out.append(LeftOut(kept.pop(number).place, EMPTY, "no tokens"))
            del tokens[number]
        encoded = Encoded(
            tokens=np.frombuffer(b"".join(part for ids in tokens for part in (self._separator, ids)), self._dtype),
            lengths=np.array([len(ids) // self._dtype.itemsize + 1 for ids in tokens], np.int64),
            num_bytes=np.array([len(document.data) for document in kept], np.int64),
            held_out=np.array([holds_out(document.data, self._settings.validation) for document in kept], bool),
            digests=np.array([digest(document.data) for document in kept], DIGEST),
            sources=np.array([_record(document) for document in kept], RECORD),
            left_out=left_out,
            lines=read[-1].lines,
            spelled=sum(self._vocabulary.separator_text in document.text for document in kept),
        )
        self._check(encoded)
        return encoded

    def _check(self, encoded: Encoded) -> None:
        if (encoded.tokens == self._vocabulary.separator).sum() != len(encoded.lengths):
            raise ValueError(
                f"prepare: the tokenizer makes the separator {self._vocabulary.separator_text!r} of other text; choose "
                "another --separator"
            )


def _record(document: Document) -> tuple[int, int, int, int]:
    place = document.place
    return place.offset, place.line, place.file, place.size
