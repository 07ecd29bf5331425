"""Where the operands of wgmma and tcgen05 lie in shared memory: the matrix descriptors of the PTX manual.

A descriptor holds a start address, two strides and the swizzle. Operands are read in chunks of 16 bytes:

    K-major    two chunks for each row: 8 rows of a swizzle's span are an atom, atoms are `stride` apart
    MN-major   for each k the chunks of 8 or 16 rows; atoms along the rows are `leading` apart
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain_kernels.testing.executed.values import ELEMENT_BITS, I64, Array, elements


def swizzled(address: Any, span: int) -> Any:
    """128 bytes: bits 4-6 are exclusive-ored with bits 7-9; 64 bytes: 4-5 with 7-8; 32 bytes: 4 with 7."""
    return address ^ ((address >> 7) & (span // 16 - 1)) << 4


def chunk_addresses(descriptor: int, span: int, rows: Array, kind: str, transposed: bool) -> Array:
    """Addresses of the chunks: (rows, 2), or transposed (k, rows of a chunk)."""
    start = (descriptor & 0x3FFF) << 4
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if not transposed:
        row, chunk = rows[:, None], np.arange(2)[None]
        return swizzled(start + row // 8 * stride + row % 8 * span + chunk * 16, span)
    size = ELEMENT_BITS[kind] // 8
    k, row = np.arange(32 // size)[:, None], rows[None, :: 16 // size]
    per = span // size  # elements of a row of the atom
    return swizzled(start + row % per * size + row // per * leading + k % 8 * span + k // 8 * stride, span)


def matrix(chunks: Array, kind: str, transposed: bool) -> Any:  # (..., 4) of 32 bits -> (rows, k)
    """The operand that chunks hold, in the order of chunk_addresses."""
    numbers = elements(np.ascontiguousarray(chunks), kind)
    return numbers.reshape(256 // ELEMENT_BITS[kind], -1).T if transposed else numbers.reshape(len(chunks), -1)


def flat(address: Array) -> Array:
    return address.reshape(-1).astype(I64)
