"""The checks, over all of a dataset or over samples of it; and what a run asks of its data before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fasttrain import config
from fasttrain.data.dataset import Dataset
from fasttrain.data.lint.documents import EDGES, Lengths, Separators, check_index
from fasttrain.data.lint.findings import LintFinding, LintReport, Profile, Severity
from fasttrain.data.lint.repetition import SPAN_TOKENS, Duplicates, Hasher, Loops, leak
from fasttrain.data.lint.split import BINS, TokenChunk, TokenSource
from fasttrain.data.lint.tokens import TokenUse, text_findings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fasttrain.data.datasets import AnyDataset

CHUNK_TOKENS = 2**18  # read at a time: its arrays fit the cache of a core
SAMPLES, SAMPLE = 64, 2**13  # of the quick part: half a million tokens, in as many reads as a disk does at once
TEXTS, QUICK_TEXTS = (1024, 512), (64, 256)  # documents that are decoded, and tokens of each
VERIFIED_BYTES = 2**28  # whose checksums are compared before every run: a fraction of a second. Of more, sizes are


def lint(
    dataset: AnyDataset,
    *,
    splits: Sequence[str] | None = None,
    quick: bool = False,
    max_examples: int = 3,
    chunk: int = CHUNK_TOKENS,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> LintReport:
    """Look for what is wrong with the tokens of a dataset.

    quick: samples of them, in about a second at any size. on_progress gets the number of tokens that were read.
    """
    begin = time.perf_counter()
    tokenizer, findings = _tokenizer(dataset)
    hasher = None if quick else Hasher(dataset.vocab, chunk + SPAN_TOKENS)
    found: dict[str, _Split] = {}
    for name in splits or dataset.splits:
        source = TokenSource(dataset, name, tokenizer, max_examples=max_examples)
        found[name] = split = _Split(source, hasher)
        findings += check_index(source, quick=quick)  # before its documents are looked at
        for part in source.chunks(SAMPLE, samples=SAMPLES) if quick else source.chunks(chunk):
            split.add(part)
            on_progress(len(part))
        findings += split.findings(dataset)
    train, validation = found.get("train"), found.get("validation")
    if train and validation and train.duplicates and validation.duplicates:
        findings.append(leak(validation.source, validation.duplicates, train.duplicates))
    return LintReport(
        dataset=str(dataset.path), quick=quick, seconds=time.perf_counter() - begin, findings=tuple(findings),
        read={name: split.read for name, split in found.items()},
        profiles={name: split.profile() for name, split in found.items()},
    )  # fmt: skip


def _tokenizer(dataset: AnyDataset) -> tuple[Tokenizer | None, list[LintFinding]]:
    def finding(severity: Severity, text: str) -> list[LintFinding]:
        return [LintFinding(check="tokenizer", split="", severity=severity, count=0, of=0, unit="files", text=text)]

    try:
        tokenizer = dataset.tokenizer()
        if tokenizer is None:
            return None, finding("ok", "none is named, so text is not checked")
        size = max(tokenizer.get_vocab().values(), default=-1) + 1
    except Exception as error:  # tokenizers raises nothing more exact
        remedy = "put tokenizer.json beside the tokens"
        return None, finding("warning", f"it cannot be read ({error}), so text is not checked; {remedy}")
    if size > dataset.vocab:
        sizes = f"it has ids up to {size - 1:,}, the dataset a vocabulary of {dataset.vocab:,}"
        return tokenizer, finding("warning", f"{sizes}; look whether the files belong together")
    return tokenizer, []


class _Split:
    """The checks of one split."""

    def __init__(self, source: TokenSource, hasher: Hasher | None) -> None:
        self.source, self.read, self._quick = source, 0, hasher is None
        self.separators, self.token_use = Separators(source), TokenUse(source, quick=self._quick)
        self.loops, self.lengths = Loops(source), Lengths(source)
        self.duplicates = None if hasher is None else Duplicates(source, hasher)
        self._read_along = np.zeros(BINS, np.int64)

    def add(self, chunk: TokenChunk) -> None:
        self.read += len(chunk)
        self._read_along += self.source.bins_of(chunk)
        for check in (self.separators, self.token_use, self.loops):
            check.add(chunk)
        if self.source.ends is not None or not self._quick:  # otherwise only short documents lie in a sample whole
            self.lengths.add(chunk)
        if self.duplicates is not None:
            self.duplicates.add(chunk)

    def findings(self, dataset: AnyDataset) -> list[LintFinding]:
        documents, tokens = QUICK_TEXTS if self._quick else TEXTS
        stated = dataset.bytes_per_token(self.source.split)
        return [
            *self.separators.findings(),
            *self.token_use.findings(),
            *text_findings(self.source, documents=documents, tokens=tokens, bytes_per_token=stated),
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
            along["copies"] = self.duplicates.along(self.duplicates.documents)
            along["repeated text"] = self.duplicates.along(self.duplicates.spans)
        used = np.flatnonzero(self.lengths.counts)
        last = int(used[-1]) + 1 if len(used) else 1
        return Profile(
            tokens=len(self.source), lengths=self.lengths.counts[:last], length_edges=EDGES[: last + 1],
            histogram=self.token_use.histogram[:-1], along=along,
        )  # fmt: skip


def suspicions(datasets: Iterable[AnyDataset], settings: config.DataConfig) -> list[str]:
    """List what may be wrong, a line each. Errors raise, unless data.lint says that they are suspicions only."""
    if settings.lint == "off":
        return []
    lines = []
    for dataset in datasets:
        if isinstance(dataset, Dataset):
            dataset.verify(VERIFIED_BYTES)
        report = lint(dataset, quick=True, max_examples=1)
        errors = report.having("error")
        if errors and settings.lint == "stop":
            found = "\n".join(f"  {_line(error)}" for error in errors)
            raise ValueError(
                f"data: samples of {dataset.path} are not fit to train on:\n{found}\n"
                f"  `fasttrain data lint {dataset.path}` looks at all of it; --data.lint warn trains on it as it is"
            )
        lines += [f"{dataset.path}: {_line(finding)}" for finding in (*errors, *report.having("warning"))]
    return lines


def _line(finding: LintFinding) -> str:
    place = ""
    for example in finding.examples[:1]:
        document = "" if example.document is None else f"document {example.document:,}, "
        place = f" (first seen in {example.split}: {document}token {example.offset:,})"
    return f"{finding.check}: {finding.text}{place}"
