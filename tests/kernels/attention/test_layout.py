"""Layouts of inputs: packed projections, strides, and tensors beyond 32 bits."""

import torch

from fasttrain_kernels import attention, attention_reference
from fasttrain_kernels.ops.attention.layout import addressable
from fasttrain_kernels.testing import assert_accurate, interpret


def test_packed_projection_needs_no_copy(eager):
    """Trap 12: q, k and v are strided views of one projection, and their gradients meet in its gradient."""
    packed = torch.randn(2, 70, 6, 16, requires_grad=True)

    def from_packed(function):
        return lambda packed: function(*packed.split([4, 1, 1], dim=2))

    with interpret() as launches:
        assert_accurate(
            from_packed(attention), from_packed(attention_reference), dict(packed=packed), eager=from_packed(eager)
        )
    assert launches[0].arguments["v"].unique == 2 * 70 * 16 * 4  # out of bounds, had it been taken for contiguous


def test_any_strides_are_accepted(make, eager):
    """Trap 12: head dimension not the fastest, heads before tokens, and a batch of stride 0."""
    q = torch.randn(2, 40, 16, 2).transpose(2, 3).requires_grad_()
    k = torch.randn(2, 1, 40, 16).transpose(1, 2).requires_grad_()
    v = torch.randn(1, 40, 1, 16).expand(2, -1, -1, -1).requires_grad_()
    with interpret():
        assert_accurate(attention, attention_reference, dict(q=q, k=k, v=v), eager=eager)


def test_broadcast_gradients_are_accepted_and_not_written(make):
    """Traps 3 and 12: the gradient of a sum has stride 0 everywhere."""
    inputs = make(queries=40)
    upstream = torch.ones(1).expand(1, 40, 2, 16)
    expected = torch.autograd.grad(attention_reference(**inputs), list(inputs.values()), upstream)
    with interpret():
        actual = torch.autograd.grad(attention(**inputs), list(inputs.values()), upstream)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert (upstream == 1).all()


def test_batches_beyond_32_bits_are_addressed():
    """Trap 9: the second sequence begins 2^31 elements after the first (virtual memory; few pages are touched)."""
    shape, strides = (2, 20, 1, 16), (2**31, 16, 16, 1)
    q, k, v = (torch.empty(2**31 + 320, dtype=torch.float16).as_strided(shape, strides) for _ in range(3))
    for x in (q, k, v):
        x.copy_(torch.randn(shape))
    with interpret() as launches:
        out = attention(q, k, v, backend="triton")
    torch.testing.assert_close(out, attention_reference(q, k, v), atol=2e-3, rtol=2e-3)
    assert launches[0].grid[1:] == (1, 1)  # y and z end at 65,535


def test_tokens_far_apart_are_copied_together():
    """Trap 9: within a tile, offsets have 32 bits."""
    assert addressable(torch.empty(1, device="meta").as_strided((1, 2, 1, 1), (0, 2**24, 1, 1))).stride(1) == 1
    near = torch.empty(1, device="meta").as_strided((1, 2, 1, 1), (0, 2**20, 1, 1))
    assert addressable(near) is near
