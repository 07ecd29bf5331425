"""Instructions in loops."""

import pytest
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


@triton.jit
def centre_rows_kernel(x, out, num_rows, BLOCK: tl.constexpr):
    """The same in a loop."""
    col = tl.arange(0, BLOCK)
    for i in range(num_rows):
        row = tl.load(x + i * BLOCK + col)
        tl.store(out + i * BLOCK + col, row - tl.sum(row, axis=0) / BLOCK)


def floats(*shape):
    return torch.empty(shape)


@pytest.mark.parametrize(("target", "block"), [("sm_90", 8192), ("gfx942", 32768)])
def test_spills_in_a_loop_are_distinguished_from_those_outside(target, block):
    with record(target) as launches:
        centre_kernel[(1,)](floats(block), floats(block), BLOCK=block, num_warps=1)
        centre_rows_kernel[(1,)](floats(8, block), floats(8, block), 8, BLOCK=block, num_warps=1)
    outside, inside = launches.metadata
    assert outside.spills
    assert outside.loop_spills == 0
    assert inside.loop_spills > 0.9 * (inside.spill_stores + inside.spill_loads)
