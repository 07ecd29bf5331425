"""The problem as the kernels see it: sizes, the mask's reach, and documents as one stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fasttrain_kernels._triton import triton
from fasttrain_kernels.ops.attention.intervals import reach

_MAX_STRIDE = 2**23  # a tile of at most 256 rows then spans less than 2^31 elements


def addressable(x: Tensor) -> Tensor:  # (B, T, H, D)
    """x itself, if the elements of a head are contiguous and 32 bits reach across a tile; otherwise a copy."""
    return x if x.stride(3) == 1 and x.stride(1) < _MAX_STRIDE else x.contiguous()


def is_exact(q: Tensor) -> bool:
    return q.element_size() > 2


def empty_lse(q: Tensor) -> Tensor:  # (B, T, H, D) -> (S, H, B * T)
    """Allocate lse: what backward needs of every row to recompute its probabilities.

    16 bits (S = 1): the log of the sum of exp(logit), in units of ln 2
    float32 (S = 2): the same as two numbers, the pivot of the exponentials and 1 / their sum, which rounds less
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, T, H, _ = q.shape
    return torch.empty(2 if is_exact(q) else 1, H, B * T, dtype=dtype, device=q.device)


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes of one call. With documents, the batch is one stream: batch 1, B * T tokens."""

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    back: int
    ahead: int
    scale: float
    softcap: float
    exact: bool  # float32 (or more): see exponentials.py and empty_lse
    documents: Tensor | None  # (2, num_keys): start and end of each token's document

    @staticmethod
    def of(
        q: Tensor,  # (B, T_q, H, D)
        k: Tensor,  # (B, T_k, Hkv, D)
        documents: Tensor | None,  # (2, B * T_k)
        causal: bool,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> AttentionProblem:
        B, T_q, H, D = q.shape
        T_k, Hkv = k.shape[1:3]
        if documents is not None:
            B, T_q, T_k = 1, B * T_q, B * T_k
        back, ahead = reach(causal, window)
        return AttentionProblem(B, T_q, T_k, H, Hkv, D, back, ahead, scale, softcap or 0.0, is_exact(q), documents)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def one_query(self) -> bool:
        """Whether this is a matrix times a vector in float32, which eager PyTorch sums more exactly than a matmul."""
        return self.exact and self.num_queries == 1

    @property
    def block_d(self) -> int:
        return max(16, triton.next_power_of_2(self.head_dim))  # a matrix instruction takes at least 16

    @property
    def constants(self) -> dict[str, int | float]:
        """The constexpr arguments of the kernels."""
        return dict(
            BACK=self.back,
            AHEAD=self.ahead,
            SCALE=self.scale,
            SOFTCAP=self.softcap,
            EXACT=self.exact,
            D=self.head_dim,
            BLOCK_D=self.block_d,
        )

    def stream(self, x: Tensor) -> Tensor:  # (B, T, H, D) -> (batch, num_tokens, H, D)
        return x if self.documents is None else x.reshape(1, -1, *x.shape[2:])
