"""Depth 2: FLOPs and bytes that the kernels are counted to need, against what the problem needs."""

import pytest
import torch

from fasttrain_kernels.attention import attention
from fasttrain_kernels.attention.tiles import forward_tile
from fasttrain_kernels.testing import interpret

D = 16


def run(tokens, *, backward=False, heads=1, dtype=torch.bfloat16, **options):
    q, k, v = (torch.randn(1, tokens, h, D, dtype=dtype, requires_grad=backward) for h in (heads, 1, 1))
    with interpret() as launches:
        out = attention(q, k, v, **options)
        if backward:
            out.backward(torch.ones_like(out))
    return launches


def test_forward_of_full_attention_is_two_products():
    assert run(512, causal=False).flops == 4 * 512 * 512 * D


def test_backward_is_seven_products():
    """Five would do; two are the price of one writer for every gradient (docs/kernels/attention.md)."""
    forward, delta, *gradients = run(256, backward=True, causal=False, heads=2)
    assert forward.flops + sum(launch.flops for launch in gradients) == (2 + 7) * 2 * 256 * 256 * D * 2
    assert delta.flops == 2 * 256 * 64 * D * 2  # of which the diagonal is used


def test_backward_in_float32_is_nine_products():
    """Two more for a delta that rounds as eager's does."""
    launches = run(256, backward=True, causal=False, heads=2, dtype=torch.float32)
    assert launches.flops == (2 + 9) * 2 * 256 * 256 * D * 2


def test_causal_costs_half_and_the_diagonal():
    tile = forward_tile(torch.empty(0, dtype=torch.bfloat16), D).own
    tiles = 512 // tile
    assert run(512).flops == 4 * D * tile * tile * tiles * (tiles + 1) // 2


def test_documents_cost_what_they_attend():
    def flops(length):
        cu_seqlens = torch.arange(0, 513, length, dtype=torch.int32)
        return run(512, cu_seqlens=cu_seqlens, backward=True).flops

    whole, halves, quarters, eighths = (flops(length) for length in (512, 256, 128, 64))
    assert whole == run(512, backward=True).flops
    assert whole > 1.5 * halves > 2 * quarters
    assert quarters >= eighths


def test_unaligned_documents_cost_no_further_block():
    """Blocks are counted from the first key that a tile sees, wherever it lies."""
    shifted = run(512, cu_seqlens=torch.tensor([0, 100, 356, 512], dtype=torch.int32)).flops
    assert shifted <= 1.4 * run(512, cu_seqlens=torch.tensor([0, 128, 384, 512], dtype=torch.int32)).flops


def test_window_costs_a_band():
    short, long = (run(tokens, window=64, backward=True).flops for tokens in (256, 512))
    assert long <= 2.3 * short  # linear in the length, and the first tile sees less
    assert long < 0.6 * run(512, backward=True).flops


def test_mask_free_blocks_are_most_of_a_long_sequence():
    """The special functions counted are the exponentials: one per score and two per row and block, none for masks."""
    launches = run(512, causal=False)
    assert launches[0].special == pytest.approx(512 * 512, rel=0.05)


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


def test_keys_are_read_once_per_tile_and_head():
    launch = run(512, causal=False, heads=3)[0]
    tiles = 512 // forward_tile(torch.empty(0, dtype=torch.bfloat16), D).own
    assert launch.arguments["k"].loaded == 3 * tiles * 512 * D * 2
    assert launch.arguments["q"].loaded == 3 * 512 * D * 2
