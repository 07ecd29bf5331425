"""FLOPs and bytes of the forward kernel."""

import pytest
import torch

from fasttrain_kernels.ops.attention.tiles import forward_tile
from tests.kernels.attention.launching import D, run


def test_forward_of_full_attention_is_two_matmuls():
    assert run(512, causal=False).flops == 4 * 512 * 512 * D


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


def test_keys_are_read_once_per_tile_and_head():
    launch = run(512, causal=False, heads=3)[0]
    tiles = 512 // forward_tile(torch.empty(0, dtype=torch.bfloat16), D).own
    assert launch.arguments["k"].loaded == 3 * tiles * 512 * D * 2
    assert launch.arguments["q"].loaded == 3 * 512 * D * 2
