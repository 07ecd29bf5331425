"""Which token comes next, by the model's logits and a number between 0 and 1.

Temperature first, then the top_k likeliest, then of these the fewest that have top_p of the probability together. The
number picks among what is left as a place on a line of length 1 that tokens divide by their probability, likeliest
first. So a text depends on its own numbers only, whatever is generated beside it.

B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.8  # 0: always the likeliest
    top_k: int = 40  # 0: all
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"generate: temperature {self.temperature} must be 0, for the likeliest token, or above")
        if self.top_k < 0:
            raise ValueError(f"generate: top_k {self.top_k} must be 0, for all tokens, or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p {self.top_p} must be above 0 and at most 1")

    def numbers(self, samples: Sequence[int], tokens: int) -> Tensor:  # (B, tokens) float64 in [0, 1)
        """For each text, by its own number as a sample: as many as it has tokens."""
        return torch.stack([_uniform(f"{self.seed} {sample}", tokens) for sample in samples])

    def draw(self, logits: Tensor, numbers: Tensor) -> Tensor:  # (B, V), (B,) -> (B,)
        """A token for each row."""
        if self.temperature == 0:
            return logits.argmax(-1)
        V = logits.shape[-1]
        scores, candidates = logits.double().topk(min(self.top_k or V, V))
        shares = (scores / self.temperature).softmax(-1)
        sums = shares.cumsum(-1)
        kept = F.pad(sums[:, :-1], (1, 0)) < self.top_p  # those before it do not have enough yet
        length = (shares * kept).sum(-1)
        place = torch.searchsorted(sums, (numbers * length)[:, None], right=True)
        return candidates.gather(-1, place.minimum(kept.sum(-1, keepdim=True) - 1))[:, 0]


def _uniform(key: str, count: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
