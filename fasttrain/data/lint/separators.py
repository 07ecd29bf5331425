"""Separators: one before each document, and nowhere else."""

from __future__ import annotations

import numpy as np

from fasttrain.data.lint.findings import SYSTEMATIC, Finding, Severity, graded
from fasttrain.data.lint.source import BINS, Piece, Source, Tally

AGAIN = "prepare the dataset again"
ENOUGH = 2**16  # tokens in which there must be a separator


class Separators:
    """How many there are; doubled ones, missing ones, some inside documents, and documents of nothing else."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tokens = self._found = self._documents = self._ended = self._trailing = 0
        self._doubled, self._missing, self._inside, self._empty = (source.tally() for _ in range(4))
        self.along, self.doubled_along = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)

    def add(self, piece: Piece) -> None:
        separator = self._source.separator
        self._tokens += len(piece)
        self._documents += len(piece.begins)
        if separator is None:
            return
        here = np.flatnonzero(piece.tokens == separator) + piece.start
        self._found += len(here)
        later = here[here > 0]
        doubled = later[piece.around[later - 1 - piece.first] == separator]
        self._doubled.add(doubled)
        self.along += self._source.bins(here)
        self.doubled_along += self._source.bins(doubled)
        if self._source.indexed:
            self._compare(piece, here, doubled, separator)

    def _compare(self, piece: Piece, here: np.ndarray, doubled: np.ndarray, separator: int) -> None:
        """With the index."""
        at_first, at_last = (piece.around[np.maximum(piece.begins - piece.first - n, 0)] == separator for n in (0, 1))
        self._trailing += int((at_last & ~at_first).sum())
        # the document before may end with it instead, which is the same stream
        self._missing.add(piece.begins[~at_first & ~at_last])
        ends, lengths = piece.ends, piece.lengths
        last, last_but_one = (piece.around[np.maximum(ends - piece.first - n, 0)] == separator for n in (1, 2))
        empty = (lengths == 0) | (last & ((lengths == 1) | ((lengths == 2) & last_but_one)))
        self._empty.add((ends - lengths)[empty])
        self._ended += len(ends)
        self._inside.add(np.setdiff1d(here, np.concatenate([piece.begins, ends - 1, doubled])))

    def findings(self) -> list[Finding]:
        if self._source.separator is None:
            text = "the dataset names no separator, so nothing is checked"
            return [self._source.finding("separators", "ok", 0, 0, "separators", text)]
        found, documents = self._found, self._documents
        doubled = (
            f"{self._doubled.count:,} of {found:,} separators follow another one, and the model trains on an empty "
            f"document at each; write one separator between documents, and leave empty ones out ({AGAIN})"
        )
        findings = [self._rate(), self._graded("doubled separators", self._doubled, found, "separators", doubled)]
        if not self._source.indexed:
            return findings
        inside = (
            f"{self._inside.count:,} separators stand inside documents, where no text ends; encode text without "
            f"special tokens ({AGAIN})"
        )
        empty = f"{self._empty.count:,} of {self._ended:,} documents hold no text; leave them out ({AGAIN})"
        return [
            *findings,
            self._missing_finding(documents),
            self._graded("separators inside", self._inside, found, "separators", inside),
            self._graded("empty documents", self._empty, self._ended, "documents", empty),
        ]

    def _rate(self) -> Finding:
        """Of separators against documents."""
        source, found, documents = self._source, self._found, self._documents
        if not found and (documents > 1 if source.indexed else self._tokens >= ENOUGH):
            text = (
                f"there is no separator {self._name} in {self._tokens:,} tokens, so the model cannot learn where a "
                "text ends; name the token that separates documents here (data.separator; -1: all is one text), or "
                f"{AGAIN}"
            )
            severity: Severity = "error" if source.indexed else "warning"  # a stream may be one text
            return source.finding("separators", severity, 0, documents, "documents", text)
        text = f"{found:,} separators {self._name}, {found / max(self._tokens, 1) * 1e6:,.0f} per million tokens"
        if not source.indexed:
            return source.finding("separators", "ok", found, documents, "documents", text)
        text += f", for {documents:,} documents"
        if abs(found - documents) <= 0.01 * documents:
            return source.finding("separators", "ok", found, documents, "documents", text)
        text += f": {found / max(documents, 1):.2f} for each, which should be 1; the checks below say where they are"
        return source.finding("separators", "warning", found, documents, "documents", text)

    def _missing_finding(self, documents: int) -> Finding:
        missing = self._missing
        if self._trailing > documents / 2:
            if missing.places[:1] == [0]:  # nothing is before the first document
                missing = missing.counted(missing.count - 1, skip=1)
            if not missing.count:
                text = f"none among {documents:,} documents, which end with it instead of beginning with it"
                return self._source.finding("missing separators", "ok", 0, documents, "documents", text)
        text = (
            f"{missing.count:,} of {documents:,} documents do not begin with the separator {self._name}, and the model "
            f"does not learn where those before them end; {AGAIN}"
        )
        return self._graded("missing separators", missing, documents, "documents", text)

    def _graded(self, check: str, seen: Tally, of: int, unit: str, text: str) -> Finding:
        severity = graded(seen.count, of, warning=0, error=SYSTEMATIC)
        text = text if seen.count else f"none among {of:,} {unit}"
        return self._source.finding(check, severity, seen, of, unit, text)

    @property
    def _name(self) -> str:
        return self._source.name(self._source.separator or 0)
