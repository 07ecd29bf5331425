"""The batch of a step: a pure function of dataset, seed, step and global batch. There is no loader state to save.

The stream is split into samples of T + 1 tokens at every T-th token: inputs are the first T, targets the last T, and
neighbours share a token, so that each token is a target once per epoch (but the first, and fewer than T at the end).
The samples of a step, in the order of order.py, are dealt out to data-parallel ranks in contiguous slices, so that
their union does not depend on the number of ranks.

With a document mask, a document is visible to itself only. cu_seqlens says where documents begin in the flattened
batch; a sample begins one as well. Positions restart at 0 with each. The last token of a document has the next
document's first token as its target: that is the separator, the right thing to predict at the end of a text whichever
document follows. Where a dataset has no separator there, nothing could predict the target, and it is IGNORED.

B samples, T tokens of a sample, N documents.
"""

from __future__ import annotations

import hashlib
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fasttrain.data.cursor import DataCursor
from fasttrain.data.order import Mixture, MixturePart, place_of, samples_at
from fasttrain.data.stream import TokenStream

IGNORED = -100  # a target without a loss: the ignore_index of linear_cross_entropy and of PyTorch
_BRIEF = 2e-3  # seconds of a read that the loop can spare
ORDER_BATCH = 512  # samples whose order is computed at a time: of so many, it costs a microsecond for four

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A data-parallel rank's share of a step, or a micro-batch of it."""

    components: np.ndarray  # (B,) int64: from which dataset, by its number in the mixture
    samples: np.ndarray  # (B,) int64: sample s is tokens [s * T, s * T + T] of that dataset's stream
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    positions: Tensor | None  # (B, T) int32
    cu_seqlens: Tensor | None  # (N + 1,) int32
    max_seqlen: int | None = None  # no document is longer: see longest_document
    error: str = ""  # why it could not be read; it has no targets then

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int | None]:
        """Of the model."""
        return self.tokens, self.targets, self.cu_seqlens, self.positions, self.max_seqlen

    def split(self, rows: int) -> list[Batch]:
        """Micro-batches of `rows` samples each."""
        B = len(self.tokens)
        if B % rows:
            raise ValueError(f"data: {B} sequences of a rank do not divide into micro-batches of {rows}")
        return [self._rows(first, first + rows) for first in range(0, B, rows)]

    def pin_memory(self) -> Batch:
        """Copy to memory that a GPU can read while both sides continue."""
        return self._apply(Tensor.pin_memory)

    def pad_documents(self) -> Batch:
        """The same documents, followed by as many empty ones as there can be: cu_seqlens has one length for all."""
        if self.cu_seqlens is None:
            return self
        padded = self.cu_seqlens.new_full((self.tokens.numel() + 1,), self.tokens.numel())
        padded[: len(self.cu_seqlens)] = self.cu_seqlens
        return replace(self, cu_seqlens=padded, max_seqlen=None)

    def to(self, device: torch.device | str) -> Batch:
        """Copy to `device`; the host does not wait for the copy where memory is pinned."""
        return self._apply(lambda tensor: tensor.to(device, non_blocking=True))

    def _rows(self, first: int, stop: int) -> Batch:
        rows, T = self._apply(lambda tensor: tensor[first:stop]), self.tokens.shape[1]
        cu_seqlens = self.cu_seqlens
        if cu_seqlens is not None:  # every row begins a document, so that both ends are among the elements
            begin, end = torch.searchsorted(cu_seqlens, torch.tensor([first * T, stop * T], dtype=torch.int32)).tolist()
            cu_seqlens = cu_seqlens[begin : end + 1] - first * T
            rows = replace(rows, max_seqlen=longest_document(cu_seqlens, T))
        components, samples = self.components[first:stop], self.samples[first:stop]
        return replace(rows, components=components, samples=samples, cu_seqlens=cu_seqlens)

    def _apply(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **changed)


class MixtureComponent(NamedTuple):
    """A dataset of the mixture that a run trains on."""

    name: str
    stream: TokenStream
    weight: float = 1.0  # its share of the samples is this over the sum of all weights
    epochs: float = 0.0  # how often it is seen at most; 0: no limit


class Batches:
    """`batches.at(step)`, for any step in any order."""

    def __init__(
        self,
        data: TokenStream | Sequence[MixtureComponent],
        *,
        sequence: int,  # T
        sequences: int,  # of a step, over all ranks
        seed: int,
        document_mask: bool,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: DataCursor = DataCursor(),  # noqa: B008  (frozen)
    ) -> None:
        if sequences % dp_size:
            raise ValueError(f"data: {sequences} sequences of a step do not divide among {dp_size} ranks")
        self.components = [MixtureComponent("", data)] if isinstance(data, TokenStream) else list(data)
        self.sizes = [_samples_of(component, sequence) for component in self.components]
        """Samples of each component's epoch."""
        self._separator = self.components[0].stream.separator  # components have the same tokenizer
        self._dtype = np.result_type(*(component.stream.dtype for component in self.components))
        self._seeds = [seed_of(seed, component.name) for component in self.components]
        parts = []
        for component, size in zip(self.components, self.sizes, strict=True):
            weight, epochs = Fraction(str(component.weight)), Fraction(str(component.epochs))  # 0.3 is 3/10
            used = cursor.used.get(component.name, 0)
            parts.append(MixturePart(weight, limit=int(epochs * size) if epochs else None, used=used))
        self._mixture = Mixture(parts, seed=seed)
        self._sequence, self._document_mask, self._cursor = sequence, document_mask, cursor
        self._sequences, self._share, self._dp_rank = sequences, sequences // dp_size, dp_rank
        self._rows: dict[int, Rows] = {}

    def at(self, step: int) -> Batch:
        rows = self.rows_at(step)
        return self._made(rows, *self._read(rows))

    def at_or_blank(self, step: int) -> Batch:
        """The batch of a step, or a blank one with the error: a rank that ends alone leaves the others waiting."""
        try:
            return self.at(step)
        except OSError as error:
            rows = self.rows_at(step)
            tokens = np.zeros((len(rows.samples), self._sequence + 1), self._dtype)
            batch = self._made(rows, tokens, np.empty(0, np.int64))
            return replace(batch, targets=torch.full_like(batch.targets, IGNORED), error=str(error))

    def _made(self, rows: Rows, windows: np.ndarray, boundaries: np.ndarray) -> Batch:  # (B, T + 1), (n,)
        """A batch of these tokens, with documents that begin at these places of the flattened batch."""
        tokens, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
        positions = cu_seqlens = None
        if self._document_mask:
            last, flat = boundaries - 1, targets.reshape(-1)
            flat[last[flat[last] != self._separator]] = IGNORED  # nothing could predict them
            begins = np.concatenate([np.arange(0, targets.size + 1, self._sequence), boundaries])
            edges = np.unique(begins).astype(np.int32)
            within = np.arange(targets.size, dtype=np.int32) - np.repeat(edges[:-1], np.diff(edges))
            positions, cu_seqlens = torch.from_numpy(within.reshape(targets.shape)), torch.from_numpy(edges)
        return Batch(
            components=rows.components, samples=rows.samples, tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets), positions=positions, cu_seqlens=cu_seqlens,
            max_seqlen=None if cu_seqlens is None else longest_document(cu_seqlens, self._sequence),
        )  # fmt: skip

    def rows_at(self, step: int) -> Rows:
        """Which samples of which components `at` reads, without reading them."""
        rows = self._rows  # another thread may replace them
        if step not in rows:
            rows = self._rows = self._rows_from(step)
        return rows[step]

    def _rows_from(self, step: int) -> dict[int, Rows]:
        """The rows of a few steps: together they take little longer than one."""
        stop = step + max(ORDER_BATCH // self._share, 1)
        steps = range(step, stop if self.end is None else max(min(stop, self.end), step + 1))
        firsts = (self._first_sample(step) + self._dp_rank * self._share for step in steps)
        components, numbers = map(np.concatenate, zip(*(self._mixture.at(n, self._share) for n in firsts), strict=True))
        samples = samples_at(components, numbers, sizes=self.sizes, seeds=self._seeds)
        split = zip(np.split(components, len(steps)), np.split(samples, len(steps)), strict=True)
        return dict(zip(steps, (Rows(*rows) for rows in split), strict=True))

    def steps_of(self, component: int, sample: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where a sample comes before step `stop`: the steps, and the row in all ranks' batches one after the other."""
        size, seed = self.sizes[component], self._seeds[component]
        end = self._first_sample(stop)
        for epoch in range(-(-self._mixture.used_at(end)[component] // size)):
            place = place_of(sample, size=size, seed=seed, epoch=epoch)
            found = self._mixture.sample_of(component, epoch * size + place, end)
            if found is not None:
                step = self._step_at(found)
                row = found - self._first_sample(step)
                if row < self._sequences:  # otherwise it lies in a segment that was skipped
                    yield step, row

    def used_at(self, step: int) -> dict[str, int]:
        """How many samples of each component have been seen when a step begins."""
        used = self._mixture.used_at(self._first_sample(step))
        return {component.name: count for component, count in zip(self.components, used, strict=True)}

    def epochs_at(self, step: int) -> dict[str, float]:
        """How often each component has been seen when a step begins."""
        return {name: used / size for (name, used), size in zip(self.used_at(step).items(), self.sizes, strict=True)}

    @property
    def end(self) -> int | None:
        """The first step for which there are too few samples, because every component has reached its limit."""
        length = self._mixture.length
        return None if length is None else self._step_at(length - self._sequences) + 1

    def check_last(self, steps: int) -> None:
        """Raise if there are too few samples for so many steps."""
        if self.end is not None and self.end < steps:
            trouble = f"every component has reached its epochs at step {self.end} of {steps}"
            raise ValueError(f"data.mixture: {trouble}; raise the epochs of one, or lower batch.steps")

    def summary(self, steps: int) -> list[str]:
        """A line for each component of a mixture: what a run of so many steps sees of it."""
        used, epochs, T = self.used_at(steps), self.epochs_at(steps), self._sequence
        last = [steps if stop is None else self._step_at(stop) for stop in self._mixture.stops]  # steps that see them
        return [
            f"{name}: {used[name] / sum(used.values()):.1%} of the run, {used[name] * T:,} tokens, {epochs[name]:.3g} "
            f"epochs of {size * T:,}{f', all by step {step}' if step < steps else ''}"
            for name, size, step in zip(used, self.sizes, last, strict=True)
            if name
        ]

    def _step_at(self, sample: int) -> int:
        """The last step that begins at a sample of the mixture or before."""
        steps = range(self._cursor.step, self._cursor.step + max(sample, 0) // self._sequences + 1)
        return self._cursor.step + bisect_right(steps, sample, key=self._first_sample) - 1

    def _read(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:  # -> (B, T + 1), (n,)
        """The tokens of the rows, and where documents begin in the flattened batch."""
        B, T = len(rows.samples), self._sequence
        out, boundaries = np.empty((B, T + 1), self._dtype), [np.empty(0, np.int64)]
        for number in np.flatnonzero(np.bincount(rows.components)).tolist():
            mine = np.flatnonzero(rows.components == number)
            stream, starts = self.components[number].stream, rows.samples[mine] * T
            windows = stream.windows(starts, T + 1)
            if self._document_mask:
                row, offset = stream.boundaries(starts, windows)
                boundaries.append(mine[row] * T + offset)
            if len(mine) == B:
                out = windows
            else:
                out[mine] = windows
        return out, np.concatenate(boundaries)

    def _first_sample(self, step: int) -> int:
        if step < self._cursor.step:
            raise ValueError(f"data: step {step} is before step {self._cursor.step}, where these batches begin")
        for skip in reversed(self._cursor.skips):  # each is in the steps of those before it
            step += skip.steps if skip.step <= step else 0
        return (step - self._cursor.step) * self._sequences


class Rows(NamedTuple):
    """Where the rows of a batch come from, as in Batch."""

    components: np.ndarray  # (B,) int64
    samples: np.ndarray  # (B,) int64


def longest_document(cu_seqlens: Tensor, sequence: int) -> int:
    """A bound of few values, powers of two: compiled graphs do not change with it, and grids are at most doubled."""
    return min(sequence, 1 << (int(cu_seqlens.diff().max()) - 1).bit_length())


def seed_of(seed: int, name: str) -> int:
    """The seed of a component's own order; its name decides, so that others can come and go."""
    return seed if not name else int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")


def _samples_of(component: MixtureComponent, sequence: int) -> int:
    tokens = len(component.stream)
    if tokens <= sequence:
        raise ValueError(
            f"data: a sequence of {sequence} needs {sequence + 1} tokens, and there are {tokens}"
            f"{component.name and f' in {component.name}'}; shorten data.sequence, or prepare more data"
        )
    return (tokens - 1) // sequence


class Prefetcher(AbstractContextManager["Prefetcher[Item]"], Generic[Item]):
    """`at(step)`, as `read(step)` gives it, with the `ahead` steps after it read meanwhile by a background thread.

    What takes no time, because it is in memory, is read ahead by `at` itself: two threads that take the interpreter's
    lock from each other need four times as long. Steps may come in any order: what was read for steps no longer ahead
    is dropped. An error of `read` is raised by the `at` of its own step. Use as a context, or call close().
    """

    def __init__(self, read: Callable[[int], Item], *, ahead: int, stop: int | None = None) -> None:
        """stop: read nothing ahead from this step on."""
        self._read, self._ahead, self._stop = read, ahead, stop
        self._pending: dict[int, Future[Item]] = {}
        self._seconds = math.inf  # that the last read took
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fasttrain-prefetch")
        self.waited = 0.0
        """Seconds that the last `at` took: the time that a step waited for data."""

    def at(self, step: int) -> Item:
        begin = time.perf_counter()
        last = step + self._ahead if self._stop is None else min(step + self._ahead, self._stop - 1)
        wanted = range(step, max(step, last) + 1)
        for number in [number for number in self._pending if number not in wanted]:
            self._pending.pop(number).cancel()
        missing = [number for number in wanted if number not in self._pending]
        is_idle = all(pending.done() for pending in self._pending.values())
        is_brief = is_idle and self._seconds < _BRIEF and step not in missing and len(missing) == 1
        for number in missing:
            self._pending[number] = Future() if is_brief else self._thread.submit(self._timed, number)
        try:
            return self._pending.pop(step).result()
        finally:
            self.waited = time.perf_counter() - begin
            if is_brief:
                self._read_now(missing[0])

    def _timed(self, step: int) -> Item:
        begin = time.perf_counter()
        try:
            return self._read(step)
        finally:
            self._seconds = time.perf_counter() - begin

    def _read_now(self, step: int) -> None:
        try:
            self._pending[step].set_result(self._timed(step))
        except Exception as error:
            self._pending[step].set_exception(error)

    def forget(self) -> None:
        """Drop what was read ahead, because steps have other batches from now on."""
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """Stop reading; returns once the thread has ended."""
        self._thread.shutdown(cancel_futures=True)
        self._pending.clear()

    def __exit__(self, *_: object) -> None:
        self.close()
