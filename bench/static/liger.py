"""The same ops of Liger: pip install -e '.[baselines]'.

Its host code asks the device for its multiprocessors and its architecture. A CPU counts as one multiprocessor there, so
three functions run from their source with another number; nothing else of Liger is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import liger_kernel.ops.cross_entropy as cross_entropy
import liger_kernel.ops.fused_add_rms_norm as fused_add_rms_norm
import liger_kernel.ops.fused_linear_cross_entropy as linear
import liger_kernel.ops.rms_norm as rms_norm
import liger_kernel.ops.rope as rope
import liger_kernel.ops.swiglu as swiglu
import liger_kernel.ops.utils as utils
import torch

from bench.static.cases import (
    ADD_RMS,
    BF16,
    CHUNKED,
    LINEAR,
    QK,
    RMS,
    ROWS,
    SWIGLU,
    Backward,
    Sizes,
    StaticCase,
    fresh,
    targets,
)
from bench.static.sources import with_replaced

_ARCHITECTURES = {"sm_90": "hopper", "sm_100": "blackwell", "sm_120": "blackwell_consumer", "gfx942": "cdna3"}
_SMALL_HEADS = "n_rows < 4096 * 8"  # below, its norm of short rows takes another kernel than in training


@contextlib.contextmanager
def as_if_on(target: str) -> Iterator[None]:
    """Liger's questions about the device are answered for a target."""
    with contextlib.ExitStack() as stack:
        for module in (swiglu, cross_entropy):
            architecture = _ARCHITECTURES.get(target, "ampere_ada")
            stack.enter_context(patch.object(module, "infer_device_arch", lambda a=architecture: a))
        for module in (utils, cross_entropy, linear):
            stack.enter_context(patch.object(module, "is_hip", lambda: target.startswith("gfx")))
        yield


def _multiprocessors(sizes: Sizes) -> tuple[str, str]:
    return "sm_count = 1\n", f"sm_count = {sizes['SMS']}\n"


def _norm(x: torch.Tensor, weight: torch.Tensor, sizes: Sizes) -> Backward:
    heads = (_SMALL_HEADS, "n_rows < 0")
    forward = with_replaced(rms_norm.rms_norm_forward, heads)
    backward = with_replaced(rms_norm.rms_norm_backward, heads, _multiprocessors(sizes))
    _, x, rstd, block, warps, mode = forward(x, weight, 1e-6, 0.0, "llama", None)
    dout = torch.empty_like(x)
    return lambda: backward(dout, x, weight, rstd, 0.0, mode, block, warps, True, None)


def _run_rms(s: Sizes) -> Backward:
    return _norm(fresh(s["M"], s["N"], grad=False), fresh(s["N"], grad=False), s)


def _run_add_rms(s: Sizes) -> Backward:
    x, residual, weight = (fresh(*shape, grad=False) for shape in ((s["M"], s["N"]), (s["M"], s["N"]), (s["N"],)))
    out, total, rstd, *launch, mode = fused_add_rms_norm.fused_add_rms_norm_forward(
        x, residual, weight, 1e-6, 0.0, "llama"
    )
    backward = with_replaced(fused_add_rms_norm.fused_add_rms_norm_backward, _multiprocessors(s))
    dout, dtotal = torch.empty_like(out), torch.empty_like(total)
    return lambda: backward(dout, dtotal, total, weight, rstd, 0.0, mode, *launch, False)


def _run_swiglu(s: Sizes) -> Backward:
    gate, up, dout = (fresh(s["M"], s["N"], grad=False) for _ in range(3))
    swiglu.swiglu_forward(gate, up)
    return lambda: swiglu.swiglu_backward(gate, up, dout)


def _run_qk(s: Sizes) -> Backward:
    """RMSNorm of q, RMSNorm of k, RoPE of both: three launches for our one."""
    q, k = (fresh(s["M"] * heads, s["D"], grad=False) for heads in (s["Hq"], s["Hk"]))
    norms = [_norm(x, fresh(s["D"], grad=False), s) for x in (q, k)]
    rotated = [x.view(1, s["M"], -1, s["D"]).transpose(1, 2) for x in (q, k)]
    # cos and sin in bf16 and of the whole head, as Transformers hands them over; the kernel reads one half of each.
    tables = [fresh(1, s["M"], s["D"], grad=False) for _ in ("cos", "sin")]
    rope.rope_forward(*rotated, *tables)

    def backward() -> None:
        rope.rope_backward(*rotated, *tables)
        for norm in norms:
            norm()

    return backward


def _run_cross_entropy(s: Sizes) -> None:
    logits = torch.empty(s["M"], s["V"], dtype=BF16, requires_grad=True)
    labels = targets(s["M"])
    cross_entropy.cross_entropy_forward(logits, labels, None, -100, 0.0, 0.0, "mean", None, False)


def _run_linear(s: Sizes) -> Backward:
    """Run on meta tensors, by the branches that a GPU takes."""
    hidden, weight = (torch.empty(s[rows], s["D"], dtype=BF16, device="meta", requires_grad=True) for rows in "MV")
    fused = with_replaced(
        linear.fused_linear_cross_entropy_forward,
        (
            '== "cuda"\n                and torch.cuda.get_device_capability(grad_weight.device)[0] >= 8',
            '== "meta"',
        ),
    )
    fused.__globals__["_can_use_mm_out"] = lambda *_: True
    with torch.no_grad():
        *_, dhidden, dweight, _ = fused(hidden, weight, targets(s["M"]))
    return lambda: (dhidden, dweight)  # if the loss is the last op, backward multiplies by one, and skips it


def _run_linear_small(s: Sizes) -> None:
    hidden, weight = fresh(s["M"], 16), fresh(s["V"], 16)
    linear.fused_linear_cross_entropy_forward(hidden, weight, targets(s["M"]), chunk_mem_const=s["V"])


_LIGER = {
    _run_rms: RMS,
    _run_add_rms: ADD_RMS,
    _run_swiglu: SWIGLU,
    _run_qk: QK,
    _run_cross_entropy: ROWS,
}
LIGER = [
    StaticCase("liger", shape, run, by_target=run is _run_swiglu) for run, shapes in _LIGER.items() for shape in shapes
]
LIGER += [StaticCase("liger", shape, _run_linear, small_run=_run_linear_small, **CHUNKED) for shape in LINEAR]
