"""From a step of a run to the documents that it trained on, and back. Nothing is looked up but what the run recorded.

Steps count from 0 here, as in Batches. A sample's inputs are T tokens of its component's stream; each segment of them
that belongs to one document is an Excerpt.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fasttrain.data.dataset import Dataset, DocumentSource
from fasttrain.data.datasets import AnyDataset
from fasttrain.data.segments import DataSegment, read_segments, segment_at
from fasttrain.data.stream import TokenStream

if TYPE_CHECKING:
    pass

SPLIT = "train"


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """A place in a run where tokens of a document were inputs."""

    step: int
    dp_rank: int
    row: int  # in the rank's batch
    sample: int
    start: int  # in the component's stream
    stop: int


@dataclass(frozen=True, kw_only=True)
class Excerpt(Occurrence):
    """The part of one document that a sample of a step holds."""

    component: str  # "" where there is one dataset
    document: int | None  # None: the data has no index
    source: DocumentSource | None


def documents_of(run: Path, steps: Iterable[int], most: int = 50) -> list[str]:
    """The documents of steps, in short: each once, at most `most` of them. For an event, which must not fail of it."""
    names: dict[str, None] = {}
    try:
        for excerpt in (excerpt for step in steps for excerpt in locate(run, step)):
            prefix = f"{excerpt.component}: " if excerpt.component else ""
            names[f"{prefix}{excerpt.source or f'document {excerpt.document}'}"] = None
            if len(names) == most:
                break
    except (OSError, ValueError) as error:  # files are gone
        names[f"unknown: {error}"] = None
    return list(names)


def locate(run: Path, step: int) -> Iterator[Excerpt]:
    """Every document of a step, rank by rank and row by row."""
    segment = segment_at(run, step)
    data, T = segment.open(), segment.data.sequence
    batches = segment.batches(data)
    for number, (part, sample) in enumerate(zip(*batches.rows_at(step), strict=True)):
        name, stream, *_ = batches.components[part]
        dataset = data.datasets[name]
        dp_rank, row = divmod(number, segment.sequences // segment.dp_size)
        for start, stop, document in _documents(stream, int(sample) * T, T):
            source = None if document is None else dataset.source(SPLIT, document)
            yield Excerpt(
                step=step, dp_rank=dp_rank, row=row, component=name, sample=int(sample), start=start, stop=stop,
                document=document, source=source,
            )  # fmt: skip


def occurrences(run: Path, document: int, *, component: str = "", stop: int) -> Iterator[Occurrence]:
    """Where a document occurred before step `stop`, in the order of the run."""
    standing = read_segments(run)
    for segment, end in zip(standing, [*(later.step for later in standing[1:]), stop], strict=True):
        if segment.step < min(end, stop):
            found = _occurrences_in(segment, document, component, min(end, stop))
            yield from sorted(found, key=lambda place: place.step)


def _occurrences_in(segment: DataSegment, document: int, component: str, end: int) -> Iterator[Occurrence]:
    data, T = segment.open(), segment.data.sequence
    batches, names = segment.batches(data), list(data.datasets)
    if component not in names:
        raise ValueError(f"data: there is no component {component!r}; there are {', '.join(names)}")
    part = names.index(component)
    begin, finish = document_span(batches.components[part].stream, document)
    for sample in range(begin // T, min((finish - 1) // T + 1, batches.sizes[part])):
        for step, row in batches.steps_of(part, sample, end):
            if step >= segment.step:  # before that, another segment was trained
                dp_rank, row = divmod(row, segment.sequences // segment.dp_size)
                start, stop = max(begin, sample * T), min(finish, sample * T + T)
                yield Occurrence(step=step, dp_rank=dp_rank, row=row, sample=sample, start=start, stop=stop)


def document_span(stream: TokenStream, document: int) -> tuple[int, int]:
    """The tokens of a document, its separator first."""
    if stream.document_ends is None:
        raise ValueError("data: this dataset has no index of its documents; only steps can be located")
    if not 0 <= document < len(stream.document_ends):
        raise ValueError(f"data: there is no document {document}; the last is {len(stream.document_ends) - 1}")
    begin = 0 if document == 0 else int(stream.document_ends[document - 1])
    return begin, int(stream.document_ends[document])


def documents_from(dataset: AnyDataset, path: str) -> list[int]:
    """The documents that came from a file, named as it was prepared or by the end of its path; PATH:LINE: one line."""
    if not isinstance(dataset, Dataset) or not (files := list(dataset.source_files())):
        raise ValueError(f"data: {dataset.path} does not know where its documents came from; name one by its number")
    name, _, line = path.rpartition(":") if path.rpartition(":")[2].isdigit() else (path, "", "")
    wanted = Path(name).parts
    matching = [i for i, file in enumerate(files) if file.path.parts[-len(wanted) :] == wanted]
    if not matching:
        raise ValueError(f"data: no document of {dataset.path} came from {name}")
    records = dataset.source_records(SPLIT)
    chosen = np.isin(records["file"], matching) & (records["line"] == int(line) if line else True)
    return np.flatnonzero(chosen).tolist()


def text_of(dataset: AnyDataset, start: int, stop: int) -> str:
    """Tokens of the training split, decoded; as numbers where there is no tokenizer."""
    tokens = dataset.split(SPLIT).windows(np.array([start]), stop - start)[0].tolist()
    tokenizer = dataset.tokenizer()
    return tokenizer.decode(tokens, skip_special_tokens=False) if tokenizer else " ".join(map(str, tokens))


def _documents(stream: TokenStream, start: int, length: int) -> Iterator[tuple[int, int, int | None]]:
    """The documents in a window: first token, end, number."""
    stop = start + length
    if stream.document_ends is None:
        window = stream.windows(np.array([start]), length + 1)
        begins = (start + stream.boundaries(np.array([start]), window)[1]).tolist()
        edges = [start, *(begin for begin in begins if begin < stop), stop]
        yield from ((begin, end, None) for begin, end in pairwise(edges))
        return
    while start < stop:
        document = int(stream.document_ends.searchsorted(np.array([start]), side="right")[0])
        end = min(stop, int(stream.document_ends[document]))
        yield start, end, document
        start = end


def step_of_token(tokens: list[int], position: int) -> int:
    """The step that trained on the run's token number `position`; tokens: how many after each step."""
    if not tokens or not 0 <= position < tokens[-1]:
        raise ValueError(f"data: the run has trained on {tokens[-1] if tokens else 0:,} tokens, not on {position:,}")
    return bisect_right(tokens, position)
