"""Widths of accesses, tensor core instructions and limits."""

import pytest
import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing.compiled import record, rules
from fasttrain_kernels.testing.compiled.survey import Row
from fasttrain_kernels.testing.targets import TARGETS


@triton.jit
def copy_kernel(x, out, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    tl.store(out + col, tl.load(x + col))


@triton.jit
def matmul_kernel(a, b, out, num_blocks, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for i in range(num_blocks):
        acc = tl.dot(tl.load(a + m * 4096 + i * K + k[None, :]), tl.load(b + (i * K + k[:, None]) * 4096 + n), acc)
    tl.store(out + m * 4096 + n, acc)


def floats(*shape):
    return torch.empty(shape)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize(
    ("dtype", "offset", "bits"),
    [(torch.float32, 0, 128), (torch.bfloat16, 0, 128), (torch.float32, 1, 32), (torch.bfloat16, 1, 16)],
)
def test_width_of_accesses_follows_the_alignment_of_the_pointer(target, dtype, offset, bits):
    x = torch.empty(8192 + offset, dtype=dtype)[offset:]
    with record(target) as launches:
        copy_kernel[(1,)](x, torch.empty(8192, dtype=dtype), BLOCK=8192)
    (metadata,) = launches.metadata
    lanes = 4 * TARGETS[target].warp_size
    if target == "gfx942" and dtype.itemsize == 4:
        bits = 128  # needs no more than the alignment of a dword
    assert metadata.loads == {bits: 8192 * dtype.itemsize * 8 // (lanes * bits)}
    assert bits == 128 or metadata.narrow_bulk


@pytest.mark.parametrize(
    ("target", "matrix"),
    [("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA"), ("sm_120", "HMMA"), ("gfx942", "MFMA")],
)
def test_matrix_instructions_shared_memory_and_its_limit(target, matrix):
    a, b = torch.empty(128, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
    with record(target) as launches:
        matmul_kernel[(1,)](a, b, floats(128, 4096), 64, M=128, N=256, K=64, num_warps=8, num_stages=4)
    (metadata,) = launches.metadata
    assert set(metadata.matrix) == {matrix}
    assert metadata.dots == 1
    assert metadata.fits == (metadata.shared <= TARGETS[target].shared_per_block)
    assert metadata.fits == (target in ("sm_80", "sm_90", "sm_100"))  # three tiles of (128 + 256) * 64 bf16: 144 KiB
    assert metadata.fits or "does not fit" in rules.problems(Row(target, "attention", "bf16", metadata=metadata))[0]
