"""What a preparation has written so far, and how to go on from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.prepare.chunks import Piece, Position
from fasttrain.data.prepare.documents import DUPLICATE, LeftOut, Place
from fasttrain.data.prepare.inputs import Input
from fasttrain.data.prepare.report import Report
from fasttrain.data.prepare.seen import DIGEST, Seen
from fasttrain.data.prepare.tokenizer import Vocabulary
from fasttrain.data.prepare.worker import Encoded
from fasttrain.data.sources import SourceFile
from fasttrain.data.writer import DatasetFiles, GrowingFile

DIGESTS = "digests"  # of the documents that are in the dataset, while it grows


class Output:
    """Files in a directory that grow piece by piece. What `sync` returns describes them, for another process."""

    def __init__(
        self,
        directory: Path,
        inputs: Sequence[Input],
        vocabulary: Vocabulary,
        *,
        keep_duplicates: bool,
        state: dict[str, Any] | None,
    ) -> None:
        state = state or dict(position=(0, 0), consumed=0, lines=0, documents=0, text=0, tokens=0, spelled=0, digests=0)
        self._directory, self._inputs, self._vocabulary = directory, inputs, vocabulary
        self.position = Position(*state["position"])
        self.consumed: int = state["consumed"]  # bytes of the inputs
        self.documents: int = state["documents"]
        self.text: int = state["text"]  # their bytes
        self.tokens: int = state["tokens"]
        self.spelled: int = state["spelled"]
        self._lines: int = state["lines"]  # of the input at the position, before it
        self._files = DatasetFiles(
            directory, vocab=vocabulary.size, separator=vocabulary.separator, state=state.get("files")
        )
        self.dtype = self._files.dtype
        self.report = Report(directory, inputs, state.get("report"))
        self._seen: Seen | None = None
        if not keep_duplicates and self.position.file < len(inputs):  # at the end, the digests may be deleted already
            self._digests = GrowingFile(directory / DIGESTS, state["digests"])
            self._seen = Seen(np.fromfile(directory / DIGESTS, DIGEST))

    def add(self, piece: Piece, encoded: Encoded) -> None:
        """The documents of the next piece."""
        left_out, sources = encoded.left_out, encoded.sources
        if self._lines:
            left_out = [left._replace(place=_moved(left.place, self._lines)) for left in left_out]
            sources = sources.copy()
            sources["line"] += self._lines
        self.report.check(piece.start.file, left_out, len(encoded.lengths))
        new = np.ones(len(encoded.lengths), bool)
        if self._seen is not None:
            new = self._seen.add(encoded.digests)
            self._digests.write(encoded.digests[new].tobytes())
            left_out = _merged(left_out, [LeftOut(_place(source), DUPLICATE) for source in sources[~new]])
        self.report.add(left_out)
        for split, chosen in (("train", new & ~encoded.held_out), ("validation", new & encoded.held_out)):
            lengths = encoded.lengths[chosen]
            tokens = encoded.tokens if chosen.all() else encoded.tokens[np.repeat(chosen, encoded.lengths)]
            self._files.add(
                split,
                tokens,
                lengths=lengths,
                num_bytes=int(encoded.num_bytes[chosen].sum()),
                sources=sources[chosen],
            )
        self.documents += int(new.sum())
        self.tokens += int(encoded.lengths[new].sum())
        self.text += int(encoded.num_bytes[new].sum())
        self.spelled += encoded.spelled
        self.consumed += piece.size
        self._lines = self._lines + encoded.lines if piece.next.file == piece.start.file else 0
        self.position = piece.next

    def sync(self) -> dict[str, Any]:
        """Everything is on the disk; what another process needs to go on."""
        return dict(
            vocabulary=self._vocabulary[1:],
            position=self.position,
            consumed=self.consumed,
            documents=self.documents,
            text=self.text,
            tokens=self.tokens,
            spelled=self.spelled,
            lines=self._lines,
            files=self._files.sync(),
            report=self.report.sync(),
            digests=0 if self._seen is None else self._digests.sync(),
        )

    def publish(self, path: Path, *, source: str) -> None:
        """A dataset of its own name."""
        report = self.report.close()
        (self._directory / DIGESTS).unlink(missing_ok=True)
        files = (SourceFile(path=Path(i.path), size=i.size, mtime_ns=i.mtime_ns).dump() for i in self._inputs)
        self._files.publish(
            path,
            tokenizer=self._vocabulary.json,
            source=source,
            sources=files,
            report=report,
            left_out=self.report.ordered(),
        )


def _moved(place: Place, lines: int) -> Place:
    return place._replace(line=place.line + lines) if place.line else place


def _place(source: np.void) -> Place:
    return Place(int(source["file"]), int(source["offset"]), int(source["size"]), int(source["line"]))


def _merged(one: list[LeftOut], other: list[LeftOut]) -> list[LeftOut]:
    """In the order of the inputs."""
    return sorted(one + other, key=lambda left: left.place[:2])
