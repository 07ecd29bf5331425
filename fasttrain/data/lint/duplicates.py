"""Text that occurs more than once: whole documents, spans of them, and documents of validation in training data."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from fasttrain.data.lint.findings import Finding, graded
from fasttrain.data.lint.hashes import BASE, Hasher, Repeats, Sample, mixed
from fasttrain.data.lint.source import Piece, Source

DOCUMENTS = 2**23  # hashes of documents that are kept, 16 bytes each; of larger datasets, a share
SPANS = 2**20
SPAN_TOKENS = 32  # tokens: so many in a row are alike by copying, hardly by chance
SHORT = 32  # tokens: shorter documents are alike by chance
COPIES = (0.01, 0.5)  # share of documents
REPEATED = (0.3, 0.8)  # share of spans: licences, headers and menus are in every corpus


class Duplicates:
    """Hashes of documents and of sampled spans."""

    def __init__(self, source: Source, hasher: Hasher) -> None:
        self._source, self._hasher = source, hasher
        documents = 0 if source.ends is None else len(source.ends)
        self.documents = Sample(DOCUMENTS, expected=documents)
        self.spans = Sample(SPANS, expected=len(source))
        self._runs_on, self._carried, self._length = False, 0, 0  # a document into the next piece: hash and tokens

    def add(self, piece: Piece) -> None:
        core = piece.start - piece.first
        tokens = piece.around[core : core + len(piece) + SPAN_TOKENS - 1]
        sums = self._hasher.sums(tokens)
        if len(tokens) >= SPAN_TOKENS:
            self.spans.add(self._hasher.runs(sums, SPAN_TOKENS)[: len(piece)], piece.start)
        self._add_documents(piece, sums[: len(piece) + 1])

    def _add_documents(self, piece: Piece, sums: np.ndarray) -> None:
        ends, starts = piece.ends - piece.start, piece.ends - piece.lengths - piece.start
        separator = self._source.separator
        begun_here = starts >= 0
        # the text, without the separator before it
        texts = np.maximum(starts, 0)
        if separator is not None and len(texts):
            first = piece.tokens[np.minimum(texts, len(piece) - 1)]
            texts = np.minimum(texts + (begun_here & (first == separator)), ends)
        hashes = (sums[ends] - sums[texts]) * self._hasher.inverses[texts]
        lengths = ends - texts
        if len(ends) and not begun_here[0]:
            hashes[0] = self._joined(int(hashes[0]))
            lengths[0] += self._length
        long = lengths >= SHORT
        self.documents.add(mixed(hashes, lengths)[long], (piece.ends - piece.lengths)[long])
        self._carry(piece, sums, int(ends[-1]) if len(ends) else 0, ended=len(ends) > 0)

    def _carry(self, piece: Piece, sums: np.ndarray, last: int, *, ended: bool) -> None:
        """What follows the last end of a document, for the document that it belongs to."""
        begins = ended or not self._runs_on
        self._runs_on = last < len(piece)
        if begins and self._runs_on and piece.tokens[last] == self._source.separator:
            last += 1
        rest = (int(sums[len(piece)]) - int(sums[last])) * int(self._hasher.inverses[last]) % 2**64
        if begins:
            self._carried, self._length = rest, len(piece) - last
        else:
            self._carried, self._length = self._joined(rest), self._length + len(piece)

    def _joined(self, rest: int) -> int:
        """The hash of what was carried and the rest."""
        return (self._carried + pow(int(BASE), self._length, 2**64) * rest) % 2**64

    def findings(self) -> list[Finding]:
        return [self._copies(), self._stretches()]

    def _copies(self) -> Finding:
        places, again = self.repeated_documents
        seen = self._source.tally()
        seen.add(places[again])
        severity = graded(seen.count, len(places), warning=COPIES[0], error=COPIES[1])
        text = f"{seen.count:,} of {len(places):,} documents of {SHORT} tokens and more are copies of earlier ones"
        if self.documents.halvings:
            text += f" (in a sample of one in {2**self.documents.halvings})"
        if severity != "ok":
            text += "; remove duplicates before preparing: copies are learned by heart"
        return self._source.finding("duplicates", severity, seen, len(places), "documents", text)

    def _stretches(self) -> Finding:
        places, again = self.repeated_stretches
        seen = self._source.tally()
        seen.add(places[again])
        severity = graded(seen.count, len(places), warning=REPEATED[0], error=REPEATED[1])
        text = f"{seen.count / max(len(places), 1):.1%} of the spans of {SPAN_TOKENS} tokens have occurred before"
        if severity != "ok":
            text += "; remove near-duplicates and text that every document carries, such as menus and licences"
        return self._source.finding("repeated text", severity, seen, len(places), "spans", text)

    @cached_property
    def repeated_documents(self) -> Repeats:
        return self.documents.repeats()

    @cached_property
    def repeated_stretches(self) -> Repeats:
        return self.spans.repeats()

    def along(self, repeats: Repeats) -> np.ndarray:  # -> (BINS,)
        """The share that has occurred before."""
        places, again = repeats
        return self._source.bins(places[again]) / np.maximum(self._source.bins(places), 1)


def leak(source: Source, validation: Duplicates, train: Duplicates) -> Finding:
    """Documents of validation that are in the training data too."""
    (held_out, places), (trained_on, _) = validation.documents.all(), train.documents.all()
    finest = min(validation.documents.limit, train.documents.limit)  # both samples hold all below it
    held_out, places = held_out[held_out <= finest], places[held_out <= finest]
    seen = source.tally()
    seen.add(places[np.isin(held_out, trained_on)])
    if not seen.count:
        text = f"none of {len(places):,} documents of {SHORT} tokens and more is in the training data"
        return source.finding("leak", "ok", 0, len(places), "documents", text)
    text = (
        f"{seen.count:,} of {len(places):,} documents are in the training data too, and the validation loss is too low "
        "by them; hold documents out by their content, or remove duplicates before splitting"
    )
    return source.finding("leak", "error", seen, len(places), "documents", text)
