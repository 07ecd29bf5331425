"""The compiled kernels on a GPU, against the reference."""

import pytest
import torch

from fasttrain_kernels import attention, attention_reference
from fasttrain_kernels.testing import assert_accurate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def inputs(dtype, batch=2, queries=500, keys=None, heads=6, kv_heads=2, dim=128):
    def tensor(tokens, count):
        return torch.randn(batch, tokens, count, dim, dtype=dtype, device="cuda", requires_grad=True)

    keys = queries if keys is None else keys
    return dict(q=tensor(queries, heads), k=tensor(keys, kv_heads), v=tensor(keys, kv_heads))


def ours(**arguments):
    return attention(**arguments, backend="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(window=100, softcap=20.0)])
def test_kernels_are_as_accurate_as_eager(dtype, dim, options, eager):
    assert_accurate(ours, attention_reference, inputs(dtype, dim=dim) | options, eager=eager)


@pytest.mark.parametrize("causal", [True, False])
def test_documents(causal, eager):
    cu_seqlens = torch.tensor([0, 5, 5, 70, 71, 600, 1000], dtype=torch.int32, device="cuda")
    arguments = inputs(torch.bfloat16) | dict(cu_seqlens=cu_seqlens, causal=causal)
    assert_accurate(ours, attention_reference, arguments, eager=eager)


def test_fewer_queries_than_keys(eager):
    assert_accurate(ours, attention_reference, inputs(torch.bfloat16, queries=63, keys=500), eager=eager)


def test_backward_is_deterministic():
    arguments = inputs(torch.bfloat16, queries=2048)
    out = ours(**arguments)
    upstream = torch.randn_like(out)
    first, second = (torch.autograd.grad(out, list(arguments.values()), upstream, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_documents_wait_for_nothing():
    """Trap 7: no host synchronisation, forward and backward."""
    arguments = inputs(torch.bfloat16)
    cu_seqlens = torch.tensor([0, 300, 1000], dtype=torch.int32, device="cuda")
    ours(**arguments, cu_seqlens=cu_seqlens).sum().backward()  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(**arguments, cu_seqlens=cu_seqlens).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
