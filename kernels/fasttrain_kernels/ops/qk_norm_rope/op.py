"""The registered torch ops, and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels._checks import check_tensors, empty_like_contiguous, shape
from fasttrain_kernels._registration import call, fused_by_compiler, register
from fasttrain_kernels.ops.qk_norm_rope import cpu
from fasttrain_kernels.ops.qk_norm_rope.launch import backward, empty_grads, forward
from fasttrain_kernels.ops.qk_norm_rope.reference import qk_norm_rope_reference

_OP = "qk_norm_rope"
_MAX_HEAD_DIM = 512  # one head has to fit a tile


_qk_norm_rope_backward = register(
    "qk_norm_rope_backward(Tensor? dq_out, Tensor? dk_out, Tensor? q, Tensor? k, Tensor? q_weight, Tensor? k_weight, "
    "Tensor cos, Tensor sin, Tensor? positions, float eps, bool interleaved, bool[4] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    triton=backward,
    cpu=cpu.backward,
    fake=empty_grads,
    inlined=True,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, q_weight, k_weight, cos, sin, positions, eps, interleaved = inputs
    needs_q, needs_k, needs_q_weight, needs_k_weight = ctx.needs_input_grad[:4]
    # A rotation alone is linear: its gradient does not need x.
    keeps_q = q_weight is not None and (needs_q or needs_q_weight)
    keeps_k = k_weight is not None and (needs_k or needs_k_weight)
    ctx.save_for_backward(q if keeps_q else None, k if keeps_k else None, q_weight, k_weight, cos, sin, positions)
    ctx.eps, ctx.interleaved = eps, interleaved
    ctx.set_materialize_grads(False)
    trained = (needs_q or needs_q_weight, needs_k or needs_k_weight)
    ctx.mark_non_differentiable(*(out for out, needed in zip(output, trained, strict=True) if not needed))


def _gradient(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    # An unused output comes without a gradient, and gives none to its inputs.
    wanted = [needs[i] and dout is not None for i, dout in enumerate((dq_out, dk_out, dq_out, dk_out))]
    if not any(wanted):
        return (None,) * 9
    grads = call(_qk_norm_rope_backward, dq_out, dk_out, *ctx.saved_tensors, ctx.eps, ctx.interleaved, wanted)
    return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *(None,) * 5


_qk_norm_rope = register(
    "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? positions, "
    "float eps, bool interleaved) -> (Tensor, Tensor)",
    triton=forward,
    cpu=cpu.forward,
    fake=lambda q, k, *_: (empty_like_contiguous(q), empty_like_contiguous(k)),
    backward=_gradient,
    setup_context=_setup_context,
    inlined=True,
)


def qk_norm_rope(
    q: Tensor,  # (B, T, Hq, D), any strides: a view of a packed QKV projection is not copied
    k: Tensor,  # (B, T, Hk, D)
    q_weight: Tensor | None,  # (D,); None: rotary without norm
    k_weight: Tensor | None,  # (D,)
    cos: Tensor,  # (S, R/2) with R <= D: dimensions from R on are only normalised
    sin: Tensor,  # (S, R/2)
    *,
    positions: Tensor | None = None,  # (B, T) or (T,), the row of cos and sin for each token; None: 0 to T-1
    eps: float = 1e-6,
    interleaved: bool = False,  # pairs (2i, 2i+1) instead of (i, i + R/2)
) -> tuple[Tensor, Tensor]:  # (B, T, Hq, D), (B, T, Hk, D), contiguous
    """RMSNorm of every head of q and k, then rotary embedding, in one pass.

    A position outside of the tables is an error on the CPU. A GPU cannot raise one without a synchronisation: there the
    token's rotated dimensions become NaN.
    """
    _check(q, k, q_weight, k_weight, cos, sin, positions)
    if fused_by_compiler(q):
        return qk_norm_rope_reference(
            q, k, q_weight, k_weight, cos, sin, positions=positions, eps=eps, interleaved=interleaved
        )
    return call(_qk_norm_rope, q, k, q_weight, k_weight, cos, sin, positions, float(eps), interleaved)


def _check(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None,
) -> None:  # fmt: skip
    check_tensors(_OP, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"{_OP}: q {shape(q)} and k {shape(k)} must be (batch, tokens, heads, head_dim)")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{_OP}: q {shape(q)} and k {shape(k)} must agree in all but the number of heads")
    if q.dtype != k.dtype:
        raise TypeError(f"{_OP}: q is {q.dtype} and k {k.dtype}; cast them to one dtype")
    B, T, _, D = q.shape
    if D > _MAX_HEAD_DIM:
        raise ValueError(f"{_OP}: head_dim ({D}) is above the supported {_MAX_HEAD_DIM}; use {_OP}_reference")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (D,):
            raise ValueError(f"{_OP}: {name} {shape(weight)} must be ({D},), one weight for each dimension of a head")
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"{_OP}: cos {shape(cos)} and sin {shape(sin)} must both be (positions, rotary_dim / 2); "
            f"rotary_table makes them"
        )
    if not 1 <= cos.shape[1] <= D // 2:
        raise ValueError(
            f"{_OP}: cos {shape(cos)} rotates {2 * cos.shape[1]} dimensions, but a head has {D}; the tables hold each "
            f"angle once: (positions, rotary_dim / 2)"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{_OP}: {name} requires grad, but the tables get no gradient here; pass {name}.detach()")
    if positions is None:
        if cos.shape[0] < T:
            raise ValueError(f"{_OP}: cos and sin have {cos.shape[0]} rows for {T} tokens; make the tables longer")
        return
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{_OP}: positions has dtype {positions.dtype}; supported are int32 and int64")
    if shape(positions) not in ((T,), (B, T)):
        raise ValueError(f"{_OP}: positions {shape(positions)} must be {(T,)} or {(B, T)}")
    if positions.device != q.device:
        raise ValueError(f"{_OP}: q is on {q.device} and positions on {positions.device}; move them to one device")
