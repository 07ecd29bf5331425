"""A split as the checks see it: chunks of its tokens, in order or far apart, with the documents in them.

Documents are known by the index of a dataset, or by its separators where there is none. A chunk carries some tokens of
its neighbours, so that a check which looks a little around needs no memory of the chunk before, and finds the same
whatever the size of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fasttrain.data.lint.findings import Example, LintFinding, Severity, graded
from fasttrain.data.stream import DocumentEnds, TokenStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fasttrain.data.datasets import AnyDataset

BEFORE, AFTER = 128, 64  # tokens of the neighbours: what the checks look around, and more
BINS = 200  # along the stream, for the plot
EXCERPT = 12  # tokens of an example on either side


@dataclass(frozen=True)
class TokenChunk:
    """Tokens [start, stop) of the stream. All positions are those of the stream."""

    start: int
    stop: int
    around: np.ndarray  # the tokens from `first` on, those of the neighbours included
    first: int
    begins: np.ndarray  # where documents begin in it
    ends: np.ndarray  # where documents end, from `start` to `stop`: those whose length is known,
    lengths: np.ndarray  # and their lengths, the separator included
    documents_before: int  # that begin before `start`; 0 where nobody has counted

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> np.ndarray:
        return self.around[self.start - self.first : self.stop - self.first]


@dataclass
class HitCounter:
    """How often something was seen, and where first."""

    keep: int
    count: int = 0
    places: list[int] = field(default_factory=list)

    def add(self, places: np.ndarray) -> None:
        self.count += len(places)
        self.places += places[: self.keep - len(self.places)].tolist()


class TokenSource:
    """A split, its documents, and its tokenizer if that can be read."""

    def __init__(self, dataset: AnyDataset, split: str, tokenizer: Tokenizer | None, *, max_examples: int) -> None:
        self.split, self.vocab, self.tokenizer, self.max_examples = split, dataset.vocab, tokenizer, max_examples
        self._origin = dataset.source
        self.stream: TokenStream = dataset.split(split)
        self.separator = self.stream.separator
        self.ends: DocumentEnds | None = self.stream.document_ends

    def __len__(self) -> int:
        return len(self.stream)

    def chunks(self, size: int, *, samples: int | None = None) -> Iterator[TokenChunk]:
        """All of the stream; or so many chunks, evenly spread, if that is less."""
        in_order = samples is None or len(self) <= samples * size
        begun, count = np.empty(0, np.int64), 0  # the document that is not over, if its begin was seen; all so far
        for start, stop, first, around in self._all(size) if in_order else self._spread(size, samples or 0):
            if self.ends is not None:
                yield TokenChunk(start, stop, around, first, *_by_index(self.ends, start, stop))
                continue
            begins = np.flatnonzero(around[start - first : stop - first] == self.separator) + start
            if start == 0 and 0 not in begins[:1]:  # the first document begins wherever the stream begins
                begins = np.concatenate([[0], begins])
            known = np.concatenate([begun, begins])
            ends = np.append(known[1:], stop) if stop == len(self) and len(known) else known[1:]
            yield TokenChunk(start, stop, around, first, begins, ends, ends - known[: len(ends)], count)
            begun, count = known[-1:] if in_order else begun, count + len(begins)

    def _all(self, size: int) -> Iterator[tuple[int, int, int, np.ndarray]]:
        for start in range(0, len(self), size):
            first, stop = max(0, start - BEFORE), min(start + size, len(self))
            yield start, stop, first, self.read(first, min(len(self), stop + AFTER) - first)

    def _spread(self, size: int, samples: int) -> Iterator[tuple[int, int, int, np.ndarray]]:
        length = BEFORE + size + AFTER
        firsts = np.linspace(0, len(self) - length, samples).astype(np.int64)
        for first, around in zip(firsts.tolist(), self.stream.windows(firsts, length), strict=True):  # read at once
            yield first + BEFORE, first + BEFORE + size, first, around

    def read(self, start: int, length: int) -> np.ndarray:
        return self.stream.windows(np.array([start], np.int64), length)[0]

    def example(self, offset: int) -> Example:
        """The text around a token."""
        begin = max(0, offset - EXCERPT)
        tokens = self.read(begin, min(2 * EXCERPT, len(self) - begin)).tolist()
        text = " ".join(map(str, tokens))
        if self.tokenizer is not None and 0 <= min(tokens) <= max(tokens) < self.tokenizer.get_vocab_size():
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        document = origin = None
        if self.ends is not None:
            document = int(self.ends.searchsorted(np.array([offset]), side="right")[0])
            document = min(document, len(self.ends) - 1)  # an empty last one begins where the stream ends
            origin = self._origin(self.split, document)
        source = None if origin is None else str(origin)
        return Example(split=self.split, document=document, offset=offset, text=text, source=source)

    def counter(self) -> HitCounter:
        return HitCounter(self.max_examples)

    def finding(
        self, check: str, severity: Severity, seen: HitCounter | int, of: int, unit: str, text: str, **figures: float
    ) -> LintFinding:
        """A finding of this split, with examples where it is not ok."""
        seen = seen if isinstance(seen, HitCounter) else HitCounter(0, seen)
        examples = () if severity == "ok" else tuple(map(self.example, seen.places))
        return LintFinding(
            check=check, split=self.split, severity=severity, count=seen.count, of=of, unit=unit, text=text,
            examples=examples, figures=figures,
        )  # fmt: skip

    def graded(
        self, check: str, seen: HitCounter, of: int, unit: str, text: str, levels: tuple[float, float],
        remedy: str = "", **figures: float,
    ) -> LintFinding:  # fmt: skip
        """A finding whose severity follows from the share that was seen; the remedy is for those that are not ok."""
        severity = graded(seen.count, of, levels)
        return self.finding(check, severity, seen, of, unit, text + remedy * (severity != "ok"), **figures)

    def name(self, token: int) -> str:
        """An id as people know it."""
        spelled = None if self.tokenizer is None else self.tokenizer.id_to_token(token)
        return str(token) if spelled is None else f"{token} ({spelled})"

    def bins(self, offsets: np.ndarray) -> np.ndarray:  # -> (BINS,) int64
        """How many lie in each part of the stream."""
        return np.bincount(offsets * BINS // len(self), minlength=BINS)

    def bins_of(self, chunk: TokenChunk) -> np.ndarray:  # -> (BINS,) int64
        """How many of its tokens lie in each part of the stream."""
        edges = -(-np.arange(BINS + 1) * len(self) // BINS)
        return np.clip(np.minimum(edges[1:], chunk.stop) - np.maximum(edges[:-1], chunk.start), 0, None)


def _by_index(all_ends: DocumentEnds, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The documents of a TokenChunk: begins, ends, lengths and documents_before."""
    edges = np.array([start, stop], np.int64)  # int64: numpy would convert the whole index to the type of others
    left, right = (all_ends.searchsorted(edges, side=side).tolist() for side in ("left", "right"))
    first = right[0] if start else 0
    before = all_ends[np.array([first - 1])] if first else np.zeros(1, np.int64)
    begins, ends = all_ends[np.arange(*left)], all_ends[np.arange(first, right[1])]
    lengths = np.diff(ends, prepend=before)
    return (begins, ends, lengths, left[0] + 1) if start else (np.concatenate([before, begins]), ends, lengths, 0)
