"""What was left out, and why: a line of left-out.jsonl for each document, and counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fasttrain.data.manifest import File
from fasttrain.data.prepare.documents import INVALID, NO_TEXT, REASONS, LeftOut
from fasttrain.data.prepare.inputs import Input
from fasttrain.data.writer import GrowingFile

NAME = "left-out.jsonl"
FEW = 10  # bad lines of a file that are no reason to stop


class Report:
    """Grows with the dataset, and goes on from what `sync` returned."""

    def __init__(self, directory: Path, inputs: Sequence[Input], state: dict[str, Any] | None) -> None:
        state = state or dict(size=0, counts={}, first={})
        self._inputs = inputs
        self._file = GrowingFile(directory / NAME, state["size"])
        self.counts: dict[str, int] = state["counts"]
        self.first: dict[str, str] = state["first"]  # an example of each reason
        self._file_number, self._good, self._bad = 0, 0, 0  # lines of the file that is being read

    def add(self, left_out: Iterable[LeftOut]) -> None:
        """In the order of the inputs, with lines of the file."""
        for place, reason, detail in left_out:
            path = self._inputs[place.file].path
            where: dict[str, Any] = dict(line=place.line) if place.line else dict(row=place.offset)
            line = dict(reason=reason, file=path) | where | (dict(detail=detail) if detail else {})
            self._file.write(json.dumps(line).encode() + b"\n")
            self.counts[reason] = self.counts.get(reason, 0) + 1
            if reason not in self.first:
                example = f"{path}:{place.line}" if place.line else f"{path}, row {place.offset}"
                example += f" ({detail})" if detail else ""
                self.first[reason] = example.encode("utf-8", "backslashreplace").decode()  # names need not be UTF-8

    def check(self, file: int, left_out: Sequence[LeftOut], kept: int) -> None:
        """Raise if more lines of a file are bad than good, as far as it was read: it is not what it is taken for."""
        if file != self._file_number:
            self._file_number, self._good, self._bad = file, 0, 0
        bad = [left for left in left_out if left.reason in (INVALID, NO_TEXT)]
        self._good += kept
        self._bad += len(bad)
        if self._bad >= FEW and self._bad > self._good:
            place, reason, detail = bad[0]
            remedy = "set --text-key" if reason == NO_TEXT else "name the right file, or set --format"
            where = f"line {place.line}" if place.line else f"row {place.offset}"
            raise ValueError(
                f"prepare: {self._inputs[file].path} has more bad lines than good ones, one of them {where}: {reason} "
                f"({detail}); {remedy}"
            )

    def sync(self) -> dict[str, Any]:
        return dict(size=self._file.sync(), counts=self.counts, first=self.first)

    def close(self) -> File:
        return self._file.close()

    def ordered(self) -> dict[str, int]:
        """Counts by reason, in a fixed order."""
        return {reason: self.counts[reason] for reason in REASONS if reason in self.counts}

    def summary(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.ordered().items()) or "nothing was left out"
