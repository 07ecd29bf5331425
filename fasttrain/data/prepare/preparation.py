"""From files of text to a dataset.

One process splits the inputs into chunks and writes; workers read, check and encode. Results are written in the order
of the inputs, so that the dataset does not depend on the number of workers. From time to time everything written is
synced, and the progress file says how far that is: a killed preparation resumes from there, and ends with the same
bytes.
"""

import errno
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.config import PrepareConfig
from fasttrain.data.dataset import PARTIAL
from fasttrain.data.prepare.documents import sample
from fasttrain.data.prepare.inputs import Input, check_columns, find_inputs, split_inputs
from fasttrain.data.prepare.output import Output
from fasttrain.data.prepare.tokenizer import BYTES, SEPARATOR, TokenizerSpec, loaded, plain_bytes, trained_on
from fasttrain.data.prepare.workers import Worker, in_another_process, in_order
from fasttrain.data.writer import TOKENIZER, refuse_to_overwrite
from fasttrain.fs import exclusive_lock, sync, write_file

SYNC_SECONDS = 2.0  # at most this much work is repeated
RECIPE = 1  # of all that becomes of a text: a change of it takes the next number, and resumes no earlier work


def work_directory_of(out: Path) -> Path:
    """A hidden directory beside the dataset; by its name, nothing takes it for one."""
    return out.parent / f".{out.name}{PARTIAL}prepare"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the work directory, as long as this process lives."""
    path = _beside(directory, ".lock")
    with exclusive_lock(path, f"prepare: another process is preparing {directory}"):
        directory.mkdir(exist_ok=True)
        try:
            yield
        finally:
            with suppress(OSError):
                directory.rmdir()  # if there is nothing in it to resume
            path.unlink(missing_ok=True)


class ProgressFile:
    """How far a preparation came. What it says is on the disk; what came after it is repeated."""

    def __init__(self, directory: Path, task: dict[str, Any]) -> None:
        """task: everything that decides about the result, by names for people."""
        self._directory, self._task = directory, task
        self.path = _beside(directory, ".json")

    def read(self) -> dict[str, Any] | None:
        """Read what was saved last; None: nothing. Raise if it is work on another task."""
        if not (self.path.exists() and self._directory.exists()):
            return None
        found = json.loads(self.path.read_text("utf-8"))
        name = next((name for name in self._task if found["task"].get(name) != self._task[name]), None)
        if name is None:
            return found["state"]
        if not found["state"]["documents"]:
            return None  # no work is lost
        other = f"{name} ({found['task'].get(name)}, now {self._task[name]})"
        raise ValueError(
            f"prepare: {self._directory} holds a preparation that was interrupted, with another {other}; repeat that "
            "command to resume it, or add --restart to start over"
        )

    def save(self, state: dict[str, Any]) -> None:
        """Replace what was saved before, at once or not at all."""
        sync(self._directory)
        write_file(self.path, [json.dumps(dict(task=self._task, state=state))])


def clear(directory: Path) -> None:
    """Delete all that is in the directory, the progress file first: without it, nothing is resumed."""
    _beside(directory, ".json").unlink(missing_ok=True)
    for path in directory.iterdir():
        path.unlink()


def _beside(directory: Path, ending: str) -> Path:
    """A path beside the directory, not inside: it becomes the dataset, with all that is in it."""
    return directory.with_name(directory.name + ending)


class PreparationProgress(NamedTuple):
    """How far a preparation is."""

    stage: str
    total: int  # bytes of the inputs, on disk
    done: int = 0
    documents: int = 0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of a preparation."""

    path: Path
    dropped: dict[str, int]  # by reason
    examples: dict[str, str]  # for each reason, where the first was
    resumed: bool


def prepare(
    names: Sequence[str | Path],
    out: Path,
    *,
    tokenizer: str | Path | int = 8192,
    separator: str | None = None,
    settings: PrepareConfig = PrepareConfig(),  # noqa: B008  (frozen)
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    format: str = "auto",
    workers: int | None = None,
    restart: bool = False,
    on_progress: Callable[[PreparationProgress], None] = lambda progress: None,
) -> Prepared:
    """Write a dataset to `out`, of the files, directories and patterns in `names`.

    tokenizer: a tokenizer.json, the directory of one, "bytes", or the size of a BPE that is trained on the text.
    workers: processes; None: one for each core that this process may use.
    restart: start over instead of resuming an interrupted preparation.
    on_progress: called for every chunk.
    """
    out = Path(os.path.abspath(out))
    directory = work_directory_of(out)
    refuse_to_overwrite(out)
    with _remedies(directory), ExitStack() as stack:
        inputs = find_inputs(names, include=include, exclude=exclude, format=format)
        stack.enter_context(locked(directory))
        refuse_to_overwrite(out)  # another process may just have finished it
        check_columns(inputs, settings.text_key)
        total = sum(input.size for input in inputs)
        if restart:
            clear(directory)
        digest = hashlib.sha256(repr(inputs).encode("utf-8", "surrogateescape")).hexdigest()
        what = f"{len(inputs)} files of {total} bytes, {digest[:16]}"
        task = dict(recipe=RECIPE, inputs=what, tokenizer=str(tokenizer), separator=separator) | asdict(settings)
        progress_file = ProgressFile(directory, task)
        state = progress_file.read()
        if state is None:
            clear(directory)
            stage = "training a tokenizer" if isinstance(tokenizer, int) else "reading the tokenizer"
            on_progress(PreparationProgress(stage, 0))
            if isinstance(tokenizer, int):
                train = functools.partial(trained_on, size=tokenizer, separator=separator or SEPARATOR)
                spec = in_another_process(lambda: train(sample(inputs, settings)))
            elif tokenizer == BYTES:
                spec = plain_bytes(separator=separator or SEPARATOR)
            else:
                spec = loaded(Path(tokenizer), separator=separator)
            write_file(directory / TOKENIZER, [spec.json])
        else:
            spec = TokenizerSpec((directory / TOKENIZER).read_text("utf-8"), *state["tokenizer"])
        output = Output(directory, inputs, spec, keep_duplicates=settings.keep_duplicates, state=state)
        for _ in _grown(output, progress_file, inputs, spec, settings, workers or len(os.sched_getaffinity(0))):
            on_progress(PreparationProgress("encoding", total, output.consumed, output.documents))
        if not output.documents:
            clear(directory)
            counts = ", ".join(f"{count} {reason}" for reason, count in output.report.ordered().items())
            examples = "; ".join(f"{reason}: {where}" for reason, where in output.report.first.items())
            raise ValueError(
                f"prepare: there is no document left for {out}: {counts or 'nothing was dropped'}; {examples}"
            )
        output.complete(out, source=", ".join(map(str, names)))
        progress_file.path.unlink(missing_ok=True)
    return Prepared(path=out, dropped=output.report.ordered(), examples=output.report.first, resumed=state is not None)


def _grown(
    output: Output, progress_file: ProgressFile, inputs: Sequence[Input], spec: TokenizerSpec, settings: PrepareConfig,
    workers: int,
) -> Iterator[None]:  # fmt: skip
    """Write what is left of the inputs, chunk by chunk."""
    progress_file.save(output.sync())
    yield
    chunks = split_inputs(inputs, start=output.position, text_key=settings.text_key, longest=settings.longest)
    make = functools.partial(Worker, inputs, spec, settings, output.dtype)
    synced = time.monotonic()
    with closing(in_order(make, chunks, workers)) as results:
        for chunk, encoded in results:
            output.add(chunk, encoded)
            if time.monotonic() - synced > SYNC_SECONDS:
                progress_file.save(output.sync())
                synced = time.monotonic()
            yield
    progress_file.save(output.sync())


@contextmanager
def _remedies(directory: Path) -> Iterator[None]:
    """Add what to do to errors of the system."""
    try:
        yield
    except PermissionError as error:
        trouble = f"no permission for {error.filename}"
        raise PermissionError(f"prepare: {trouble}; change that, or skip it with --exclude") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"prepare: the disk of {directory} is full; free some space, and the same command resumes where it stopped"
        ) from None
