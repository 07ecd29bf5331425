"""Tokens, targets, and the documents among them.

With a document mask, a document is visible to itself only. cu_seqlens says where documents begin in the flattened
batch; a sample begins one as well. Positions restart at 0 with each. The last token of a document has the next
document's first token as its target: that is the separator, the right thing to predict at the end of a text whichever
document follows. Where a dataset has no separator there, nothing could predict the target, and it is IGNORED.

B samples, T tokens of a sample, N documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # a target without a loss: the ignore_index of linear_cross_entropy and of PyTorch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's share of a step, or a piece of it."""

    components: np.ndarray  # (B,) int64: from which dataset, by its number in the mixture
    samples: np.ndarray  # (B,) int64: sample s is tokens [s * T, s * T + T] of that dataset's stream
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
            components=self.components[first:stop],
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
