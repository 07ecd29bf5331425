"""The backends of attention: what each cannot do, which one `auto` picks, and the two that are not ours.

`auto` takes the first in PREFERENCE that does not refuse the request. Every refusal is a sentence, for
explain_attention_backend and for the error when a backend is asked for by name.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fasttrain_kernels import cpp
from fasttrain_kernels._registration import runs_triton
from fasttrain_kernels.ops.attention.intervals import reach

PREFERENCE = ("flash", "cpp", "sdpa", "triton", "blocked")
MAX_HEAD_DIM = 256  # of flash-attn, and of the tiles that our kernels keep in registers


@dataclass(frozen=True)
class Request:
    """The properties of a call that the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    window: int | None
    documents: bool
    cu_seqlens: bool
    softcap: float | None
    kernels_on_cpu: bool  # inside fasttrain_kernels.testing.interpret()

    @staticmethod
    def of(
        q: Tensor,  # (B, T_q, H, D)
        k: Tensor,  # (B, T_k, Hkv, D)
        cu_seqlens: Tensor | None,
        documents: Tensor | None,
        causal: bool,
        window: int | None,
        softcap: float | None,
    ) -> Request:
        return Request(
            device=q.device.type,
            dtype=q.dtype,
            num_queries=q.shape[1],
            num_keys=k.shape[1],
            num_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            head_dim=q.shape[3],
            causal=causal,
            window=window,
            documents=cu_seqlens is not None or documents is not None,
            cu_seqlens=cu_seqlens is not None,
            softcap=softcap,
            kernels_on_cpu=q.device.type == "cpu" and runs_triton(q),
        )


def _flash_attn_installed() -> bool:
    return _has_flash_attn()


@functools.cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None  # which looks for files: 50 us at every call


# All that torch.compiler.assume_constant_result does, but the decorator imports torch._dynamo, which takes seconds.
_flash_attn_installed._dynamo_marked_constant = True  # type: ignore[attr-defined]


# A refusal names fields of the request in braces. They are filled in when it is printed: under torch.compile the
# values may be symbols, which have no text.


def _refuse_flash(request: Request) -> str | None:
    if request.device != "cuda":
        return "device {device}: it runs on CUDA only"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return "dtype {dtype}: it takes bfloat16 and float16"
    if request.head_dim > MAX_HEAD_DIM:
        return f"head dimension {{head_dim}}: it takes up to {MAX_HEAD_DIM}"
    if request.num_keys == 0:
        return "no keys"
    if request.documents and not request.cu_seqlens:
        return "documents without cu_seqlens"
    return None if _flash_attn_installed() else "the package flash-attn is not installed"


def _refuse_cpp(request: Request) -> str | None:
    if request.device != "cpu":
        return "device {device}: it runs on CPUs"
    if (refusal := _refuse_blocked(request)) is not None:
        return refusal
    if request.dtype != torch.float32:
        return "dtype {dtype}: it takes float32"
    if request.softcap is not None:
        return "softcap={softcap}"
    if request.num_queries == 1:
        return "a single query: there is no work to share"
    return cpp.missing().replace("{", "{{").replace("}", "}}") or None  # a compiler's message may quote code


def _refuse_sdpa(request: Request) -> str | None:
    if request.window is not None:
        return "window={window}"
    if request.documents:
        return "documents"
    if request.softcap is not None:
        return "softcap={softcap}"
    if request.num_keys == 0:
        return "no keys"
    if request.causal and request.num_queries != 1 and request.num_queries != request.num_keys:
        return "causal with {num_queries} queries and {num_keys} keys: it aligns them at the first key"
    if (
        request.device == "cuda"
        and request.num_heads != request.num_kv_heads
        and request.dtype not in (torch.bfloat16, torch.float16)
    ):
        return "grouped heads in {dtype} on CUDA: torch has no fused kernel and would hold all scores"
    return None


def _refuse_triton(request: Request) -> str | None:
    if request.device != "cuda" and not request.kernels_on_cpu:
        return "device {device}: it runs on GPUs, and on CPU tensors inside fasttrain_kernels.testing.interpret()"
    if request.head_dim > MAX_HEAD_DIM:
        return f"head dimension {{head_dim}}: it takes up to {MAX_HEAD_DIM}"
    return None


def _refuse_blocked(request: Request) -> str | None:
    if request.device == "cuda":
        return "device {device}: it runs on CPUs and on MPS"
    return "inside interpret() the op runs its Triton kernels" if request.kernels_on_cpu else None


_REFUSE: dict[str, Callable[[Request], str | None]] = {
    "flash": _refuse_flash,
    "cpp": _refuse_cpp,
    "sdpa": _refuse_sdpa,
    "triton": _refuse_triton,
    "blocked": _refuse_blocked,
}


def explain(request: Request) -> dict[str, str]:
    """Every backend, with "ok" or what it cannot do."""
    return {name: (_REFUSE[name](request) or "ok").format(**vars(request)) for name in PREFERENCE}


def choose(request: Request, backend: str) -> str:
    """The backend that runs; an error if it cannot."""
    if backend != "auto" and backend not in PREFERENCE:
        raise ValueError(f'attention: backend "{backend}" is unknown; choose from auto, {", ".join(PREFERENCE)}')
    able = [name for name in PREFERENCE if _REFUSE[name](request) is None]
    if backend in able:
        return backend
    if backend != "auto":
        raise ValueError(
            f'attention: backend "{backend}" cannot do this ({explain(request)[backend]}); '
            f"backends that can: {', '.join(able) or 'none'}"
        )
    if not able:
        refusals = "; ".join(f"{name}: {why}" for name, why in explain(request).items())
        raise ValueError(f"attention: no backend can do this: {refusals}")
    # Inside interpret(), our own kernels are to run.
    return "triton" if request.kernels_on_cpu and "triton" in able else able[0]


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


def flash(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    cu_seqlens: Tensor | None,  # (num_docs + 1,)
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> Tensor:  # (B, T_q, H, D)
    """The flash-attn package, with its deterministic backward."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    options = dict(
        softmax_scale=scale,
        causal=causal,
        window_size=(-1, -1) if window is None else reach(causal, window),
        softcap=softcap or 0.0,
        deterministic=True,
    )
    if cu_seqlens is None:
        return flash_attn_func(q, k, v, **options)
    B, T = q.shape[:2]
    # The longest document is not known without waiting for the device; all tokens are a bound, and only the grid's.
    out = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens, cu_seqlens, max_seqlen_q=B * T, max_seqlen_k=B * T, **options
    )
    return out.unflatten(0, (B, T))
