"""How long documents are, in memory that does not grow."""

from __future__ import annotations

import numpy as np

from fasttrain.data.lint.findings import Finding, Severity
from fasttrain.data.lint.source import Piece, Source

PER_OCTAVE = 16  # classes of lengths between n and 2 n: percentiles are within 5%
TINY = 8  # tokens: too little text to learn from
MANY = 0.2  # share of tiny documents
EDGES = np.unique(np.ceil(2 ** (np.arange(48 * PER_OCTAVE) / PER_OCTAVE)).astype(np.int64))  # 1, 2, 3, ... 2**48


class Lengths:
    """Percentiles, and the share of documents that are very short or longer than a sample."""

    def __init__(self, source: Source, sequence: int | None) -> None:
        self._source, self._sequence = source, sequence
        self.counts = np.zeros(len(EDGES), np.int64)
        self._documents = self._longer = self._longest = self._total = 0
        self._tiny = source.tally()

    def add(self, piece: Piece) -> None:
        lengths = piece.lengths
        if not len(lengths):
            return
        classes = np.searchsorted(EDGES, np.maximum(lengths, 1), side="right") - 1
        self.counts += np.bincount(classes, minlength=len(EDGES))
        self._documents += len(lengths)
        self._total += int(lengths.sum())
        self._longest = max(self._longest, int(lengths.max()))
        self._tiny.add((piece.ends - lengths)[lengths <= TINY])
        if self._sequence is not None:
            self._longer += int((lengths > self._sequence).sum())

    def findings(self) -> list[Finding]:
        documents = self._documents
        if not documents:
            return []
        severity: Severity = "warning" if self._tiny.count > MANY * documents else "ok"
        low, middle, high = (self.percentile(p) for p in (5, 50, 95))
        text = (
            f"5% of {documents:,} documents have up to {low:,} tokens, half {middle:,}, 95% {high:,}; the longest "
            f"{self._longest:,}, the mean {self._total / documents:,.0f}"
        )
        if self._sequence is not None:
            text += f"; {self._longer / documents:.1%} are longer than a sample of {self._sequence:,}"
        if severity != "ok":
            text = (
                f"{self._tiny.count / documents:.0%} of {documents:,} documents have {TINY} tokens or fewer: lines "
                "taken for documents, or a separator inside of them; look at the examples"
            )
        figures = dict(p5=low, p50=middle, p95=high, longest=self._longest, mean=self._total / documents)
        return [self._source.finding("document lengths", severity, self._tiny, documents, "documents", text, **figures)]

    def percentile(self, percent: float) -> int:
        """At most 5% too low."""
        reached = np.searchsorted(np.cumsum(self.counts), percent / 100 * self._documents)
        return int(EDGES[min(int(reached), len(EDGES) - 1)])
