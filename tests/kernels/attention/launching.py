"""Launches of attention on the interpreter, for counts of FLOPs and bytes."""

import torch

from fasttrain_kernels import attention
from fasttrain_kernels.testing import interpret

D = 16  # head dimension


def run(tokens, *, backward=False, heads=1, dtype=torch.bfloat16, **options):
    q, k, v = (torch.randn(1, tokens, h, D, dtype=dtype, requires_grad=backward) for h in (heads, 1, 1))
    with interpret() as launches:
        out = attention(q, k, v, **options)
        if backward:
            out.backward(torch.ones_like(out))
    return launches
