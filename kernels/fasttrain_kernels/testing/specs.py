"""Every op once: what it computes, what it is measured by, and at which sizes. Self-check, accuracy, contract, compiled
survey, benchmarks and the table of docs/kernels/README.md read it.

M tokens, C hidden size, F width of the MLP or of a projection, H query heads, K key heads, D head size, T sequence,
V vocabulary, Z z-loss in 1e-4. Bytes: every input read once, every output written once. FLOPs: of the matmuls, nothing
recomputed; of ops without any, those that bench/static counts in our kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fasttrain_kernels as ft
from fasttrain_kernels.ops.attention.reference import visible_keys
from fasttrain_kernels.testing import compile_cases
from fasttrain_kernels.testing.compile_cases import CompileCase, Reach, train_on

EPS = 1e-6
Size = dict[str, int]  # by letter
Randn = Callable[..., Tensor]


class OpWork(NamedTuple):
    """The least work of a pass."""

    bytes: int
    flops: int = 0

    def __add__(self, other: tuple[int, ...]) -> OpWork:  # type: ignore[override]
        return OpWork(self.bytes + other[0], self.flops + other[1])


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """An op, or a variant of its call."""

    name: str  # of the public function; its specification is <name>_reference
    variant: str = ""
    fuses: str = ""  # for the table of all ops
    eager: Callable[..., Any]  # as one writes it in PyTorch: the baseline of errors and of time
    inputs: Callable[[Size, Randn], dict[str, Any]]
    small: Size | None = None  # for the self-check and the contract
    odd: Sequence[Size] = ()  # for accuracy over seeds, of ops without cases of their own
    work: Callable[[Size, int], tuple[OpWork, OpWork]] = lambda size, itemsize: (OpWork(0), OpWork(0))  # of both passes
    elements: Callable[[Size], int] = lambda size: 0  # of the largest tensor that eager makes
    cpu: Sequence[Size] = ()  # to benchmark
    gpu: Sequence[Size] = ()
    compiled: Sequence[CompileCase] = ()
    streaming: bool = False  # memory-bound: on CPUs torch.compile sees its reference

    @property
    def title(self) -> str:
        return f"{self.name}, {self.variant}" if self.variant else self.name

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(ft, self.name)

    @property
    def reference(self) -> Callable[..., Any]:
        """The specification: the truth, in float64."""
        return getattr(ft, f"{self.name}_reference", self.eager)  # linear is its own


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


def eager_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def eager_masked_attention(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    query, key, value = q.transpose(1, 2), *(x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    visible = visible_keys(q.shape[1], k.shape[1], True, window, cu_seqlens, q.device)
    scores = (query @ key.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def eager_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def eager_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, z_loss: float = 0.0) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits.float() if logits.dtype != torch.float64 else logits
    loss = F.cross_entropy(logits, target)
    return loss + z_loss * logits.logsumexp(-1).square().mean() if z_loss else loss


def eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def eager_swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weight)


def _rotary_inputs(size: Size, randn: Randn) -> dict[str, Any]:
    T, D = size["T"], size["D"]
    q, k = (randn(size["M"] // T, T, size[heads], D) for heads in "HK")
    cos, sin = ft.rotary_table(T, D, device=q.device)
    return dict(q=q, k=k, q_weight=randn(D), k_weight=randn(D), cos=cos, sin=sin)


def _attention_inputs(size: Size, randn: Randn) -> dict[str, Any]:
    B, T, D = size["M"] // size["T"], size["T"], size["D"]
    return {name: randn(B, T, size[heads], D) for name, heads in zip("qkv", "HKK", strict=True)}


def _head_inputs(size: Size, randn: Randn) -> dict[str, Any]:
    hidden, scale = randn(size["M"], size["C"]), 1.0 if "Z" in size else size["C"] ** -0.5
    weight = (randn(size["V"], size["C"]).detach() * scale).requires_grad_()
    target = torch.arange(size["M"], device=hidden.device) * 7919 % size["V"]
    options = dict(z_loss=1e-4 * size["Z"]) if "Z" in size else {}
    return dict(hidden=hidden, weight=weight, target=target, **options)


def _streamed(
    reads: tuple[int, int], flops: tuple[int, int], width: str
) -> Callable[[Size, int], tuple[OpWork, OpWork]]:
    """So many passes over a matrix of tokens, and FLOPs of each element, in forward and in backward."""

    def work(size: Size, itemsize: int) -> tuple[OpWork, OpWork]:
        elements = size["M"] * size[width]
        forward, backward = (OpWork(itemsize * r * elements, f * elements) for r, f in zip(reads, flops, strict=True))
        return forward, backward

    return work


def _rotary_work(size: Size, itemsize: int) -> tuple[OpWork, OpWork]:
    heads, table = size["M"] * (size["H"] + size["K"]) * size["D"], 4 * size["T"] * size["D"]
    return OpWork(2 * itemsize * heads + table, 7 * heads), OpWork(3 * itemsize * heads + table, 14 * heads)


def _attention_work(size: Size, itemsize: int) -> tuple[OpWork, OpWork]:
    q, k = (itemsize * size["M"] * size[heads] * size["D"] for heads in "HK")
    matmul = size["M"] * (size["T"] + 1) * size["H"] * size["D"]  # 2 FLOP, for the half below the diagonal
    return OpWork(2 * q + 2 * k, 2 * matmul), OpWork(4 * q + 4 * k, 4 * matmul)


def _head_work(size: Size, itemsize: int) -> tuple[OpWork, OpWork]:
    hidden, weight = itemsize * size["M"] * size["C"], itemsize * size["V"] * size["C"]
    matmul = 2 * size["M"] * size["C"] * size["V"]
    return OpWork(hidden + weight, matmul), OpWork(2 * hidden + 2 * weight, 2 * matmul)


def _projection_work(size: Size, itemsize: int) -> tuple[OpWork, OpWork]:
    x, weight, out = (itemsize * size[a] * size[b] for a, b in ("MC", "FC", "MF"))
    matmul = 2 * size["M"] * size["C"] * size["F"]
    return OpWork(x + weight + out, matmul), OpWork(2 * x + 2 * weight + out, 2 * matmul)


def _documents(size: Size, randn: Randn) -> dict[str, Any]:
    ends = torch.tensor([0, 37, 38, size["T"]], dtype=torch.int32)
    given = _attention_inputs(size, randn)
    return given | dict(cu_seqlens=ends.to(given["q"].device), window=24)


def _projected_inputs(size: Size, randn: Randn) -> dict[str, Any]:
    return dict(gate_up=randn(size["M"], 2 * size["F"]), weight=randn(size["C"], size["F"]))


_ROWS = [dict(M=m, C=1024) for m in (1024, 4096)]
_GPU_ROWS = [dict(M=8192, C=1024), dict(M=2048, C=4096), dict(M=8192, C=4096), dict(M=32768, C=4096)]
_QWEN3_SMALL, _QWEN3_8B, _LLAMA_7B = dict(H=16, K=8, D=128), dict(H=32, K=8, D=128), dict(H=32, K=32, D=128)

SPECS = (
    OpSpec(
        name="rms_norm",
        fuses="the norm", compiled=compile_cases.RMS_NORM, streaming=True,
        small=dict(M=32, C=512),
        eager=eager_rms_norm,
        inputs=lambda s, randn: dict(x=randn(s["M"], s["C"]), weight=randn(s["C"])),
        work=_streamed((2, 3), (4, 9), "C"), elements=lambda s: s["M"] * s["C"], cpu=_ROWS, gpu=_GPU_ROWS,
    ),
    OpSpec(
        name="add_rms_norm",
        fuses="the residual add before it, and the gradient of both", compiled=compile_cases.ADD_RMS_NORM,
        streaming=True, small=dict(M=32, C=512), odd=[dict(M=7, C=63), dict(M=3, C=1000)],
        eager=eager_add_rms_norm,
        inputs=lambda s, randn: dict(x=randn(s["M"], s["C"]), residual=randn(s["M"], s["C"]), weight=randn(s["C"])),
        work=_streamed((4, 4), (5, 10), "C"), elements=lambda s: s["M"] * s["C"], cpu=_ROWS, gpu=_GPU_ROWS,
    ),
    OpSpec(
        name="qk_norm_rope",
        fuses="per-head norm of q and k, and RoPE", compiled=compile_cases.QK_NORM_ROPE, streaming=True,
        small=dict(M=48, T=24, H=4, K=2, D=64),
        eager=eager_qk_norm_rope, inputs=_rotary_inputs,
        work=_rotary_work, elements=lambda s: s["M"] * s["H"] * s["D"],
        cpu=[dict(M=m, T=256, H=8, K=4, D=64) for m in (1024, 4096)],
        gpu=[dict(M=m, T=2048) | _QWEN3_8B for m in (2048, 8192, 32768)]
        + [dict(M=8192, T=2048) | heads for heads in (_QWEN3_SMALL, _LLAMA_7B)],
    ),
    OpSpec(
        name="attention",
        fuses="flash attention: GQA, documents, window, softcap; deterministic", compiled=compile_cases.ATTENTION,
        eager=eager_attention, inputs=_attention_inputs,
        work=_attention_work, elements=lambda s: s["M"] * s["T"] * s["H"],
        cpu=[dict(M=1024, T=t, H=6, K=6, D=64) for t in (256, 1024)],
        gpu=[dict(M=8192, T=t) | _QWEN3_8B for t in (1024, 2048, 4096)]
        + [dict(M=8192, T=2048) | heads for heads in (_QWEN3_SMALL, _LLAMA_7B)],
    ),
    OpSpec(
        name="attention", variant="causal", eager=eager_sdpa, inputs=_attention_inputs,
        small=dict(M=160, T=80, H=4, K=2, D=32),
    ),
    OpSpec(
        name="attention", variant="documents", eager=eager_masked_attention, inputs=_documents,
        small=dict(M=96, T=96, H=6, K=2, D=32),
    ),
    OpSpec(
        name="linear",
        fuses="nothing: a matmul, faster than torch's on some CPUs",
        eager=eager_linear,
        inputs=lambda s, randn: dict(x=randn(s["M"], s["C"]), weight=randn(s["F"], s["C"])),
        work=_projection_work, elements=lambda s: s["M"] * s["F"],
        cpu=[dict(M=2048, C=384, F=2048), dict(M=2048, C=1024, F=384)],
        gpu=[],  # torch's
    ),
    OpSpec(
        name="linear_cross_entropy",
        fuses="the head's matmul, loss and gradients", compiled=compile_cases.LINEAR_CROSS_ENTROPY,
        small=dict(M=24, C=64, V=1000, Z=1),
        eager=eager_linear_cross_entropy,
        inputs=_head_inputs, work=_head_work, elements=lambda s: s["M"] * s["V"],
        cpu=[dict(M=1024, C=512, V=v) for v in (4096, 8192)],
        gpu=[dict(M=4096, C=1024, V=v) for v in (32000, 151936)]
        + [dict(M=4096, C=4096, V=v) for v in (32000, 151936)],
    ),
    OpSpec(
        name="swiglu",
        fuses="silu(gate) * up, also packed", compiled=compile_cases.SWIGLU, streaming=True,
        small=dict(M=32, F=1024), odd=[dict(M=3, F=63), dict(M=2, F=1025)],
        eager=eager_swiglu,
        inputs=lambda s, randn: dict(gate=randn(s["M"], s["F"]), up=randn(s["M"], s["F"])),
        work=_streamed((3, 5), (5, 10), "F"), elements=lambda s: s["M"] * s["F"],
        cpu=[dict(M=m, F=1024) for m in (1024, 4096)],
        gpu=[dict(M=m, F=12288) for m in (2048, 8192, 32768)] + [dict(M=8192, F=f) for f in (3072, 11008)],
    ),
    OpSpec(
        name="swiglu_linear", eager=eager_swiglu_linear, inputs=_projected_inputs, small=dict(M=32, F=256, C=64),
        odd=[dict(M=5, F=63, C=17)],
    ),
    OpSpec(
        name="relu2", fuses="relu(x) squared", streaming=True,
        eager=lambda x: F.relu(x).square(), inputs=lambda s, randn: dict(x=randn(s["M"], s["F"])),
        small=dict(M=32, F=1024), odd=[dict(M=3, F=63), dict(M=2, F=1025), dict(M=1, F=1)],
        work=_streamed((2, 3), (2, 3), "F"), elements=lambda s: s["M"] * s["F"],
        cpu=[dict(M=m, F=1024) for m in (1024, 4096)], gpu=[dict(M=m, F=12288) for m in (2048, 8192)],
        compiled=[
            CompileCase(f"{name} F=14336", reach, partial(train_on, ft.relu2, dtype, (8192, 14336)))
            for name, dtype, reach in (
                ("bf16", torch.bfloat16, Reach.CORE),
                ("fp16", torch.float16, Reach.OPTIONS),
                ("fp32", torch.float32, Reach.OPTIONS),
            )
        ],
    ),
)  # fmt: skip

COMPILED = {spec.name: spec.compiled for spec in SPECS if spec.compiled}
