"""The launch of the Triton kernel on a chunk of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels._launch import launch
from fasttrain_kernels._registration import warps
from fasttrain_kernels.ops.linear_cross_entropy.kernels import _cross_entropy_kernel
from fasttrain_kernels.ops.linear_cross_entropy.reference import LossOptions

# Two passes want few wide programs per multiprocessor, so that the second one finds its rows in L2: one program of 32
# warps holds 13 MB of an H100's 50 MB at V = 50,304 and 40 MB at 151,936, two of 16 would hold twice as much. One pass
# has no such wish, and softcap and stats would spill with 16 warps (sm_80 to sm_100).
_TWO_PASS_BLOCK = 16384
_BLOCK = 4096
_VALUES_PER_LANE = 16  # two 128-bit accesses in bf16


def cross_entropy_triton(
    logits: Tensor,  # (rows, V padded to a multiple of 16), contiguous
    V: int,
    target: Tensor,  # (rows,)
    coef: Tensor | None,  # (rows,) float32; given, logits become their gradient
    options: LossOptions,
    stats: bool,
) -> tuple[Tensor, ...]:
    """(loss,) or (loss, lse, entropy, correct) of each row, zero where the target is ignored. One program per row."""
    rows = logits.shape[0]
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse, entropy = (torch.empty_like(loss), torch.empty_like(loss)) if stats else (loss, loss)  # loss: not touched
    correct = torch.empty(rows if stats else 0, dtype=torch.int8, device=logits.device)
    block = _TWO_PASS_BLOCK if coef is not None and options.softcap is None else _BLOCK
    block = min(block, 1 << (logits.shape[1] - 1).bit_length())
    launch(
        _cross_entropy_kernel,
        (rows,),
        *(logits, target, coef, loss, lse, entropy, correct),
        *(V, logits.shape[1], options.ignore_index),
        *(options.z_loss, options.label_smoothing, options.softcap or 0.0),
        SMOOTHED=options.label_smoothing != 0,
        SOFTCAPPED=options.softcap is not None,
        GRAD=coef is not None,
        STATS=stats,
        BLOCK=block,
        num_warps=warps(block // _VALUES_PER_LANE, logits.device),
    )
    return (loss, lse, entropy, correct.view(torch.bool)) if stats else (loss,)
