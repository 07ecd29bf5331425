"""The chunk rule: how many tokens have their logits in memory at a time, and in which dtype dweight is summed."""

from __future__ import annotations

from typing import NamedTuple

import torch

# A chunk re-reads and re-writes dweight, so it must be long enough for its matmuls to outweigh that: on an H100 about
# 1,200 tokens, whatever H and V are. In bf16 the byte budget only binds for V beyond 163,840: Qwen3's 151,936 has
# chunks of full length.
_TRITON_MAX_TOKENS = 4096
_TRITON_MAX_BYTES = 5 << 28
_MAX_ELEMENTS = 2**31  # of a chunk, below: the limit of 32-bit indices in other libraries' kernels
# A CPU breaks even far earlier: 256 tokens take 3% more time than 512, 384 tokens 2%, with so much less memory.
_CPU_MAX_TOKENS = 384
_CPU_MAX_BYTES = 80 << 20
_TOKEN_MULTIPLE = 128  # so that matmul tiles are full


class LossChunk(NamedTuple):
    """The split of linear_cross_entropy's tokens."""

    tokens: int  # whose logits exist at a time
    logits_dtype: torch.dtype
    dweight_dtype: torch.dtype  # of the sum over chunks; bfloat16 only where a single chunk has all tokens


def loss_chunk(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    *,
    dtype: torch.dtype,  # of hidden
    weight_dtype: torch.dtype | None = None,  # None: dtype
    use_triton: bool,  # False: the CPU implementation
    need_dweight: bool = True,
    stats: bool = False,
) -> LossChunk:
    """The chunk that linear_cross_entropy takes for these sizes; what memory estimates should call."""
    wide = wide_dtype(dtype)
    summed = dweight_dtype(num_tokens, hidden_size, vocab_size, dtype, weight_dtype or dtype, use_triton)
    # In training the logits' memory takes their gradient, an operand of the next matmuls. Stats keep them precise.
    logits_dtype = wide if stats or not use_triton else dtype
    one_chunk = need_dweight and summed != wide
    tokens = num_tokens if one_chunk else tokens_per_chunk(num_tokens, vocab_size, logits_dtype.itemsize, use_triton)
    return LossChunk(tokens, logits_dtype, summed)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of losses, of gradients in flight, and of all arithmetic on the CPU."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dweight_dtype(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    use_triton: bool,
) -> torch.dtype:
    """Wide where chunks are summed up; that of a bfloat16 weight where one chunk has all tokens.

    One chunk may be longer by H tokens: their logits take the memory that the wider sum would have taken.
    """
    narrow = dtype == torch.bfloat16 and weight_dtype == dtype  # float16 could overflow before grad_scale is applied
    if not (use_triton and narrow):
        return wide_dtype(dtype)
    longest = _max_tokens(vocab_size, weight_dtype.itemsize, use_triton) + hidden_size
    return weight_dtype if min(longest, _MAX_ELEMENTS // (vocab_size + 16)) >= num_tokens else torch.float32


def tokens_per_chunk(num_tokens: int, vocab_size: int, itemsize: int, use_triton: bool) -> int:
    """Equal chunks, each a multiple of _TOKEN_MULTIPLE and within the limits above; at most all tokens."""
    num_chunks = max(_ceil_div(num_tokens, _max_tokens(vocab_size, itemsize, use_triton)), 1)
    even = _ceil_div(num_tokens, num_chunks)
    return min(_ceil_div(even, _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE, num_tokens)


def _max_tokens(vocab_size: int, itemsize: int, use_triton: bool) -> int:
    tokens, budget = (_TRITON_MAX_TOKENS, _TRITON_MAX_BYTES) if use_triton else (_CPU_MAX_TOKENS, _CPU_MAX_BYTES)
    return max(min(tokens, budget // (vocab_size * itemsize)) // _TOKEN_MULTIPLE, 1) * _TOKEN_MULTIPLE


def _ceil_div(n: int, d: int) -> int:
    return -(-n // d)
