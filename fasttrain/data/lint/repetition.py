"""Text that occurs more than once: loops, documents, spans of them, and documents of validation in training data.

The hash of tokens x[a:b] is the sum of r[x[i]] * B**(i - a) modulo 2**64, with a random number r for each id and an odd
B. With the sums S of r[x[i]] * B**i up to each place of a chunk, that is (S[b] - S[a]) * B**-a, so all spans of a
chunk cost one pass. A bounded sample of hashes still knows how many are alike.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from fasttrain.data.lint.findings import LintFinding
from fasttrain.data.lint.split import AFTER, BEFORE, BINS, HitCounter, TokenChunk, TokenSource

BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers have inverses modulo 2**64
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
PERIODS = range(1, 65)  # tokens between a token and its repetition
MIN_RUN = 32  # repeated tokens in a row: 2 rounds and more of a loop of 16
LOOPS_LEVELS = (0.02, 0.5)  # share of tokens; tables and drawings in good text have a few
_WORD = np.uint64(0x0101010101010101)  # eight times True
assert max(PERIODS) + MIN_RUN <= BEFORE
assert MIN_RUN <= AFTER
MAX_DOCUMENTS = 2**23  # hashes of documents that are kept, 16 bytes each; of larger datasets, a share
MAX_SPANS = 2**20
SPAN_TOKENS = 32  # so many in a row are alike by copying, hardly by chance
MIN_DOCUMENT_TOKENS = 32  # shorter documents are alike by chance
COPIES_LEVELS = (0.01, 0.5)  # share of documents
SPANS_LEVELS = (0.3, 0.8)  # share of spans: licences, headers and menus are in every corpus


class Hasher:
    """Prefix sums of chunks of up to `size` tokens."""

    def __init__(self, vocab: int, size: int) -> None:
        self._random = np.random.default_rng(0).integers(0, 2**64, size=vocab, dtype=np.uint64)
        one, bases = np.ones(1, np.uint64), (BASE, _INVERSE)
        self.powers, self.inverses = (np.cumprod(np.append(one, np.full(size, base))) for base in bases)

    def sums(self, tokens: np.ndarray) -> np.ndarray:  # (n,) -> (n + 1,) uint64
        out = np.zeros(len(tokens) + 1, np.uint64)
        terms = np.take(self._random, tokens, mode="clip")  # an id that is not in the vocabulary counts as the last
        terms *= self.powers[: len(tokens)]
        np.cumsum(terms, out=out[1:])
        return out

    def runs(self, sums: np.ndarray, length: int) -> np.ndarray:  # -> (n - length + 1,)
        """The hash of every `length` tokens."""
        hashes = sums[length:] - sums[:-length]
        hashes *= self.inverses[: len(hashes)]
        return hashes


class HashSample:
    """Hashes below a limit, with where they were seen; the limit falls as they become too many.

    Equal hashes stay or go together, so that the share of repeats in the sample is that of all, and what is kept does
    not depend on the order. 16 bytes for each.
    """

    def __init__(self, capacity: int, *, expected: int = 0) -> None:
        self._capacity, self._kept = capacity, 0
        self._hashes: list[np.ndarray] = []
        self._places: list[np.ndarray] = []
        self.halvings = 0
        while expected >> self.halvings > 2 * capacity:  # do not keep first what will be dropped later
            self.halvings += 1

    def add(self, hashes: np.ndarray, places: np.ndarray | int) -> None:  # (n,) uint64, (n,) or the place of the first
        chosen = np.flatnonzero(hashes <= self.limit)
        self._hashes.append(hashes[chosen])
        self._places.append(chosen + places if isinstance(places, int) else places[chosen])
        self._kept += len(chosen)
        while self._kept > self._capacity:
            self.halvings += 1
            all_hashes, all_places = self.all()
            below = all_hashes <= self.limit
            self._hashes, self._places, self._kept = [all_hashes[below]], [all_places[below]], int(below.sum())

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and places, in the order of the stream."""
        none_hashes, none_places = np.empty(0, np.uint64), np.empty(0, np.int64)
        return np.concatenate([none_hashes, *self._hashes]), np.concatenate([none_places, *self._places])

    @cached_property
    def repeats(self) -> tuple[np.ndarray, np.ndarray]:
        """Once all are added: the places of all, in the order of the stream, and those that repeat an earlier one."""
        hashes, places = self.all()
        order = np.argsort(hashes, kind="stable")
        again = np.zeros(len(hashes), bool)
        again[order[1:]] = hashes[order[1:]] == hashes[order[:-1]]
        return places, places[again]

    @property
    def limit(self) -> np.uint64:
        return np.uint64((2**64 - 1) >> self.halvings)


def mixed(hashes: np.ndarray, lengths: np.ndarray) -> np.ndarray:  # uint64, int64 -> uint64
    """Mix hashes with the lengths, spread evenly over all 64 bits."""
    x = hashes ^ (lengths.astype(np.uint64) * BASE)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


class Loops:
    """Tokens in runs of at least MIN_RUN that equal those PERIODS before."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self._read = self._tokens = self._documents = 0
        self._last_document = -1
        self._spans = source.counter()
        self.along = np.zeros(BINS, np.int64)

    def add(self, chunk: TokenChunk) -> None:
        self._read += len(chunk)
        loops = loops_in(chunk.around)
        core = loops[chunk.start - chunk.first :][: len(chunk)]
        places = np.flatnonzero(core)
        if not len(places):
            return
        self._tokens += len(places)
        self.along += self._source.bins(places + chunk.start)
        before = np.concatenate([loops[chunk.start - chunk.first - 1 :][:1] if chunk.start else [False], core[:-1]])
        self._spans.add(np.flatnonzero(core & ~before) + chunk.start)
        documents = chunk.documents_before + np.searchsorted(chunk.begins, places + chunk.start, side="right")
        found = np.unique(documents)
        self._documents += len(found) - int(found[0] == self._last_document)
        self._last_document = int(found[-1])

    def findings(self) -> list[LintFinding]:
        loops = max(self._spans.count, int(self._tokens > 0))  # a sample may lie within one
        share = self._tokens / max(self._read, 1)
        text = f"{share:.2%} of the tokens are in {loops:,} loops, in {self._documents:,} documents"
        remedy = "; drop documents that repeat themselves: a model that trains on loops writes loops"
        figures = dict(loops=loops, documents=self._documents)
        seen = replace(self._spans, count=self._tokens)
        return [self._source.graded("repetition", seen, self._read, "tokens", text, LOOPS_LEVELS, remedy, **figures)]


def loops_in(tokens: np.ndarray) -> np.ndarray:  # (n,) -> (n,) bool
    """Which tokens lie in a run of MIN_RUN that equal those before."""
    steps = np.zeros(len(tokens) + 1, np.int32)  # +1 where a run begins, -1 where it ends
    equal = np.zeros(len(tokens) + 8, bool)
    words = equal[: len(equal) // 8 * 8].view(np.uint64)
    for period in PERIODS:
        if period >= len(tokens):
            break
        np.equal(tokens[period:], tokens[:-period], out=equal[: len(tokens) - period])
        equal[len(tokens) - period :] = False
        whole = words == _WORD  # a run of MIN_RUN holds MIN_RUN / 8 - 1 whole words, wherever it begins
        if whole.any() and (whole[:-2] & whole[1:-1] & whole[2:]).any():
            edges = np.flatnonzero(np.diff(equal, prepend=False))
            begins, ends = edges[::2] + period, edges[1::2] + period
            long = ends - begins >= MIN_RUN
            steps[begins[long]] += 1
            steps[ends[long]] -= 1
    return np.cumsum(steps[:-1]) > 0 if steps.any() else np.zeros(len(tokens), bool)


class Duplicates:
    """Hashes of documents and of sampled spans."""

    def __init__(self, source: TokenSource, hasher: Hasher) -> None:
        self._source, self._hasher = source, hasher
        documents = 0 if source.ends is None else len(source.ends)
        self.documents = HashSample(MAX_DOCUMENTS, expected=documents)
        self.spans = HashSample(MAX_SPANS, expected=len(source))
        self._total = 0  # the sum up to the chunk, with powers from the start of the stream
        self._open, self._open_total = 0, 0  # where the text of the last document begins, and the sum up to there

    def add(self, chunk: TokenChunk) -> None:
        core = chunk.start - chunk.first
        tokens = chunk.around[core : core + len(chunk) + SPAN_TOKENS - 1]
        sums = self._hasher.sums(tokens)
        if len(tokens) >= SPAN_TOKENS:
            self.spans.add(self._hasher.runs(sums, SPAN_TOKENS)[: len(chunk)], chunk.start)
        self._add_documents(chunk, sums[: len(chunk) + 1])

    def _add_documents(self, chunk: TokenChunk, sums: np.ndarray) -> None:
        shift, shift_back = (np.uint64(pow(int(base), chunk.start, 2**64)) for base in (BASE, _INVERSE))

        def total(places: np.ndarray) -> np.ndarray:
            return sums[places - chunk.start] * shift + np.uint64(self._total)

        starts = chunk.ends - chunk.lengths
        texts = np.minimum(self._texts(chunk, starts), chunk.ends)
        here = np.maximum(texts, chunk.start)
        before, inverses = total(here), self._hasher.inverses[here - chunk.start] * shift_back
        if len(starts) and starts[0] < chunk.start:
            texts[0], before[0], inverses[0] = self._open, self._open_total, pow(int(_INVERSE), self._open, 2**64)
        hashes, lengths = (total(chunk.ends) - before) * inverses, chunk.ends - texts
        long = lengths >= MIN_DOCUMENT_TOKENS
        self.documents.add(mixed(hashes, lengths)[long], starts[long])
        if len(chunk.begins):
            last = self._texts(chunk, chunk.begins[-1:])
            self._open, self._open_total = int(last[0]), int(total(last)[0])
        self._total = int(total(np.array([chunk.stop]))[0])

    def _texts(self, chunk: TokenChunk, starts: np.ndarray) -> np.ndarray:
        """Where the texts of documents begin: after the separator, if there is one."""
        first = chunk.tokens[np.clip(starts - chunk.start, 0, len(chunk) - 1)]
        return starts + (first == self._source.separator)

    def findings(self) -> list[LintFinding]:
        seen, of = self._repeated(self.documents)
        text = f"{seen.count:,} of {of:,} documents of {MIN_DOCUMENT_TOKENS} tokens and more are copies of earlier ones"
        if self.documents.halvings:
            text += f" (in a sample of one in {2**self.documents.halvings})"
        remedy = "; remove duplicates before preparing: copies are learned by heart"
        copies = self._source.graded("duplicates", seen, of, "documents", text, COPIES_LEVELS, remedy)
        seen, of = self._repeated(self.spans)
        text = f"{seen.count / max(of, 1):.1%} of the spans of {SPAN_TOKENS} tokens have occurred before"
        remedy = "; remove near-duplicates and text that every document carries, such as menus and licences"
        return [copies, self._source.graded("repeated text", seen, of, "spans", text, SPANS_LEVELS, remedy)]

    def _repeated(self, sample: HashSample) -> tuple[HitCounter, int]:
        seen = self._source.counter()
        seen.add(sample.repeats[1])
        return seen, len(sample.repeats[0])

    def along(self, sample: HashSample) -> np.ndarray:  # -> (BINS,)
        """The share that has occurred before."""
        places, repeated = sample.repeats
        return self._source.bins(repeated) / np.maximum(self._source.bins(places), 1)


def leak(source: TokenSource, validation: Duplicates, train: Duplicates) -> LintFinding:
    """Documents of validation that are in the training data too."""
    (held_out, places), (trained_on, _) = validation.documents.all(), train.documents.all()
    finest = min(validation.documents.limit, train.documents.limit)  # both samples hold all below it
    held_out, places = held_out[held_out <= finest], places[held_out <= finest]
    seen = source.counter()
    seen.add(places[np.isin(held_out, trained_on)])
    text = (
        f"{seen.count:,} of {len(places):,} documents are in the training data too, and the validation loss is too low "
        "by them; hold documents out by their content, or remove duplicates before splitting"
    )
    if not seen.count:
        text = f"none of {len(places):,} documents of {MIN_DOCUMENT_TOKENS} tokens and more is in the training data"
    return source.graded("leak", seen, len(places), "documents", text, (0, 0))
