"""The launch tables, for every class of device. What the compiler makes of them is testing.compiled's business."""

import pytest
import torch

from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.ops.attention.tiles import forward_tile, key_gradient_tile, query_gradient_tile


@pytest.mark.parametrize("memory", [101_376, 166_912, 232_448])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_d", [16, 64, 128, 256])
def test_tiles_fit_shared_memory(block_d, dtype, memory):
    """Trap 11: 101,376 B on sm_86, sm_89 and sm_120, with every operand there and none in registers."""
    q = torch.empty(0, dtype=dtype)
    with kernels_on_cpu(shared_memory=memory):
        tiles = [(forward_tile(q, block_d), 1)]
        for softcap in (False, True):
            tiles += [(table(q, block_d, softcap), 2) for table in (query_gradient_tile, key_gradient_tile)]
    for tile, kept in tiles:
        rows = kept * tile.own + 2 * tile.step * tile.options["num_stages"]
        assert rows * block_d * dtype.itemsize <= memory


def test_a_warp_of_64_lanes_needs_half_as_many_warps():
    q = torch.empty(0, dtype=torch.bfloat16)
    with kernels_on_cpu(shared_memory=65_536, warp_size=64):
        assert forward_tile(q, 128).options["num_warps"] == 4
    assert forward_tile(q, 128).options["num_warps"] == 8
