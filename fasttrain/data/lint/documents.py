"""Checks of documents: the index in ascending order, one separator before each document, and their lengths."""

from collections.abc import Sequence

import numpy as np

from fasttrain.data.lint.findings import SYSTEMATIC, LintFinding, Severity, graded
from fasttrain.data.lint.split import BINS, HitCounter, TokenChunk, TokenSource

INDEX_BLOCK = 2**16  # documents at a time
INDEX_SAMPLES, INDEX_SAMPLE = 64, 2**9  # of the quick part: a page each
REMEDY = "prepare the dataset again"
MIN_TOKENS = 2**16  # in which there must be a separator
PER_OCTAVE = 16  # classes of lengths between n and 2 n: percentiles are within 5%
TINY_TOKENS = 8  # too little text to learn from
MAX_TINY = 0.2  # share of tiny documents
EDGES = np.unique(np.ceil(2 ** (np.arange(48 * PER_OCTAVE) / PER_OCTAVE)).astype(np.int64))  # 1, 2, 3, ... 2**48


def check_index(source: TokenSource, *, quick: bool) -> list[LintFinding]:
    """Check that documents end one after the other, if there is an index. A bad one is not used by later checks."""
    ends = source.ends
    if ends is None:
        return []
    size = INDEX_SAMPLE if quick else INDEX_BLOCK
    starts: Sequence[int] = range(0, len(ends), size)
    if quick and len(starts) > INDEX_SAMPLES:
        starts = np.linspace(0, len(ends) - size, INDEX_SAMPLES).astype(np.int64).tolist()
    wrong = read = 0
    for start in starts:
        block = ends[np.arange(start, min(start + size + 1, len(ends)))]
        wrong += int((np.diff(block) < 0).sum()) + int(block[0] < 0) + int(block[-1] > len(source))
        read += min(len(block), size)
    if not wrong:
        return [source.finding("index", "ok", 0, read, "documents", f"{len(ends):,} documents, one after the other")]
    source.ends = None
    trouble = f"{wrong:,} documents end before they begin, or after the last token"
    text = f"{trouble}: the index is corrupt, and not used below; copy the dataset again, or prepare it again"
    return [source.finding("index", "error", wrong, read, "documents", text)]


class Separators:
    """How many there are; doubled ones, missing ones, some inside documents, and documents of nothing else."""

    def __init__(self, source: TokenSource) -> None:
        self._source, self._name = source, source.name(source.separator or 0)
        self._tokens = self._found = self._documents = self._ended = self._trailing = 0
        self._doubled, self._missing, self._inside, self._empty = (source.counter() for _ in range(4))
        self.along, self.doubled_along = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)

    def add(self, chunk: TokenChunk) -> None:
        separator = self._source.separator
        self._tokens += len(chunk)
        self._documents += len(chunk.begins)
        if separator is None:
            return
        here = np.flatnonzero(chunk.tokens == separator) + chunk.start
        self._found += len(here)
        later = here[here > 0]
        doubled = later[chunk.around[later - 1 - chunk.first] == separator]
        self._doubled.add(doubled)
        self.along += self._source.bins(here)
        self.doubled_along += self._source.bins(doubled)
        if self._source.ends is not None:
            self._compare(chunk, here, doubled, separator)

    def _compare(self, chunk: TokenChunk, here: np.ndarray, doubled: np.ndarray, separator: int) -> None:
        """Compare with the index."""
        at_first, at_last = (chunk.around[np.maximum(chunk.begins - chunk.first - n, 0)] == separator for n in (0, 1))
        self._trailing += int((at_last & ~at_first).sum())
        # the document before may end with it instead, which is the same stream
        self._missing.add(chunk.begins[~at_first & ~at_last])
        ends, lengths = chunk.ends, chunk.lengths
        last, last_but_one = (chunk.around[np.maximum(ends - chunk.first - n, 0)] == separator for n in (1, 2))
        empty = (lengths == 0) | (last & ((lengths == 1) | ((lengths == 2) & last_but_one)))
        self._empty.add((ends - lengths)[empty])
        self._ended += len(ends)
        self._inside.add(np.setdiff1d(here, np.concatenate([chunk.begins, ends - 1, doubled])))

    def findings(self) -> list[LintFinding]:
        found, documents, ended = self._found, self._documents, self._ended
        if self._source.separator is None:
            text = "the dataset names no separator, so nothing is checked"
            return [self._source.finding("separators", "ok", 0, 0, "separators", text)]
        doubled = "follow another one, and the model trains on an empty document at each"
        doubled += f"; write one separator between documents, and drop empty ones ({REMEDY})"
        findings = [self._rate(), self._graded("doubled separators", self._doubled, found, "separators", doubled)]
        if self._source.ends is None:
            return findings
        inside = f"stand inside documents; encode text without special tokens ({REMEDY})"
        return [
            *findings,
            self._missing_finding(documents),
            self._graded("separators inside", self._inside, found, "separators", inside),
            self._graded("empty documents", self._empty, ended, "documents", f"hold no text; drop them ({REMEDY})"),
        ]

    def _rate(self) -> LintFinding:
        """Compare the number of separators with that of documents."""
        source, found, documents = self._source, self._found, self._documents
        indexed = source.ends is not None
        severity: Severity = "ok"
        text = f"{found:,} separators {self._name}, {found / max(self._tokens, 1) * 1e6:,.0f} per million tokens"
        if not found and (documents > 1 if indexed else self._tokens >= MIN_TOKENS):
            severity = "error" if indexed else "warning"  # a stream may be one text
            text = (
                f"there is no separator {self._name} in {self._tokens:,} tokens, and the model cannot learn where text "
                f"ends; name the token that separates documents (data.separator; -1: all is one text), or {REMEDY}"
            )
        elif indexed:
            text += f", for {documents:,} documents"
            if abs(found - documents) > 0.01 * documents:
                severity = "warning"
                text += f": {found / max(documents, 1):.2f} for each, which should be 1; see the checks below"
        return source.finding("separators", severity, found, documents, "documents", text)

    def _missing_finding(self, documents: int) -> LintFinding:
        missing, trailing = self._missing, self._trailing > documents / 2
        if trailing and missing.places[:1] == [0]:  # nothing is before the first document
            missing = HitCounter(missing.keep, missing.count - 1, missing.places[1:])
        faulty = f"do not begin with the separator {self._name}"
        faulty += f", and the model does not learn where those before them end; {REMEDY}"
        good = ", which end with it instead of beginning with it" if trailing else ""
        return self._graded("missing separators", missing, documents, "documents", faulty, good)

    def _graded(self, check: str, seen: HitCounter, of: int, unit: str, faulty: str, good: str = "") -> LintFinding:
        text = f"{seen.count:,} of {of:,} {unit} {faulty}" if seen.count else f"none among {of:,} {unit}{good}"
        return self._source.graded(check, seen, of, unit, text, (0, SYSTEMATIC))


class Lengths:
    """Percentiles, and the share of documents that are very short."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self.counts = np.zeros(len(EDGES), np.int64)
        self._documents = self._longest = self._total = 0
        self._tiny = source.counter()

    def add(self, chunk: TokenChunk) -> None:
        lengths = chunk.lengths
        if not len(lengths):
            return
        classes = np.searchsorted(EDGES, np.maximum(lengths, 1), side="right") - 1
        self.counts += np.bincount(classes, minlength=len(EDGES))
        self._documents += len(lengths)
        self._total += int(lengths.sum())
        self._longest = max(self._longest, int(lengths.max()))
        self._tiny.add((chunk.ends - lengths)[lengths <= TINY_TOKENS])

    def findings(self) -> list[LintFinding]:
        documents = self._documents
        if not documents:
            return []
        reached = np.searchsorted(np.cumsum(self.counts), np.array([0.05, 0.5, 0.95]) * documents)
        low, middle, high = EDGES[reached].tolist()  # at most 5% too low
        mean, severity = self._total / documents, graded(self._tiny.count, documents, (MAX_TINY, 1.0))
        text = f"5% of {documents:,} documents have up to {low:,} tokens, half {middle:,}, 95% {high:,}"
        text += f"; the longest {self._longest:,}, the mean {mean:,.0f}"
        if severity != "ok":
            text = f"{self._tiny.count / documents:.0%} of {documents:,} documents have {TINY_TOKENS} tokens or fewer: "
            text += "lines taken for documents, or a separator inside of them; look at the examples"
        figures = dict(p5=low, p50=middle, p95=high, longest=self._longest, mean=mean)
        return [self._source.finding("document lengths", severity, self._tiny, documents, "documents", text, **figures)]
