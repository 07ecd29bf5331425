"""Scores and their exponentials, which forward and backward must compute alike.

    score = q.k                  logit = scale * score
    score = tanh(scale * q.k / softcap)     logit = softcap * score          with a softcap

Exponentials are taken to base 2, and only of differences to a pivot x_max, the maximum x of the row. FACTOR turns a
score into a logit in units of ln 2:

    float32    x = score              exp = 2^(FACTOR * (x - x_max))
    16 bits    x = FACTOR * score     exp = 2^(x - x_max)

The second is one instruction less, a fused multiply and add, but rounds two large numbers of which only the difference
counts: at a logit of 1,000 by 1e-4. That is little beside the rounding of 16-bit inputs, and a thousand times too much
for float32, where the difference comes first: of scores near the maximum, which are those that count, it is exact.
"""

from __future__ import annotations

from fasttrain_kernels._triton import libdevice, tl, triton

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores(qk, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    if SOFTCAP > 0:
        qk = libdevice.tanh(tl.div_rn(qk * SCALE, SOFTCAP) if EXACT else qk * (SCALE / SOFTCAP))
    return qk


@triton.jit
def score_factor(SCALE: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """The factor that turns a score into an x."""
    # Factors, and not functions of a tile: those cost 14 registers, and half of the occupancy at D=64 on sm_90.
    if EXACT:
        return 1.0
    else:
        return (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E


@triton.jit
def exponent_factor(SCALE: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """The factor that turns a difference of two x into an exponent of 2."""
    if EXACT:
        return (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E
    else:
        return 1.0
