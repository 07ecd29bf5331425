"""From files of text to a dataset.

One process cuts the inputs into pieces and writes; workers read, check and encode. Results are written in the order of
the inputs, so that the dataset does not depend on the number of workers. From time to time everything written is
synced, and the journal says how far that is: a killed preparation goes on from there, and ends with the same bytes.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fasttrain.data.prepare.chunks import cut
from fasttrain.data.prepare.inputs import Input, find_inputs
from fasttrain.data.prepare.output import Output
from fasttrain.data.prepare.pool import in_another_process, in_order
from fasttrain.data.prepare.progress_file import Journal, alone_in, clear, work_directory_of
from fasttrain.data.prepare.sample import sample
from fasttrain.data.prepare.settings import Settings
from fasttrain.data.prepare.tokenizer import BYTES, SEPARATOR, Vocabulary, loaded, plain_bytes, trained_on
from fasttrain.data.prepare.worker import Worker
from fasttrain.data.writer import TOKENIZER, refuse_to_overwrite, write_file

SYNC_SECONDS = 2.0  # at most this much work is done twice
RECIPE = 1  # of all that becomes of a text: a change of it takes the next number, and goes on with no earlier work


@dataclass
class Progress:
    """What a preparation tells while it works."""

    stage: str
    total: int  # bytes of the inputs, on disk
    done: int = 0
    documents: int = 0
    text: int = 0  # bytes of the documents
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What came of it."""

    path: Path
    left_out: dict[str, int]  # by reason
    examples: dict[str, str]  # for each reason, where the first was
    spelled: int  # documents that spell the separator, which is text there
    resumed: bool


def prepare(
    names: Sequence[str | Path],
    out: Path,
    *,
    tokenizer: str | Path | int = 8192,
    separator: str | None = None,
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    format: str = "auto",
    workers: int | None = None,
    restart: bool = False,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Prepared:
    """A dataset in `out`, of the files, directories and patterns in `names`.

    tokenizer: a tokenizer.json, the directory of one, "bytes", or the size of a BPE that is trained on the text.
    workers: processes; None: one for each core that this process may use.
    restart: not to go on with an interrupted preparation, but to begin anew.
    tell: called again and again with how far it is.
    """
    out = Path(os.path.abspath(out))
    directory = work_directory_of(out)
    refuse_to_overwrite(out)
    with _remedies(directory), ExitStack() as stack:
        inputs = find_inputs(names, include=include, exclude=exclude, format=format)
        stack.enter_context(alone_in(directory))
        refuse_to_overwrite(out)  # another process may just have finished it
        progress = Progress("encoding", sum(input.size for input in inputs))
        if restart:
            clear(directory)
        journal = Journal(directory, _task(inputs, tokenizer, separator, settings))
        state = journal.read()
        if state is None:
            clear(directory)
            tell(Progress("training a tokenizer" if isinstance(tokenizer, int) else "reading the tokenizer", 0))
            vocabulary = _vocabulary(inputs, tokenizer, separator, settings)
            write_file(directory / TOKENIZER, [vocabulary.json])
        else:
            vocabulary = Vocabulary((directory / TOKENIZER).read_text("utf-8"), *state["vocabulary"])
        output = Output(directory, inputs, vocabulary, keep_duplicates=settings.keep_duplicates, state=state)
        for _ in _grown(output, journal, inputs, vocabulary, settings, workers or len(os.sched_getaffinity(0))):
            progress.done, progress.documents = output.consumed, output.documents
            progress.text, progress.tokens = output.text, output.tokens
            tell(progress)
        if not output.documents:
            clear(directory)
            examples = "; ".join(f"{reason}: {place}" for reason, place in output.report.first.items())
            raise ValueError(f"prepare: there is no document left for {out}: {output.report.summary()}; {examples}")
        output.publish(out, source=", ".join(map(str, names)))
        journal.remove()
    return Prepared(
        path=out,
        left_out=output.report.ordered(),
        examples=output.report.first,
        spelled=output.spelled,
        resumed=state is not None,
    )


def _grown(
    output: Output,
    journal: Journal,
    inputs: Sequence[Input],
    vocabulary: Vocabulary,
    settings: Settings,
    workers: int,
) -> Iterator[None]:
    """Write what is left of the inputs, piece by piece."""
    journal.save(output.sync())
    yield
    pieces = cut(inputs, start=output.position, text_key=settings.text_key, longest=settings.longest)
    make = functools.partial(Worker, inputs, vocabulary, settings, output.dtype)
    synced = time.monotonic()
    with closing(in_order(make, pieces, workers)) as results:
        for piece, encoded in results:
            output.add(piece, encoded)
            if time.monotonic() - synced > SYNC_SECONDS:
                journal.save(output.sync())
                synced = time.monotonic()
            yield
    journal.save(output.sync())


def _vocabulary(
    inputs: Sequence[Input], tokenizer: str | Path | int, separator: str | None, settings: Settings
) -> Vocabulary:
    if tokenizer == BYTES:
        return plain_bytes(separator=separator or SEPARATOR)
    if isinstance(tokenizer, int):
        size = tokenizer
        return in_another_process(lambda: trained_on(sample(inputs, settings), size, separator=separator or SEPARATOR))
    return loaded(Path(tokenizer), separator=separator)


def _task(
    inputs: Sequence[Input], tokenizer: str | Path | int, separator: str | None, settings: Settings
) -> dict[str, Any]:
    """All that decides about the result."""
    digest = hashlib.sha256(repr(list(inputs)).encode("utf-8", "surrogateescape")).hexdigest()
    size = sum(input.size for input in inputs)
    what = f"{len(inputs)} files of {size} bytes, {digest[:16]}"
    return dict(recipe=RECIPE, inputs=what, tokenizer=str(tokenizer), separator=separator) | asdict(settings)


@contextmanager
def _remedies(directory: Path) -> Iterator[None]:
    """What the system says in few words, with what to do."""
    try:
        yield
    except PermissionError as error:
        raise PermissionError(
            f"prepare: no permission for {error.filename}; change that, or leave it out with --exclude"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"prepare: the disk of {directory} is full; make room, and the same command goes on where it stopped"
        ) from None
