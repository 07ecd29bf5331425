"""FLOPs and bytes of the backward kernels."""

import pytest
import torch

from tests.kernels.attention.launching import D, run


def test_backward_is_seven_matmuls():
    """Five would do; two are the price of one writer for every gradient (docs/kernels/attention.md)."""
    forward, delta, *gradients = run(256, backward=True, causal=False, heads=2)
    assert forward.flops + sum(launch.flops for launch in gradients) == (2 + 7) * 2 * 256 * 256 * D * 2
    assert delta.flops == 2 * 256 * 64 * D * 2  # of which the diagonal is used


def test_backward_in_float32_is_nine_matmuls():
    """Two more for a delta that rounds as eager's does."""
    launches = run(256, backward=True, causal=False, heads=2, dtype=torch.float32)
    assert launches.flops == (2 + 9) * 2 * 256 * 256 * D * 2


@pytest.mark.parametrize("options", [{}, dict(window=100)])
def test_distinct_bytes_are_the_physical_limit(options):
    """Every tensor once; what is read again (keys by every tile of queries) is meant to come from L2."""
    forward, delta, keys, queries = run(256, backward=True, heads=2, **options)
    q, kv, lse = 256 * 2 * D * 2, 256 * D * 2, 256 * 2 * 4  # delta is as large as lse
    assert forward.unique == 2 * q + 2 * kv + lse
    assert delta.unique == 2 * q + lse
    assert keys.unique == 2 * q + 4 * kv + 2 * lse
    assert queries.unique == 3 * q + 2 * kv + 2 * lse


def test_distinct_bytes_in_float32_are_the_physical_limit():
    """Maximum and sum apart: 4 more bytes per query and head."""
    forward, delta, keys, queries = run(256, backward=True, heads=2, dtype=torch.float32)
    q, kv, row = 256 * 2 * D * 4, 256 * D * 4, 256 * 2 * 4
    assert forward.unique == 2 * q + 2 * kv + 2 * row
    assert delta.unique == 2 * q + 2 * kv + 3 * row
    assert keys.unique == 2 * q + 4 * kv + 3 * row
    assert queries.unique == 3 * q + 2 * kv + 3 * row
