"""The chunk rule: how many tokens have their logits in memory at a time, and in which dtype dweight is summed.

Importing it imports no torch: fasttrain plan asks it too, and answers in half a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
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
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_TOKEN_MULTIPLE = 128  # so that matmul tiles are full


class LossChunk(NamedTuple):
    """The split of linear_cross_entropy's tokens."""

    tokens: int  # whose logits exist at a time
    logits_dtype: str
    dweight_dtype: str  # of the sum over chunks; bfloat16 only where a single chunk has all tokens


def loss_chunk(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    *,
    dtype: torch.dtype | str,  # of hidden, as torch.bfloat16 or "bfloat16"
    weight_dtype: torch.dtype | str | None = None,  # None: dtype
    use_triton: bool,  # False: the CPU implementation
    need_dweight: bool = True,
    stats: bool = False,
) -> LossChunk:
    """The chunk that linear_cross_entropy takes for these sizes; what memory estimates should call."""
    summed = dweight_dtype(num_tokens, hidden_size, vocab_size, dtype, weight_dtype or dtype, use_triton)
    # In training the logits' memory takes their gradient, an operand of the next matmuls. Stats keep them precise.
    logits_dtype = _wide(dtype) if stats or not use_triton else _name(dtype)
    one_chunk = need_dweight and summed != _wide(dtype)
    itemsize = _ITEMSIZE[logits_dtype]
    tokens = num_tokens if one_chunk else tokens_per_chunk(num_tokens, vocab_size, itemsize, use_triton)
    return LossChunk(tokens, logits_dtype, summed)


def dweight_dtype(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype | str,
    weight_dtype: torch.dtype | str,
    use_triton: bool,
) -> str:
    """Wide where chunks are summed up; that of a bfloat16 weight where one chunk has all tokens.

    One chunk may be longer by H tokens: their logits take the memory that the wider sum would have taken.
    """
    # Not float16, which could overflow before grad_scale is applied
    if not (use_triton and _name(dtype) == _name(weight_dtype) == "bfloat16"):
        return _wide(dtype)
    longest = _max_tokens(vocab_size, _ITEMSIZE["bfloat16"], use_triton) + hidden_size
    return "bfloat16" if min(longest, _MAX_ELEMENTS // (vocab_size + 16)) >= num_tokens else "float32"


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _wide(dtype: torch.dtype | str) -> str:
    return "float64" if _name(dtype) == "float64" else "float32"


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
