"""Keys and values of the tokens so far, so that a new token costs one token's work.

Prompts of any lengths are read in one pass, packed as documents: nothing is padded. After that every row has one token
at a time, each at its own position, and slots that a row has not filled yet are masked.

B rows, S slots of a row, N tokens of all prompts, H query heads, Hk key heads, G = H / Hk, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.model import Decoder
from fasttrain_kernels import attention


class Cache:
    """Of a batch of texts that a model continues."""

    def __init__(self, model: Decoder, prompts: Sequence[Sequence[int]], *, slots: int) -> None:
        self._model = model
        self._device = model.cos.device
        self._prompts = prompts
        self._slots = slots
        self._filled = [0] * len(prompts)  # slots of each row
        self._kv: Tensor | None = None  # (layers, 2, B, S, Hk, D), when the dtype of the first keys is known

    def prefill(self) -> Tensor:  # (B, V)
        """Read the prompts; the logits of the token after each."""
        lengths = [len(prompt) for prompt in self._prompts]
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = torch.tensor([0, *accumulate(lengths)])
        tokens = torch.tensor([token for prompt in self._prompts for token in prompt])
        rows, positions, ends, tokens = (x.to(self._device) for x in (rows, positions, ends, tokens))
        self._filled = lengths
        cu_seqlens = ends.int()
        past = [_Prompts(self, layer, rows, positions, cu_seqlens) for layer in range(len(self._model.blocks))]
        return self._model.logits(tokens[None], cu_seqlens, positions[None], past=past, places=ends[1:] - 1)

    def step(self, tokens: Tensor) -> Tensor:  # (B,) -> (B, V)
        """Add a token to each row; the logits of the one after. A row that is full changes its last token."""
        places = [min(filled, self._slots - 1) for filled in self._filled]
        self._filled = [place + 1 for place in places]
        most = max(self._filled)
        positions = torch.tensor(places, device=self._device)
        alike = min(self._filled) == most
        seen = None if alike else torch.arange(most, device=self._device) <= positions[:, None]
        rows = torch.arange(len(places), device=self._device)
        past = [_Tokens(self, layer, rows, positions, most, seen) for layer in range(len(self._model.blocks))]
        return self._model.logits(tokens[:, None], None, positions[:, None], past=past)[:, 0]

    def layer(self, layer: int, like: Tensor) -> Tensor:  # (..., Hk, D) -> (2, B, S, Hk, D)
        if self._kv is None:
            shape = (len(self._model.blocks), 2, len(self._prompts), self._slots, *like.shape[-2:])
            self._kv = like.new_zeros(shape)  # zeros: what is masked must still be finite
        return self._kv[layer]


@dataclass(frozen=True)
class _Prompts:
    """All prompts in a row: each sees itself."""

    cache: Cache
    layer: int
    rows: Tensor  # (N,)
    positions: Tensor  # (N,)
    cu_seqlens: Tensor  # (B + 1,)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (1, N, H, D), (1, N, Hk, D) twice -> (1, N, H, D)
        keys, values = self.cache.layer(self.layer, k)
        keys[self.rows, self.positions], values[self.rows, self.positions] = k[0], v[0]
        return attention(q, k, v, cu_seqlens=self.cu_seqlens)


@dataclass(frozen=True)
class _Tokens:
    """A token of each row, after those in the cache."""

    cache: Cache
    layer: int
    rows: Tensor  # (B,)
    positions: Tensor  # (B,)
    most: int  # slots that any row has filled
    seen: Tensor | None  # (B, most) bool; None: all

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, 1, H, D), (B, 1, Hk, D) twice -> (B, 1, H, D)
        kv = self.cache.layer(self.layer, k)
        kv[0, self.rows, self.positions], kv[1, self.rows, self.positions] = k[:, 0], v[:, 0]
        keys, values = kv[:, :, : self.most].transpose(2, 3)  # (B, Hk, S, D)
        # The G heads of a group are G queries of its one key head: keys are read once, and nothing is repeated.
        grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])  # (B, Hk, G, D)
        mask = None if self.seen is None else self.seen[:, None, None]
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape)
