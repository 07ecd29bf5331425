"""The checks, over all of a dataset or over samples of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fasttrain.data.lint.duplicates import SPAN_TOKENS, Duplicates, leak
from fasttrain.data.lint.findings import Finding, Profile, Report
from fasttrain.data.lint.hashes import Hasher
from fasttrain.data.lint.index import check_index
from fasttrain.data.lint.lengths import EDGES, Lengths
from fasttrain.data.lint.repetition import Loops
from fasttrain.data.lint.separators import Separators
from fasttrain.data.lint.source import BINS, Lintable, Piece, Source
from fasttrain.data.lint.text import text_findings
from fasttrain.data.lint.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 2**18  # tokens at a time: its arrays fit the cache of a core
SAMPLES, SAMPLE = 64, 2**13  # of the quick part: half a million tokens, in as many reads as a disk does at once
TEXTS, QUICK_TEXTS = (1024, 512), (64, 256)  # documents that are decoded, and tokens of each


def lint(
    dataset: Lintable,
    *,
    splits: Sequence[str] | None = None,
    quick: bool = False,
    sequence: int | None = None,
    max_examples: int = 3,
    piece: int = PIECE,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Report:
    """Look for what is wrong with the tokens of a dataset.

    quick: samples of them, in about a second at any size. sequence: tokens of a sample, to compare documents with.
    progress is called with the number of tokens that were read.
    """
    begin = time.perf_counter()
    tokenizer, findings = _tokenizer(dataset)
    hasher = None if quick else Hasher(dataset.vocab, piece + SPAN_TOKENS)
    found: dict[str, _Split] = {}
    for name in splits or dataset.splits:
        source = Source(dataset, name, tokenizer, max_examples=max_examples)
        found[name] = split = _Split(source, hasher, sequence)
        findings += check_index(source, quick=quick)  # before its documents are looked at
        for part in source.samples(SAMPLES, SAMPLE) if quick else source.pieces(piece):
            split.add(part)
            progress(len(part))
        findings += split.findings(dataset)
    train, validation = found.get("train"), found.get("validation")
    if train and validation and train.duplicates and validation.duplicates:
        findings.append(leak(validation.source, validation.duplicates, train.duplicates))
    return Report(
        dataset=str(dataset.path),
        quick=quick,
        seconds=time.perf_counter() - begin,
        read={name: split.read for name, split in found.items()},
        findings=tuple(findings),
        profiles={name: split.profile() for name, split in found.items()},
    )


def _tokenizer(dataset: Lintable) -> tuple[Tokenizer | None, list[Finding]]:
    facts = dict(check="tokenizer", split="", count=0, of=0, unit="files")
    try:
        tokenizer = dataset.tokenizer()
        if tokenizer is None:
            return None, [Finding(severity="ok", text="none is named, so text is not checked", **facts)]  # type: ignore[arg-type]
        size = max(tokenizer.get_vocab().values(), default=-1) + 1
    except Exception as error:  # tokenizers raises nothing more exact
        text = f"it cannot be read ({error}), so text is not checked; put tokenizer.json beside the tokens"
        return None, [Finding(severity="warning", text=text, **facts)]  # type: ignore[arg-type]
    if size > dataset.vocab:
        text = (
            f"it has ids up to {size - 1:,}, the dataset a vocabulary of {dataset.vocab:,}; look whether the files "
            "belong together"
        )
        return tokenizer, [Finding(severity="warning", text=text, **facts)]  # type: ignore[arg-type]
    return tokenizer, []


class _Split:
    """The checks of one split."""

    def __init__(self, source: Source, hasher: Hasher | None, sequence: int | None) -> None:
        self.source, self.read, self._quick = source, 0, hasher is None
        self.separators, self.vocabulary = Separators(source), Vocabulary(source, quick=self._quick)
        self.loops, self.lengths = Loops(source), Lengths(source, sequence)
        self.duplicates = None if hasher is None else Duplicates(source, hasher)
        self._read_along = np.zeros(BINS, np.int64)

    def add(self, piece: Piece) -> None:
        self.read += len(piece)
        self._read_along += self.source.bins_of(piece)
        for check in (self.separators, self.vocabulary, self.loops):
            check.add(piece)
        if self.source.indexed or not self._quick:  # otherwise only short documents lie in a sample whole
            self.lengths.add(piece)
        if self.duplicates is not None:
            self.duplicates.add(piece)

    def findings(self, dataset: Lintable) -> list[Finding]:
        stated = getattr(dataset, "bytes_per_token", None)
        documents, tokens = QUICK_TEXTS if self._quick else TEXTS
        return [
            *self.separators.findings(),
            *self.vocabulary.findings(),
            *text_findings(
                self.source,
                documents=documents,
                tokens=tokens,
                bytes_per_token=stated(self.source.split) if stated is not None else None,
            ),
            *self.loops.findings(),
            *(self.duplicates.findings() if self.duplicates is not None else []),
            *self.lengths.findings(),
        ]

    def profile(self) -> Profile:
        read = np.where(self._read_along, self._read_along, np.nan)
        along = {
            "separators": self.separators.along / read * 1e6,
            "doubled separators": self.separators.doubled_along / read * 1e6,
            "loops": self.loops.along / read,
        }
        if self.duplicates is not None:
            along["copies"] = self.duplicates.along(self.duplicates.repeated_documents)
            along["repeated text"] = self.duplicates.along(self.duplicates.repeated_stretches)
        used = np.flatnonzero(self.lengths.counts)
        last = int(used[-1]) + 1 if len(used) else 1
        return Profile(
            tokens=len(self.source),
            lengths=self.lengths.counts[:last],
            length_edges=EDGES[: last + 1],
            histogram=self.vocabulary.histogram[:-1],
            along=along,
        )
