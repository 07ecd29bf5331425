"""The Triton kernels in the interpreter, at sizes of several tiles. Accuracy over seeds: tests/kernels/numbers."""

import pytest
import torch

from fasttrain_kernels import attention, attention_reference
from fasttrain_kernels.ops.attention.tiles import key_gradient_tile, query_gradient_tile
from fasttrain_kernels.testing import assert_accurate, interpret

CASES = {
    "less than a tile": (dict(queries=63, heads=2, kv_heads=2), {}),
    "trap 13: batch 2, 3 heads per key head, ragged length": (dict(batch=2, queries=200, heads=3), {}),
    "trap 13: 5 heads per key head": (dict(queries=70, heads=10, kv_heads=2), {}),
    "bidirectional": (dict(queries=200, dim=64), dict(causal=False)),
    "head dimension 80": (dict(dim=80), {}),
    "window": (dict(queries=300, heads=1), dict(window=50)),
    "window in both directions": (dict(queries=200), dict(causal=False, window=30)),
    "window across several blocks": (dict(queries=300, heads=1), dict(causal=False, window=140)),
    "softcap": (dict(queries=200), dict(softcap=2.0, scale=0.5)),
    "fewer queries than keys": (dict(batch=2, queries=63, keys=200), {}),
    "one query, the last": (dict(queries=1, keys=130), {}),
    "fewer queries, window": (dict(queries=63, keys=200), dict(window=40)),
    "cross attention": (dict(queries=200, keys=63), dict(causal=False)),
    "trap 13: queries that see nothing": (dict(queries=200, keys=63), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_as_accurate_as_eager(case, make, eager):
    """Trap 2: the interpreter hands out memory full of NaN, so an element that nobody writes is seen."""
    shapes, options = CASES[case]
    with interpret():
        assert_accurate(attention, attention_reference, make(**shapes) | options, eager=eager)


@pytest.mark.parametrize(
    "options",
    [{}, dict(causal=False), dict(window=20), dict(causal=False, window=20, softcap=3.0)],
    ids=["causal", "bidirectional", "window", "all"],
)
def test_documents_see_only_themselves(options, make, cu_seqlens, eager):
    """Trap 13: documents of length 0 and 1, across tile borders and across the border of the batch."""
    inputs = make(batch=2, queries=200, size=2.0) | dict(cu_seqlens=cu_seqlens) | options
    with interpret():
        assert_accurate(attention, attention_reference, inputs, eager=eager)


def test_result_does_not_depend_on_the_order_of_programs(make):
    inputs = make(queries=100, heads=3)

    def run(order):
        with interpret(order=order):
            out = attention(**inputs)
            return out, *torch.autograd.grad(out, list(inputs.values()), torch.ones_like(out))

    for reordered in (run("reverse"), run(1)):
        assert all(map(torch.equal, run(None), reordered))


@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        ("q", ["delta", "query_gradient"]),
        ("k", ["delta", "key_gradient"]),
        ("v", ["key_gradient"]),
        ("kv", ["delta", "key_gradient"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_operands_cost_nothing(wanted, kernels, dtype, make):
    """Trap 17."""
    inputs = {name: x.detach().requires_grad_(name in wanted) for name, x in make(queries=32, dtype=dtype).items()}
    tensors = [inputs[name] for name in wanted]
    upstream = torch.randn_like(inputs["q"])
    expected = torch.autograd.grad(attention_reference(**inputs), tensors, upstream)
    with interpret() as launches:
        actual = torch.autograd.grad(attention(**inputs), tensors, upstream)
    atol, rtol = (1e-5, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)  # bf16 roundings
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    if dtype == torch.float32:  # delta is another run of the other kernel over the keys
        kernels = [name.replace("delta", "query_gradient") for name in kernels]
    assert [launch.kernel for launch in launches[1:]] == [f"_attention_{name}_kernel" for name in kernels]
    matmuls = {"q": 3, "k": 3, "v": 2, "kv": 4}[wanted]
    table = query_gradient_tile if wanted == "q" else key_gradient_tile
    tile = table(inputs["q"], 16, False)
    assert launches[-1].flops == matmuls * 2 * (2 * tile.own * tile.step * 16)  # one step for each of the 2 heads


@pytest.mark.parametrize("shape", [(0, 4, 2, 16), (2, 0, 2, 16)])
def test_empty_tensors(shape):
    """Trap 16."""
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    with interpret() as launches:
        out = attention(q, k, v)
        assert all(grad.shape == shape for grad in torch.autograd.grad(out.sum(), (q, k, v)))
    assert out.shape == shape
    assert not launches


def test_without_keys_the_output_is_zero():
    """Traps 13 and 16."""
    q, k, v = torch.randn(1, 3, 2, 16, requires_grad=True), *torch.randn(2, 1, 0, 1, 16)
    for context in (interpret(), torch.enable_grad()):
        with context:
            out = attention(q, k, v)
            (dq,) = torch.autograd.grad(out.sum(), q)
        assert not out.any()
        assert not dq.any()


def test_without_queries_the_gradients_of_keys_are_zero():
    k, v = torch.randn(2, 1, 3, 1, 16).requires_grad_().unbind()
    for context in (interpret(), torch.enable_grad()):
        with context:
            out = attention(torch.randn(1, 0, 2, 16), k, v)
            dk, dv = torch.autograd.grad(out.sum(), (k, v))
        assert not dk.any()
        assert not dv.any()
