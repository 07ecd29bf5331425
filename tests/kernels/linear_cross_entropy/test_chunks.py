"""The chunk rule: borders, lengths and memory of chunks, and one chunk of all tokens in bfloat16."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain_kernels import LossChunk, loss_chunk
from fasttrain_kernels.linear_cross_entropy import chunks, linear_cross_entropy, op
from fasttrain_kernels.linear_cross_entropy.chunked import chunked_forward
from fasttrain_kernels.linear_cross_entropy.reference import LossOptions
from fasttrain_kernels.testing import interpret
from tests.kernels.linear_cross_entropy.problems import both_implementations, check_over_seeds, gradients, problem


@pytest.mark.parametrize("M", [63, 64, 65, 129])
def test_chunk_borders(M, short_chunks):
    with interpret() as launches:
        check_over_seeds(M, 8, 31)
    assert sum(launch.grid[0] for launch in launches) == 8 * M
    assert max(launch.grid[0] for launch in launches) <= 64


@pytest.mark.parametrize("M", [63, 64, 65, 129, 1000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunk_borders_on_cpu(M, reduction, short_chunks):
    check_over_seeds(M, 8, 31, reduction=reduction)


@both_implementations
def test_trap_6_dweight_accumulates_over_chunks_in_float32(implementation, request):
    """Several chunks give what one chunk gives. The weight is float32, so that no final rounding hides a bf16 sum."""
    inputs = problem(200, 4, 16)
    with implementation(), torch.autocast("cpu", torch.bfloat16):
        whole = gradients(linear_cross_entropy, inputs)[2]
        request.getfixturevalue("short_chunks")
        split = gradients(linear_cross_entropy, inputs)[2]
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6 * whole.abs().max().item())


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
        (torch.bfloat16, dict(), LossChunk(8192, torch.bfloat16, torch.bfloat16)),
        (torch.bfloat16, dict(need_dweight=False), LossChunk(4096, torch.bfloat16, torch.bfloat16)),
        (torch.bfloat16, dict(weight_dtype=torch.float32), LossChunk(4096, torch.bfloat16, torch.float32)),
        (torch.bfloat16, dict(stats=True, need_dweight=False), LossChunk(2048, torch.float32, torch.bfloat16)),
        (torch.float16, dict(), LossChunk(4096, torch.float16, torch.float32)),
        (torch.float32, dict(), LossChunk(2048, torch.float32, torch.float32)),
        (torch.bfloat16, dict(use_triton=False), LossChunk(128, torch.float32, torch.float32)),
    ],
)
def test_the_public_rule(dtype, options, expected):
    """Qwen3-8B's head at 8,192 tokens."""
    assert loss_chunk(8192, 4096, 151_936, dtype=dtype, **dict(use_triton=True) | options) == expected


# One chunk of all tokens, in bfloat16: chunks are 64 tokens here, and one may be longer by H.


def forward(inputs):
    """The chunked forward by the Triton kernel, with gradients: its results, and the tokens of each launch."""
    hidden, weight, target = (inputs[name].detach() for name in ("hidden", "weight", "target"))
    with interpret() as launches:
        found = chunked_forward(
            hidden, weight, target, LossOptions(-100, 0.0, 0.0, None), use_triton=True, coef=torch.ones(len(hidden)),
            need_dhidden=True, need_dweight=inputs["weight"].requires_grad,
        )  # fmt: skip
    return found, [launch.grid[0] for launch in launches]


@pytest.mark.parametrize(("H", "M", "chunks"), [(8, 72, [72]), (8, 73, [48, 25]), (40, 104, [104]), (40, 10, [10])])
def test_one_chunk_delivers_dweight_in_bfloat16_and_several_sum_in_float32(H, M, chunks, short_chunks):
    result, launched = forward(problem(M, H, 33, torch.bfloat16))
    assert launched == chunks
    assert result.dweight.dtype == (torch.bfloat16 if len(chunks) == 1 else torch.float32)
    assert result.dhidden.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_sum_dweight_in_float32_in_short_chunks(dtype, short_chunks):
    result, launched = forward(problem(72, 8, 33, dtype))
    assert launched == [48, 24]
    assert result.dweight.dtype == torch.float32


def test_without_dweight_chunks_stay_short(short_chunks):
    inputs = problem(72, 8, 33, torch.bfloat16)
    inputs["weight"] = inputs["weight"].detach()
    assert forward(inputs)[1] == [48, 24]


@pytest.mark.parametrize("M", [72, 73])
@pytest.mark.parametrize("options", [dict(), dict(reduction="sum", token_weight=True), dict(reduction="none")])
def test_one_chunk_is_as_accurate_as_eager(M, options, short_chunks):
    """Upstream gradients are no powers of two: what was rounded as a sum is rounded again."""
    with interpret():
        check_over_seeds(M, 8, 33, torch.bfloat16, **options)


@settings(deadline=None)
@given(M=st.integers(1, 10**5), H=st.integers(1, 20_000), V=st.integers(1, 300_000))
def test_one_chunk_takes_no_more_memory_than_chunks_of_full_length(M, H, V):
    if loss_chunk(M, H, V, dtype=torch.bfloat16, use_triton=True).dweight_dtype == torch.bfloat16:
        in_chunks = 2 * chunks.tokens_per_chunk(10**9, V, 2, True) * V + 4 * V * H
        assert in_chunks >= 2 * M * V + 2 * V * H
        assert M * (V + 15) < 2**31


def test_second_backward_raises_where_dweight_is_of_one_chunk():
    inputs = problem(4, 8, 20, torch.bfloat16)
    with interpret():
        loss = linear_cross_entropy(**inputs)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_one_chunk_compiles_to_the_same_gradients():
    torch._dynamo.reset()
    inputs = problem(6, 8, 33, torch.bfloat16)

    def step(**tensors):
        return linear_cross_entropy(**tensors) * 3

    with interpret():
        expected = gradients(step, inputs)
        compiled = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), inputs)
    assert all(torch.equal(a, b) for a, b in zip(compiled, expected, strict=True))


@pytest.mark.parametrize("M", [72, 73])
def test_the_fake_has_the_dtype_of_dweight(M, short_chunks):
    inputs = problem(M, 8, 33, torch.bfloat16)
    arguments = (*(inputs[k] for k in ("hidden", "weight", "target")), None, -100, 0.0, 0.0, None, True, True, True)
    with interpret():
        torch.library.opcheck(op._linear_cross_entropy, arguments, test_utils=("test_schema", "test_faketensor"))
