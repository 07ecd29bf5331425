"""The chunked forward: borders of chunks, and one chunk of all tokens in bfloat16."""

import pytest
import torch

from fasttrain_kernels import linear_cross_entropy
from fasttrain_kernels.ops.linear_cross_entropy import op
from fasttrain_kernels.ops.linear_cross_entropy.chunked import chunked_forward
from fasttrain_kernels.ops.linear_cross_entropy.reference import LossOptions
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
