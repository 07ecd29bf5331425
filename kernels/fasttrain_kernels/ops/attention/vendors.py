"""The backends that are not ours: torch's and the flash-attn packages', asked for the same thing.

Two are ops of ours around functions without a gradient: torch's flash attention, so that its backward can be
deterministic by itself, and flash-attn-4, which torch.compile cannot trace. The packages of FlashAttention 2 and 3
register their ops.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels._registration import call, compute_capability, register, runs_triton
from fasttrain_kernels.ops.attention.capabilities import Request
from fasttrain_kernels.ops.attention.intervals import reach


def request(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    deterministic: bool,
) -> Request:
    differentiated = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return Request(
        generation=_generation(q.device) if q.device.type == "cuda" else q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),  # no table: torch.compile cannot guard one within a region
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        causal=causal,
        window=window,
        documents="cu_seqlens" if cu_seqlens is not None else "bounds" if documents is not None else "",
        softcap=softcap,
        repeats=deterministic and differentiated,
        torch_repeats=torch.are_deterministic_algorithms_enabled(),
        interpreted=q.device.type == "cpu" and runs_triton(q),
    )


def _generation(device: torch.device) -> str:
    capability = compute_capability(device)
    if capability == 0:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return "cdna3" if name.startswith("gfx94") else "gpu"
    if capability == 89:
        return "ada"
    return {8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell-geforce"}.get(capability // 10, "gpu")


_generation._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as capabilities.installed


def sdpa(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    causal: bool,
    scale: float,
) -> Tensor:  # (B, T_q, H, D)
    """torch's scaled_dot_product_attention, which picks among kernels of its own."""
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    # Branches, because under torch.compile a comparison of sizes is a symbol, which the function does not take.
    grouped = False if q.shape[2] == k.shape[2] else True  # noqa: SIM211
    if q.shape[1] == 1:
        causal = False  # a single query is the last one and sees every key
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """sdpa, of its kernels cuDNN's."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, causal, scale)


def package(
    module: str,  # flash_attn or flash_attn_interface
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    cu_seqlens: Tensor | None,  # (num_docs + 1,)
    max_seqlen: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    deterministic: bool,
) -> Tensor:  # (B, T_q, H, D)
    """FlashAttention 2 or 3, which have the same two functions."""
    flash = importlib.import_module(module)
    options = dict(
        softmax_scale=scale,
        causal=causal,
        window_size=(-1, -1) if window is None else reach(causal, window),
        softcap=softcap or 0.0,
        deterministic=deterministic,
    )
    if cu_seqlens is None:
        out = flash.flash_attn_func(q, k, v, **options)
    else:
        bounds = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        longest = dict(max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen)
        out = flash.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), **bounds, **longest, **options)
    out = out[0] if isinstance(out, tuple) else out  # FlashAttention 3 has returned lse too
    return out.view(q.shape)


# What the two ops take: tensors (B, T, H, D), or (B * T, H, D) with cu_seqlens; the longest document; options.
_OPTIONS = "Tensor? cu_seqlens, SymInt max_seqlen, bool causal, SymInt? window, float? softcap, float scale"


def _varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    left, right = reach(causal, window)
    longest = (max_seqlen, max_seqlen) if cu_seqlens is not None else (q.shape[1], k.shape[1])
    options = dict(scale=scale, window_size_left=left, window_size_right=right)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, *longest, 0.0, causal, False, **options
    )
    return out, lse


def _varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = reach(causal, window)
    longest = (max_seqlen, max_seqlen) if cu_seqlens is not None else (q.shape[1], k.shape[1])
    options = dict(scale=scale, window_size_left=left, window_size_right=right)
    no_dropout = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)  # the state of its random numbers
    with _deterministic() if deterministic else contextlib.nullcontext():
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, lse, cu_seqlens, cu_seqlens, *longest, 0.0, causal, *no_dropout, **options
        )
    return dq, dk, dv


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """torch's flag, which is all that its backward listens to; without filling what it allocates."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
        torch._C._set_deterministic_fill_uninitialized_memory(fill)


def _fa4_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    options = _fa4_options(cu_seqlens, max_seqlen, causal, window, softcap, scale)
    interface = importlib.import_module("flash_attn.cute.interface")
    out, lse, *_ = interface._flash_attn_fwd(q=q, k=k, v=v, return_lse=True, **options)
    return out, lse


def _fa4_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _fa4_options(cu_seqlens, max_seqlen, causal, window, softcap, scale)
    interface = importlib.import_module("flash_attn.cute.interface")
    given = dict(q=q, k=k, v=v, out=out, dout=dout.contiguous(), lse=lse)
    dq, dk, dv, *_ = interface._flash_attn_bwd(**given, deterministic=deterministic, **options)
    return dq, dk, dv


def _fa4_options(
    cu_seqlens: Tensor | None, max_seqlen: int, causal: bool, window: int | None, softcap: float | None, scale: float
) -> dict[str, Any]:
    """By name: the order of its arguments changes from release to release."""
    left, right = reach(causal, window) if window is not None else (None, None)
    options: dict[str, Any] = dict(causal=causal, window_size_left=left, window_size_right=right)
    options |= dict(softmax_scale=scale, softcap=softcap or 0.0)
    if cu_seqlens is not None:
        options |= dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        options |= dict(max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen)
    return options


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    *tokens, heads, _ = q.shape
    lse = (heads, *tokens) if cu_seqlens is not None else (tokens[0], heads, tokens[1])
    return torch.empty_like(q), q.new_empty(lse, dtype=torch.float32)


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _registered(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    def nowhere_else(*args: Any) -> Any:
        raise NotImplementedError(f"{name}: it runs on CUDA only")

    backward_op = register(
        f"{name}_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, "
        "bool deterministic) -> (Tensor, Tensor, Tensor)",
        triton=backward,
        cpu=nowhere_else,
        fake=_fake_backward,
        repeatable=False,
    )

    def gradient(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 10
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        return *call(backward_op, dout, q, k, v, out, lse, cu_seqlens, *ctx.options), *(None,) * 7

    return register(
        f"{name}(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool deterministic) -> (Tensor, Tensor)",
        triton=forward,
        cpu=nowhere_else,
        fake=_fake_forward,
        backward=gradient,
        setup_context=_setup_context,
        repeatable=False,
    )


_OPS = {
    "varlen": _registered("attention_varlen", _varlen_forward, _varlen_backward),
    "fa4": _registered("attention_fa4", _fa4_forward, _fa4_backward),
}


def as_op(
    backend: str,  # varlen or fa4
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    cu_seqlens: Tensor | None,  # (num_docs + 1,)
    max_seqlen: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    deterministic: bool,
) -> Tensor:  # (B, T_q, H, D)
    """torch's flash attention, or FlashAttention 4."""
    options = causal, window, softcap, scale, deterministic
    if cu_seqlens is None:
        return call(_OPS[backend], q, k, v, None, max_seqlen, *options)[0]
    packed = (x.flatten(0, 1) for x in (q, k, v))
    return call(_OPS[backend], *packed, cu_seqlens, max_seqlen, *options)[0].view(q.shape)
