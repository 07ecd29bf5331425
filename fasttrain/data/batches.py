"""The batch of a step: a pure function of dataset, seed, step and global batch. There is no loader state to save.

The stream is cut into samples of T + 1 tokens at every T-th token: inputs are the first T, targets the last T, and
neighbours share a token, so that each token is a target once per epoch (but the first, and fewer than T at the end).
The samples of a step, in the order of order.py, are dealt out to ranks in contiguous slices, so that their union does
not depend on the number of ranks.

With a document mask, a document is visible to itself only. cu_seqlens says where documents begin in the flattened
batch; a sample begins one as well. Positions restart at 0 with each. The last token of a document has the next
document's first token as its target: that is the separator, the right thing to predict at the end of a text whichever
document follows. Where a dataset has no separator there, nothing could predict the target, and it is IGNORED.

B samples, T tokens of a sample, N documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttrain.data.order import samples_of_run
from fasttrain.data.stream import TokenStream

IGNORED = -100  # a target without a loss: the ignore_index of linear_cross_entropy and of PyTorch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's share of a step, or a piece of it."""

    samples: np.ndarray  # (B,) int64: sample s is tokens [s * T, s * T + T] of the stream
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    positions: Tensor | None  # (B, T) int32
    cu_seqlens: Tensor | None  # (N + 1,) int32

    def split(self, rows: int) -> list[Batch]:
        """Micro-batches of `rows` samples each."""
        B, T = self.tokens.shape
        if B % rows:
            raise ValueError(f"data: {B} sequences of a rank do not divide into micro-batches of {rows}")
        return [self._rows(first, first + rows, T) for first in range(0, B, rows)]

    def pin_memory(self) -> Batch:
        """In memory that a GPU can copy from while both sides go on."""
        return self._apply(Tensor.pin_memory)

    def to(self, device: torch.device | str) -> Batch:
        """On `device`; the host does not wait for the copy where memory is pinned."""
        return self._apply(lambda tensor: tensor.to(device, non_blocking=True))

    def _rows(self, first: int, stop: int, T: int) -> Batch:
        cu_seqlens = self.cu_seqlens
        if cu_seqlens is not None:  # every row begins a document, so that both ends are among the elements
            begin, end = torch.searchsorted(cu_seqlens, torch.tensor([first * T, stop * T], dtype=torch.int32)).tolist()
            cu_seqlens = cu_seqlens[begin : end + 1] - first * T
        return Batch(
            samples=self.samples[first:stop],
            tokens=self.tokens[first:stop],
            targets=self.targets[first:stop],
            positions=None if self.positions is None else self.positions[first:stop],
            cu_seqlens=cu_seqlens,
        )

    def _apply(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            tokens=change(self.tokens),
            targets=change(self.targets),
            positions=None if self.positions is None else change(self.positions),
            cu_seqlens=None if self.cu_seqlens is None else change(self.cu_seqlens),
        )


class Origin(NamedTuple):
    """Where batches of one size begin: a run that goes on with another size goes on in the data where it was."""

    step: int = 0
    sample: int = 0


class Batches:
    """`batches.at(step)`, for any step in any order."""

    def __init__(
        self,
        stream: TokenStream,
        *,
        sequence: int,  # T
        sequences: int,  # of a step, over all ranks
        seed: int,
        document_mask: bool,
        rank: int = 0,
        world: int = 1,
        origin: Origin = Origin(),  # noqa: B008  (frozen)
    ) -> None:
        if sequences % world:
            raise ValueError(f"data: {sequences} sequences of a step do not divide among {world} ranks")
        if seed < 0:
            raise ValueError(f"data: seed ({seed}) must not be negative")
        self.samples_per_epoch = (len(stream) - 1) // sequence
        if not self.samples_per_epoch:
            raise ValueError(
                f"data: a sequence of {sequence} needs {sequence + 1} tokens, and there are {len(stream)}; shorten "
                "data.sequence, or prepare more data"
            )
        self._stream, self._sequence, self._seed, self._document_mask = stream, sequence, seed, document_mask
        self._sequences, self._share, self._rank, self._origin = sequences, sequences // world, rank, origin

    def at(self, step: int) -> Batch:
        samples = self.samples_at(step)
        starts = samples * self._sequence
        windows = self._stream.windows(starts, self._sequence + 1)
        targets = windows[:, 1:].astype(np.int64)
        positions = cu_seqlens = None
        if self._document_mask:
            positions, cu_seqlens = self._documents(starts, windows, targets)
        return Batch(
            samples=samples,
            tokens=torch.from_numpy(windows[:, :-1].astype(np.int64)),
            targets=torch.from_numpy(targets),
            positions=None if positions is None else torch.from_numpy(positions),
            cu_seqlens=None if cu_seqlens is None else torch.from_numpy(cu_seqlens),
        )

    def samples_at(self, step: int) -> np.ndarray:  # -> (B,) int64
        """Which samples `at` reads, without reading them."""
        return samples_of_run(
            self._first_sample(step) + self._rank * self._share,
            self._share,
            size=self.samples_per_epoch,
            seed=self._seed,
        )

    def epoch(self, step: int) -> float:
        """How often the data has been seen when a step begins."""
        return self._first_sample(step) / self.samples_per_epoch

    def _first_sample(self, step: int) -> int:
        if step < self._origin.step:
            raise ValueError(f"data: step {step} is before step {self._origin.step}, where these batches begin")
        return self._origin.sample + (step - self._origin.step) * self._sequences

    def _documents(
        self,
        starts: np.ndarray,  # (B,)
        windows: np.ndarray,  # (B, T + 1)
        targets: np.ndarray,  # (B, T), changed in place
    ) -> tuple[np.ndarray, np.ndarray]:  # (B, T), (N + 1,)
        B, T = targets.shape
        rows, offsets = self._stream.boundaries(starts, windows)
        boundaries = rows * T + offsets  # in the flattened batch, each after the last token of a document
        cu_seqlens = np.unique(np.concatenate([np.arange(0, B * T + 1, T), boundaries])).astype(np.int32)
        positions = np.arange(B * T, dtype=np.int32) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
        last = boundaries - 1
        flat = targets.reshape(-1)
        flat[last[flat[last] != self._stream.separator]] = IGNORED
        return positions.reshape(B, T), cu_seqlens
