"""The public functions, and the registered ops behind them: Triton on GPUs, one op per CPU implementation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fasttrain_kernels._checks import autocast_dtype, check_tensors, shape
from fasttrain_kernels._registration import call, register
from fasttrain_kernels.ops.attention import blocked, capabilities, cpp, triton_backward, triton_forward, vendors
from fasttrain_kernels.ops.attention.intervals import check_cu_seqlens, document_bounds
from fasttrain_kernels.ops.attention.layout import empty_lse


def _fake_forward(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), empty_lse(q)


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.empty(x.shape if need else (0,), dtype=x.dtype, device=x.device)
        for x, need in zip((q, k, v), rest[-3:], strict=True)
    )
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, documents)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _registered(name: str, cpu: ModuleType) -> OpOverload[..., tuple[Tensor, Tensor]]:
    """Register the op that runs this implementation on the CPU."""
    backward_op = register(
        f"{name}_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor? documents, bool causal, SymInt? window, float? softcap, float scale, bool need_dq, bool need_dk, "
        "bool need_dv) -> (Tensor, Tensor, Tensor)",
        triton=triton_backward.backward,
        cpu=cpu.backward,
        fake=_fake_backward,
        inlined=True,
    )

    def gradient(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        if dout is None:
            return (None,) * 8
        q, k, v, out, lse, documents = ctx.saved_tensors
        grads = call(backward_op, dout, q, k, v, out, lse, documents, *ctx.options, *needed)
        return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *(None,) * 5

    return register(
        f"{name}(Tensor q, Tensor k, Tensor v, Tensor? documents, bool causal, SymInt? window, float? softcap, "
        "float scale) -> (Tensor, Tensor)",
        triton=triton_forward.forward,
        cpu=cpu.forward,
        fake=_fake_forward,
        backward=gradient,
        setup_context=_setup_context,
        inlined=True,
    )


_attention = _registered("attention", blocked)
_attention_cpp = _registered("attention_cpp", cpp)


def attention(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,  # (num_docs + 1,) int32
    documents: Tensor | None = None,  # (2, B * T) int32
    max_seqlen: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    backend: str = "auto",
    deterministic: bool = True,
) -> Tensor:  # (B, T_q, H, D)
    """softmax(scale * q k^T) v over the keys that each query sees; H is a multiple of Hkv.

    causal: a query sees no later key. With fewer queries than keys, the queries are the last positions.
    window: a query sees keys less than `window` positions away, its own included: flash-attn's
        window_size=(window - 1, 0) when causal, (window - 1, window - 1) otherwise.
    cu_seqlens: document i is tokens [cu_seqlens[i], cu_seqlens[i + 1]) of the flattened batch. Rises from 0 to B * T;
        on a GPU the values are not read back, and so not checked.
    documents: document_bounds(cu_seqlens, B * T), for layers that share it; what is not ours needs cu_seqlens as well.
    max_seqlen: no document is longer. Grids of FlashAttention are in proportion to it; B * T by default.
    softcap: logits become softcap * tanh(logit / softcap).
    scale: D**-0.5 by default.
    backend: "auto", or a row of capabilities.TABLE; `attention_backend` says what auto picks.
    deterministic: every run gets the same gradients, bit for bit; False allows backends that cannot.
    """
    q, k, v = _prepared(q, k, v, causal, window, cu_seqlens, documents, softcap, scale)
    if max_seqlen is not None and (cu_seqlens is None or max_seqlen < 1):
        raise ValueError(f"attention: max_seqlen={max_seqlen} must be at least 1, and comes with cu_seqlens")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    request = vendors.request(q, k, cu_seqlens, documents, causal, window, softcap, deterministic)
    chosen = capabilities.choose(request, backend)
    if chosen in ("sdpa", "cudnn"):
        return (vendors.sdpa if chosen == "sdpa" else vendors.cudnn)(q, k, v, causal, scale)
    if chosen in ("fa4", "fa3", "fa2", "varlen"):
        longest = q.shape[0] * q.shape[1] if max_seqlen is None else max_seqlen
        options = (cu_seqlens, longest, causal, window, softcap, scale, deterministic)
        if chosen in ("fa3", "fa2"):
            return vendors.package("flash_attn" if chosen == "fa2" else "flash_attn_interface", q, k, v, *options)
        return vendors.as_op(chosen, q, k, v, *options)
    if documents is None and cu_seqlens is not None:
        documents = document_bounds(cu_seqlens, q.shape[0] * q.shape[1])
    op = _attention_cpp if chosen == "cpp" else _attention
    return call(op, q, k, v, documents, causal, window, softcap, scale)[0]


def attention_backend(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    deterministic: bool = True,
) -> str:
    """The backend that attention(..., backend="auto") picks for these arguments."""
    q, k, v = _prepared(q, k, v, causal, window, cu_seqlens, documents, softcap, scale)
    request = vendors.request(q, k, cu_seqlens, documents, causal, window, softcap, deterministic)
    return capabilities.choose(request, "auto")


def explain_attention_backend(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    deterministic: bool = True,
) -> dict[str, str]:
    """Every backend in auto's order of preference, with "ok" or what it cannot do."""
    q, k, v = _prepared(q, k, v, causal, window, cu_seqlens, documents, softcap, scale)
    return capabilities.explain(vendors.request(q, k, cu_seqlens, documents, causal, window, softcap, deterministic))


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
    softcap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v after the checks, in autocast's dtype where that is active."""
    check_tensors("attention", q=q, k=k, v=v)
    _check_shapes(q, k, v)
    dtype = autocast_dtype(q)
    if dtype is not None and q.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; cast them to one dtype")
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window} must be at least 1, which is the query's own position, or None")
    for name, value in (("softcap", softcap), ("scale", scale)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"attention: {name}={value} must be a positive number, or None")
    for name, given in (("cu_seqlens", cu_seqlens), ("documents", documents)):
        if given is not None:
            _check_documents(name, given, q, k)
    return q, k, v


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            f"attention: q {shape(q)}, k {shape(k)} and v {shape(v)} must be (batch, tokens, heads, head_dim)"
        )
    if k.shape != v.shape:
        raise ValueError(f"attention: k {shape(k)} and v {shape(v)} must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: q {shape(q)} and k {shape(k)} must have the same batch and head dimension")
    if q.shape[3] == 0 or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention: the {q.shape[2]} heads of q must be a multiple of the {k.shape[2]} heads of k and v"
        )


def _check_documents(name: str, given: Tensor, q: Tensor, k: Tensor) -> None:
    if name == "cu_seqlens":
        check_cu_seqlens(given)
    elif given.dtype != torch.int32 or given.shape != (2, q.shape[0] * q.shape[1]):
        raise ValueError(
            f"attention: documents {shape(given)} of {given.dtype} must be (2, B * T) of torch.int32; "
            "document_bounds(cu_seqlens, B * T) makes it"
        )
    if given.device != q.device:
        raise ValueError(f"attention: q is on {q.device} and {name} on {given.device}; move them to one device")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"attention: with {name}, q {shape(q)} and k {shape(k)} must have the same number of tokens")
