"""The CPU implementation against the specification, in float64, and the memory that it saves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain_kernels import attention, attention_reference
from fasttrain_kernels.ops.attention import blocked
from fasttrain_kernels.testing import assert_accurate, interpret


@st.composite
def problems(draw, longest=40):
    documents = draw(st.booleans())
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 7]))
    queries = draw(st.integers(1, longest))
    keys = queries if documents else draw(st.integers(1, longest))
    dim = draw(st.sampled_from([1, 8, 20]))
    options = dict(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, longest)),
        softcap=draw(st.none() | st.floats(0.5, 30)),
        scale=draw(st.none() | st.floats(0.1, 1)),
    )
    if documents:
        ends = sorted(draw(st.lists(st.integers(0, batch * queries), max_size=5)))
        options["cu_seqlens"] = torch.tensor([0, *ends, batch * queries], dtype=torch.int32)
    seed = draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, group * kv_heads), (keys, kv_heads), (keys, kv_heads))
    tensors = (torch.randn(batch, *shape, dim, dtype=torch.float64, generator=generator) for shape in shapes)
    return dict(zip("qkv", (x.requires_grad_() for x in tensors), strict=True)), options


def gradients(function, inputs, options):
    out = function(**inputs, **options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad(out, list(inputs.values()), upstream)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems(), block=st.sampled_from([1, 7, 128]))
def test_blocked_attention_is_the_reference(problem, block):
    inputs, options = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "_BLOCK", block)
        actual = gradients(lambda **arguments: attention(**arguments, backend="blocked"), inputs, options)
    torch.testing.assert_close(actual, gradients(attention_reference, inputs, options), atol=1e-9, rtol=1e-9)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(problem=problems(longest=100))
def test_kernels_are_the_reference_for_any_options(problem):
    inputs, options = problem
    inputs = {name: x.detach().float().requires_grad_() for name, x in inputs.items()}
    with interpret():
        actual = gradients(attention, inputs, options)
    torch.testing.assert_close(actual, gradients(attention_reference, inputs, options), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocked_attention_is_as_accurate_as_eager(dtype, make, cu_seqlens, eager):
    inputs = make(batch=2, queries=200, heads=3, dtype=dtype) | dict(cu_seqlens=cu_seqlens, softcap=3.0)
    assert_accurate(attention, attention_reference, inputs, eager=eager)


def test_blocked_attention_holds_blocks_of_scores():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else (result,):
                self.elements = max(self.elements, x.numel() if isinstance(x, torch.Tensor) else 0)
            return result

    q, k, v = (torch.randn(1, 1024, 2, 16) for _ in range(3))
    with Largest() as largest:  # the ops' own code, below dispatch
        out, lse = blocked.forward(q, k, v, None, True, None, None, 0.25)
        blocked.backward(q, q, k, v, out, lse, None, True, None, None, 0.25, True, True, True)
    assert largest.elements <= 2 * 128 * 1024
