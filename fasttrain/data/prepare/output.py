"""What a preparation has written so far, and how to resume from it."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.dataset import SourceFile
from fasttrain.data.prepare.documents import DUPLICATE, INVALID, NO_TEXT, REASONS, Dropped, InputSpan, SeenDigests
from fasttrain.data.prepare.inputs import Input, InputChunk, Position, unusable
from fasttrain.data.prepare.tokenizer import TokenizerSpec
from fasttrain.data.prepare.workers import EncodedChunk
from fasttrain.data.writer import DatasetFiles, appended

NAME = "dropped.jsonl"
MIN_BAD_LINES = 10  # of a file: fewer are no reason to stop
DIGESTS = "digests"  # of the documents that are in the dataset, while it grows


class DropReport:
    """The dropped documents, and why: a line of dropped.jsonl for each, and counts. state: what `sync` returned."""

    def __init__(self, directory: Path, inputs: Sequence[Input], state: dict[str, Any] | None) -> None:
        state = state or dict(size=0, counts={}, first={})
        self._inputs = inputs
        self.file = appended(directory / NAME, state["size"])
        self.counts: dict[str, int] = state["counts"]
        self.first: dict[str, str] = state["first"]  # an example of each reason
        self._file_number, self._good, self._bad = 0, 0, 0  # lines of the file that is being read

    def add(self, dropped: Iterable[Dropped]) -> None:
        """Append documents in the order of the inputs, with lines of the file."""
        for span, reason, detail in dropped:
            path = self._inputs[span.file].path
            where = dict(line=span.line) if span.line else dict(row=span.offset)
            line = dict(reason=reason, file=path) | where | (dict(detail=detail) if detail else {})
            self.file.write(json.dumps(line).encode() + b"\n")
            self.counts[reason] = self.counts.get(reason, 0) + 1
            if reason not in self.first:
                example = f"{path}:{span.line}" if span.line else f"{path}, row {span.offset}"
                example += f" ({detail})" if detail else ""
                self.first[reason] = example.encode("utf-8", "backslashreplace").decode()  # names need not be UTF-8

    def check(self, file: int, dropped: Sequence[Dropped], kept: int) -> None:
        """Raise if more lines of a file are bad than good, as far as it was read: it is not what it is taken for."""
        if file != self._file_number:
            self._file_number, self._good, self._bad = file, 0, 0
        bad = [drop for drop in dropped if drop.reason in (INVALID, NO_TEXT)]
        self._good += kept
        self._bad += len(bad)
        if self._bad >= MIN_BAD_LINES and self._bad > self._good:
            span, reason, detail = bad[0]
            remedy = "set --text-key" if reason == NO_TEXT else "name the right file, or set --format"
            where = f"line {span.line}" if span.line else f"row {span.offset}"
            trouble = f"has more bad lines than good ones, one of them {where}: {reason} ({detail})"
            raise unusable(self._inputs[file], trouble, remedy)

    def sync(self) -> dict[str, Any]:
        return dict(size=self.file.sync(), counts=self.counts, first=self.first)

    def ordered(self) -> dict[str, int]:
        """Counts by reason, in a fixed order."""
        return {reason: self.counts[reason] for reason in REASONS if reason in self.counts}


class Output:
    """Files in a directory that grow chunk by chunk. What `sync` returns describes them, for another process."""

    def __init__(
        self,
        directory: Path, inputs: Sequence[Input], tokenizer: TokenizerSpec, *, keep_duplicates: bool,
        state: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        state = state or dict(position=(0, 0), consumed=0, lines=0, documents=0, digests=0)
        self._directory, self._inputs, self._tokenizer = directory, inputs, tokenizer
        self.position = Position(*state["position"])
        self.consumed: int = state["consumed"]  # bytes of the inputs
        self._lines: int = state["lines"]  # of the input at the position, before it
        self.documents: int = state["documents"]
        sizes = dict(vocab=tokenizer.size, separator=tokenizer.separator)
        self._files = DatasetFiles(directory, **sizes, state=state.get("files"))
        self.dtype = self._files.dtype
        self.report = DropReport(directory, inputs, state.get("report"))
        self._seen: SeenDigests | None = None
        if not keep_duplicates and self.position.file < len(inputs):  # at the end, the digests may be deleted already
            self._digests = appended(directory / DIGESTS, state["digests"])
            self._seen = SeenDigests((directory / DIGESTS).read_bytes())

    def add(self, chunk: InputChunk, encoded: EncodedChunk) -> None:
        """Write the documents of the next chunk."""
        dropped, sources = encoded.dropped, encoded.sources
        if self._lines:
            moved = (drop.span._replace(line=drop.span.line + self._lines) for drop in dropped)
            dropped = [drop._replace(span=span) for drop, span in zip(dropped, moved, strict=True)]
            sources = sources.copy()
            sources["line"] += self._lines
        self.report.check(chunk.start.file, dropped, len(encoded.lengths))
        new = np.ones(len(encoded.lengths), bool)
        if self._seen is not None:
            new = self._seen.add(encoded.digests)
            self._digests.write(encoded.digests[new].tobytes())
            dropped = dropped + [Dropped(InputSpan(*source), DUPLICATE) for source in sources[~new].tolist()]
            dropped.sort(key=lambda drop: (drop.span.file, drop.span.offset))  # in the order of the inputs
        self.report.add(dropped)
        for split, chosen in (("train", new & ~encoded.held_out), ("validation", new & encoded.held_out)):
            tokens = encoded.tokens if chosen.all() else encoded.tokens[np.repeat(chosen, encoded.lengths)]
            lengths, num_bytes = encoded.lengths[chosen], int(encoded.num_bytes[chosen].sum())
            self._files.add(split, tokens, lengths=lengths, num_bytes=num_bytes, sources=sources[chosen])
        self.documents += int(new.sum())
        self.consumed += chunk.size
        self._lines = self._lines + encoded.lines if chunk.next.file == chunk.start.file else 0
        self.position = chunk.next

    def sync(self) -> dict[str, Any]:
        """Have everything on the disk; the state that another process needs to resume."""
        return dict(
            tokenizer=self._tokenizer[1:], position=self.position, consumed=self.consumed, documents=self.documents,
            lines=self._lines, files=self._files.sync(), report=self.report.sync(),
            digests=0 if self._seen is None else self._digests.sync(),
        )  # fmt: skip

    def complete(self, path: Path, *, source: str) -> None:
        """Make it a dataset, under its own name."""
        report = self.report.file.finish()
        (self._directory / DIGESTS).unlink(missing_ok=True)
        files = (SourceFile(path=Path(i.path), size=i.size, mtime_ns=i.mtime_ns).dump() for i in self._inputs)
        self._files.complete(
            path, tokenizer=self._tokenizer.json, source=source, sources=files, report=report,
            dropped=self.report.ordered(),
        )  # fmt: skip
