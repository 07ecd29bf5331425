"""The ops of the kernel benchmarks: inputs, the least bytes and FLOPs of each pass, sizes, and eager baselines.

M tokens, C hidden size, F width of the MLP or of a projection, H query heads, K key heads, D head size, T sequence,
V vocabulary. Bytes: every input read once, every output written once. FLOPs: of the matmuls, nothing
recomputed; of ops without any, those that bench/static counts in our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fasttrain_kernels as ft

EPS = 1e-6
Size = dict[str, int]  # by letter
Randn = Callable[..., Tensor]


class Work(NamedTuple):
    """The least work of a pass."""

    bytes: int
    flops: int = 0

    def __add__(self, other: tuple[int, ...]) -> Work:  # type: ignore[override]
        return Work(self.bytes + other[0], self.flops + other[1])


@dataclass(frozen=True, kw_only=True)
class Op:
    name: str
    reference: Callable[..., Any]  # the specification: the truth, in float64
    eager: Callable[..., Any]  # as one writes it in PyTorch: the baseline of errors and of time
    inputs: Callable[[Size, Randn], dict[str, Any]]
    work: Callable[[Size, int], tuple[Work, Work]]  # of forward and of backward, for so many bytes per element
    elements: Callable[[Size], int]  # of the largest tensor that eager makes
    cpu: list[Size]
    gpu: list[Size]


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return eager_rms_norm(total, weight), total


def eager_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat((table, table), -1)[:, None].to(q.dtype) for table in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotated(eager_rms_norm(q, q_weight)), rotated(eager_rms_norm(k, k_weight))


def eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def eager_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def eager_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, target)


def eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _rotary_inputs(size: Size, randn: Randn) -> dict[str, Any]:
    T, D = size["T"], size["D"]
    q, k = (randn(size["M"] // T, T, size[heads], D) for heads in "HK")
    cos, sin = ft.rotary_table(T, D, device=q.device)
    return dict(q=q, k=k, q_weight=randn(D), k_weight=randn(D), cos=cos, sin=sin)


def _attention_inputs(size: Size, randn: Randn) -> dict[str, Any]:
    B, T, D = size["M"] // size["T"], size["T"], size["D"]
    return {name: randn(B, T, size[heads], D) for name, heads in zip("qkv", "HKK", strict=True)}


def _head_inputs(size: Size, randn: Randn) -> dict[str, Any]:
    hidden, scale = randn(size["M"], size["C"]), size["C"] ** -0.5
    weight = (randn(size["V"], size["C"]).detach() * scale).requires_grad_()
    return dict(hidden=hidden, weight=weight, target=torch.arange(size["M"], device=hidden.device) * 7919 % size["V"])


def _streamed(reads: tuple[int, int], flops: tuple[int, int], width: str) -> Callable[[Size, int], tuple[Work, Work]]:
    """So many passes over a matrix of tokens, and FLOPs of each element, in forward and in backward."""

    def work(size: Size, itemsize: int) -> tuple[Work, Work]:
        elements = size["M"] * size[width]
        forward, backward = (Work(itemsize * r * elements, f * elements) for r, f in zip(reads, flops, strict=True))
        return forward, backward

    return work


def _rotary_work(size: Size, itemsize: int) -> tuple[Work, Work]:
    heads, table = size["M"] * (size["H"] + size["K"]) * size["D"], 4 * size["T"] * size["D"]
    return Work(2 * itemsize * heads + table, 7 * heads), Work(3 * itemsize * heads + table, 14 * heads)


def _attention_work(size: Size, itemsize: int) -> tuple[Work, Work]:
    q, k = (itemsize * size["M"] * size[heads] * size["D"] for heads in "HK")
    matmul = size["M"] * (size["T"] + 1) * size["H"] * size["D"]  # 2 FLOP, for the half below the diagonal
    return Work(2 * q + 2 * k, 2 * matmul), Work(4 * q + 4 * k, 4 * matmul)


def _head_work(size: Size, itemsize: int) -> tuple[Work, Work]:
    hidden, weight = itemsize * size["M"] * size["C"], itemsize * size["V"] * size["C"]
    matmul = 2 * size["M"] * size["C"] * size["V"]
    return Work(hidden + weight, matmul), Work(2 * hidden + 2 * weight, 2 * matmul)


def _projection_work(size: Size, itemsize: int) -> tuple[Work, Work]:
    x, weight, out = (itemsize * size[a] * size[b] for a, b in ("MC", "FC", "MF"))
    matmul = 2 * size["M"] * size["C"] * size["F"]
    return Work(x + weight + out, matmul), Work(2 * x + 2 * weight + out, 2 * matmul)


_ROWS = [dict(M=m, C=1024) for m in (1024, 4096)]
_GPU_ROWS = [dict(M=8192, C=1024), dict(M=2048, C=4096), dict(M=8192, C=4096), dict(M=32768, C=4096)]
_QWEN3_SMALL, _QWEN3_8B, _LLAMA_7B = dict(H=16, K=8, D=128), dict(H=32, K=8, D=128), dict(H=32, K=32, D=128)

OPS = {
    op.name: op
    for op in (
        Op(
            name="rms_norm", reference=ft.rms_norm_reference, eager=eager_rms_norm,
            inputs=lambda s, randn: dict(x=randn(s["M"], s["C"]), weight=randn(s["C"])),
            work=_streamed((2, 3), (4, 9), "C"), elements=lambda s: s["M"] * s["C"], cpu=_ROWS, gpu=_GPU_ROWS,
        ),
        Op(
            name="add_rms_norm", reference=ft.add_rms_norm_reference, eager=eager_add_rms_norm,
            inputs=lambda s, randn: dict(x=randn(s["M"], s["C"]), residual=randn(s["M"], s["C"]), weight=randn(s["C"])),
            work=_streamed((4, 4), (5, 10), "C"), elements=lambda s: s["M"] * s["C"], cpu=_ROWS, gpu=_GPU_ROWS,
        ),
        Op(
            name="qk_norm_rope", reference=ft.qk_norm_rope_reference, eager=eager_qk_norm_rope, inputs=_rotary_inputs,
            work=_rotary_work, elements=lambda s: s["M"] * s["H"] * s["D"],
            cpu=[dict(M=m, T=256, H=8, K=4, D=64) for m in (1024, 4096)],
            gpu=[dict(M=m, T=2048) | _QWEN3_8B for m in (2048, 8192, 32768)]
            + [dict(M=8192, T=2048) | heads for heads in (_QWEN3_SMALL, _LLAMA_7B)],
        ),
        Op(
            name="attention", reference=ft.attention_reference, eager=eager_attention, inputs=_attention_inputs,
            work=_attention_work, elements=lambda s: s["M"] * s["T"] * s["H"],
            cpu=[dict(M=1024, T=t, H=6, K=6, D=64) for t in (256, 1024)],
            gpu=[dict(M=8192, T=t) | _QWEN3_8B for t in (1024, 2048, 4096)]
            + [dict(M=8192, T=2048) | heads for heads in (_QWEN3_SMALL, _LLAMA_7B)],
        ),
        Op(
            name="linear", reference=eager_linear, eager=eager_linear,
            inputs=lambda s, randn: dict(x=randn(s["M"], s["C"]), weight=randn(s["F"], s["C"])),
            work=_projection_work, elements=lambda s: s["M"] * s["F"],
            cpu=[dict(M=2048, C=384, F=2048), dict(M=2048, C=1024, F=384)],
            gpu=[],  # torch's
        ),
        Op(
            name="linear_cross_entropy", reference=ft.linear_cross_entropy_reference, eager=eager_linear_cross_entropy,
            inputs=_head_inputs, work=_head_work, elements=lambda s: s["M"] * s["V"],
            cpu=[dict(M=1024, C=512, V=v) for v in (4096, 8192)],
            gpu=[dict(M=4096, C=1024, V=v) for v in (32000, 151936)]
            + [dict(M=4096, C=4096, V=v) for v in (32000, 151936)],
        ),
        Op(
            name="swiglu", reference=ft.swiglu_reference, eager=eager_swiglu,
            inputs=lambda s, randn: dict(gate=randn(s["M"], s["F"]), up=randn(s["M"], s["F"])),
            work=_streamed((3, 5), (5, 10), "F"), elements=lambda s: s["M"] * s["F"],
            cpu=[dict(M=m, F=1024) for m in (1024, 4096)],
            gpu=[dict(M=m, F=12288) for m in (2048, 8192, 32768)] + [dict(M=8192, F=f) for f in (3072, 11008)],
        ),
    )
}  # fmt: skip
