"""Loops: spans of tokens that repeat what stands a few tokens before, over and over."""

from __future__ import annotations

import numpy as np

from fasttrain.data.lint.findings import Finding, graded
from fasttrain.data.lint.source import AFTER, BEFORE, BINS, Piece, Source

PERIODS = range(1, 65)  # tokens between a token and its repetition
RUN = 32  # repeated tokens in a row: 2 rounds and more of a loop of 16
LEVELS = (0.02, 0.5)  # share of tokens; tables and drawings in good text have a few
_WORD = np.uint64(0x0101010101010101)  # eight times True
assert max(PERIODS) + RUN <= BEFORE
assert RUN <= AFTER


class Loops:
    """Tokens in runs of at least RUN that equal those PERIODS before."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read = self._tokens = self._documents_read = self._documents = 0
        self._last_document = -1
        self._stretches = source.tally()
        self.along = np.zeros(BINS, np.int64)

    def add(self, piece: Piece) -> None:
        self._read += len(piece)
        self._documents_read += len(piece.begins)
        loops = loops_in(piece.around)
        core = loops[piece.start - piece.first :][: len(piece)]
        places = np.flatnonzero(core)
        if not len(places):
            return
        self._tokens += len(places)
        self.along += self._source.bins(places + piece.start)
        before = np.concatenate([loops[piece.start - piece.first - 1 :][:1] if piece.start else [False], core[:-1]])
        self._stretches.add(np.flatnonzero(core & ~before) + piece.start)
        documents = piece.documents_before + np.searchsorted(piece.begins, places + piece.start, side="right")
        found = np.unique(documents)
        self._documents += len(found) - int(found[0] == self._last_document)
        self._last_document = int(found[-1])

    def findings(self) -> list[Finding]:
        severity = graded(self._tokens, self._read, warning=LEVELS[0], error=LEVELS[1])
        share = self._tokens / max(self._read, 1)
        text = f"{share:.2%} of the tokens are in {self._stretches.count:,} loops, in {self._documents:,} documents"
        if severity != "ok":
            text += "; drop documents that repeat themselves: a model that trains on loops writes loops"
        figures = dict(loops=self._stretches.count, documents=self._documents)
        seen = self._stretches.counted(self._tokens)
        return [self._source.finding("repetition", severity, seen, self._read, "tokens", text, **figures)]


def loops_in(tokens: np.ndarray) -> np.ndarray:  # (n,) -> (n,) bool
    """Which tokens lie in a run of RUN that equal those before."""
    steps = np.zeros(len(tokens) + 1, np.int32)  # +1 where a run begins, -1 where it ends
    equal = np.zeros(len(tokens) + 8, bool)
    words = equal[: len(equal) // 8 * 8].view(np.uint64)
    for period in PERIODS:
        if period >= len(tokens):
            break
        np.equal(tokens[period:], tokens[:-period], out=equal[: len(tokens) - period])
        equal[len(tokens) - period :] = False
        whole = words == _WORD  # a run of RUN holds RUN / 8 - 1 whole words, wherever it begins
        if whole.any() and (whole[:-2] & whole[1:-1] & whole[2:]).any():
            edges = np.flatnonzero(np.diff(equal, prepend=False))
            begins, ends = edges[::2] + period, edges[1::2] + period
            long = ends - begins >= RUN
            steps[begins[long]] += 1
            steps[ends[long]] -= 1
    return np.cumsum(steps[:-1]) > 0 if steps.any() else np.zeros(len(tokens), bool)
