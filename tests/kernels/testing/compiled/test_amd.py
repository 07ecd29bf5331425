"""Metadata of AMD binaries."""

import re

import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing.compiled import record


@triton.jit
def centre_kernel(x, out, BLOCK: tl.constexpr):
    """Holds a whole row in registers: the mean needs all of it, and the subtraction again."""
    col = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * BLOCK + col)
    tl.store(out + tl.program_id(0) * BLOCK + col, row - tl.sum(row, axis=0) / BLOCK)


def floats(*shape):
    return torch.empty(shape)


def test_amd_occupancy_equals_llvms():
    with record("gfx942") as launches:
        for block in (1024, 8192, 16384):
            centre_kernel[(8,)](floats(8, block), floats(8, block), BLOCK=block, num_warps=1)
    for launch in launches:
        assembly = launches._binaries[launch.key].stages["amdgcn"].read_text()
        assert launch.metadata.occupancy.warps == 4 * int(re.search(r"; Occupancy: (\d+)", assembly)[1])
