"""The chunk rule: borders, lengths and memory of chunks, and one chunk of all tokens in bfloat16."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain_kernels import LossChunk, loss_chunk
from fasttrain_kernels.ops.linear_cross_entropy import chunks


def test_trap_9_no_chunk_reaches_2_to_the_31_elements():
    for V, itemsize, M in itertools.product([1, 50_257, 262_144, 2**22], [2, 4], [1, 4097, 10**7]):
        for use_triton in (True, False):
            chunk = chunks.tokens_per_chunk(M, V, itemsize, use_triton)
            assert 1 <= chunk <= max(chunks._TRITON_MAX_TOKENS, 64)
            assert chunk * (V + 15) < 2**31


@pytest.mark.parametrize(
    ("V", "expected"), [(1000, 4096), (50_304, 4096), (128_256, 4096), (151_936, 4096), (262_144, 2560)]
)
def test_chunks_are_long_enough_for_the_matmuls(V, expected):
    """Thousands of tokens for any vocabulary in use; equal chunks, so that none is nearly empty."""
    assert chunks.tokens_per_chunk(10**6, V, 2, True) == pytest.approx(expected, abs=128)
    assert chunks.tokens_per_chunk(4097, 1000, 2, True) == 2176


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.bfloat16, dict(), LossChunk(8192, "bfloat16", "bfloat16")),
        (torch.bfloat16, dict(need_dweight=False), LossChunk(4096, "bfloat16", "bfloat16")),
        (torch.bfloat16, dict(weight_dtype=torch.float32), LossChunk(4096, "bfloat16", "float32")),
        (torch.bfloat16, dict(stats=True, need_dweight=False), LossChunk(2048, "float32", "bfloat16")),
        (torch.float16, dict(), LossChunk(4096, "float16", "float32")),
        (torch.float32, dict(), LossChunk(2048, "float32", "float32")),
        (torch.bfloat16, dict(use_triton=False), LossChunk(128, "float32", "float32")),
    ],
)
def test_the_public_rule(dtype, options, expected):
    """Qwen3-8B's head at 8,192 tokens."""
    options = dict(use_triton=True) | options
    assert loss_chunk(8192, 4096, 151_936, dtype=dtype, **options) == expected
    assert loss_chunk(8192, 4096, 151_936, dtype=str(dtype).removeprefix("torch."), **options) == expected


@settings(deadline=None)
@given(M=st.integers(1, 10**5), H=st.integers(1, 20_000), V=st.integers(1, 300_000))
def test_one_chunk_takes_no_more_memory_than_chunks_of_full_length(M, H, V):
    if loss_chunk(M, H, V, dtype=torch.bfloat16, use_triton=True).dweight_dtype == "bfloat16":
        in_chunks = 2 * chunks.tokens_per_chunk(10**9, V, 2, True) * V + 4 * V * H
        assert in_chunks >= 2 * M * V + 2 * V * H
        assert M * (V + 15) < 2**31
