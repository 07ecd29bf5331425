"""Ops at training shapes in bf16, with their physical limits, and how fasttrain runs them.

A limit is what no kernel can avoid: every input of the op read once, every output written once. What a kernel keeps for
itself (rstd, partial sums) is not in it.

M rows (tokens), N features, V vocabulary, H heads, D head dimension, P programs of the pass's first launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bench.static.cache import Tiling
from bench.static.torch_ops import record_matmul
from fasttrain_kernels import attention, linear_cross_entropy, qk_norm_rope
from fasttrain_kernels.ops.linear_cross_entropy import chunked, op
from fasttrain_kernels.ops.linear_cross_entropy.launch import cross_entropy_triton
from fasttrain_kernels.ops.linear_cross_entropy.reference import LossOptions
from fasttrain_kernels.ops.rms_norm import add_rms_norm, rms_norm
from fasttrain_kernels.ops.swiglu import swiglu

BF16 = torch.bfloat16
Sizes = dict[str, int]
Backward = Callable[[], object]
Terms = Callable[[Sizes, int, str], tuple[int, ...]]  # of the polynomial: sizes, P, pass -> their values


@dataclass(frozen=True, eq=False)
class Shape:
    """A problem that every provider gets."""

    op: str
    name: str  # "8192x4096"
    full: Sizes
    small: Sequence[Sizes]  # to interpret; SMS: multiprocessors of the GPU that the op believes to have
    terms: Terms
    limits: dict[str, int]  # pass -> bytes
    by_memory: bool = False  # tiles depend on the target's shared memory


@dataclass(frozen=True, eq=False)  # a case is itself, and hashable
class StaticCase:
    """One provider's way to compute a shape: `run` does the forward pass and returns the backward pass, if any."""

    provider: str
    shape: Shape
    run: Callable[[Sizes], Backward | None]
    locks: bool = False  # its programs share elements behind locks
    by_target: bool = False  # it takes another kernel on another target
    # For an op that repeats one kernel in chunks beside matmuls, which cannot run at full size: a run with a
    # single chunk, its sizes, and the terms of one launch.
    small_run: Callable[[Sizes], Backward | None] | None = None
    small: Sequence[Sizes] = ()
    terms: Terms | None = None
    tilings: Mapping[str, Callable[[Sizes], Tiling]] = field(default_factory=dict)  # of kernels that are matmuls


def ceil_div(n: int, d: int) -> int:
    return -(-n // d)


def fresh(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def targets(M: int) -> Tensor:
    """Labels, made before the op and therefore not counted with it."""
    with _disable_current_modes():
        return torch.zeros(M, dtype=torch.int64)


def trained(outputs: Tensor | tuple[Tensor, ...], inputs: Sequence[Tensor]) -> Backward:
    """The backward pass of an op of torch, for all its inputs."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.empty_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, list(inputs), grads)


# Shapes


def _rows_points(unit: int) -> list[Sizes]:
    """Runs of few rows: one and several programs, and enough of them that their parts of dweight fill two tiles."""
    return [dict(M=unit * m, SMS=s) for s, m in ((1, 4), (1, 8), (2, 8), (33, 40), (34, 70), (3, 12))]


def _rows_terms(sizes: Sizes, P: int, direction: str) -> tuple[int, ...]:
    return (1, sizes["M"], P) if direction == "forward" else (1, sizes["M"], P, ceil_div(P, 32))


def _norm(op: str, M: int, N: int, forward: int, backward: int) -> Shape:
    """forward, backward: tensors of M x N that are read or written."""
    limits = {"forward": 2 * M * N * forward + 2 * N, "backward": 2 * M * N * backward + 4 * N}
    small = [s | dict(N=N) for s in _rows_points(max(1, 4096 // N))]
    return Shape(op, f"{M}x{N}", dict(M=M, N=N), small, _rows_terms, limits)


def _swiglu(M: int, N: int) -> Shape:
    small = [dict(M=m, N=N, SMS=1) for m in (1, 2, 3)]
    limits = {"forward": 2 * M * N * 3, "backward": 2 * M * N * 5}
    return Shape("swiglu", f"{M}x{N}", dict(M=M, N=N), small, lambda s, P, direction: (1, s["M"]), limits)


def _qk(M: int, Hq: int, Hk: int, D: int = 128) -> Shape:
    heads, tables, weights = 2 * M * (Hq + Hk) * D, 2 * M * D // 2 * 4, 2 * 2 * D
    sizes = dict(Hq=Hq, Hk=Hk, D=D)
    points = ((1, 16), (1, 32), (2, 32), (3, 48), (44, 264))  # SMS, M; the last: over 128 programs
    return Shape(
        "qk_norm_rope",
        f"{M} tokens, {Hq}+{Hk} heads of {D}",
        dict(M=M) | sizes,
        [dict(M=m, SMS=s) | sizes for s, m in points],
        lambda s, P, direction: (1, s["M"]) + (() if direction == "forward" else (s["SMS"], P, ceil_div(P, 128))),
        {"forward": 2 * heads + tables + weights, "backward": 3 * heads + tables + 2 * weights},
    )


def _attention(T: int, Hq: int, Hk: int, D: int) -> Shape:
    q, kv = 2 * T * Hq * D, 2 * 2 * T * Hk * D
    points = [dict(T=128 * n, Hq=h * Hq // Hk, Hk=h) for n, h in ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2))]

    def terms(s: Sizes, P: int, direction: str) -> tuple[int, ...]:
        n = s["T"] // 128
        return s["Hk"], s["Hk"] * n, s["Hk"] * n * n

    return Shape(
        "attention",
        f"causal, T={T}, {Hq}/{Hk} heads of {D}",
        dict(T=T, Hq=Hq, Hk=Hk, D=D),
        [p | dict(D=D, SMS=1) for p in points],
        terms,
        {"forward": 2 * q + kv, "backward": 4 * q + 2 * kv},  # q, out, dout, dq; k, v, dk, dv
        by_memory=True,
    )


def _cross_entropy(M: int, V: int) -> Shape:
    small = [dict(M=m, V=V, SMS=1) for m in (1, 2, 3)]
    limits = {"forward": 2 * 2 * M * V + 8 * M + 4 * M}
    return Shape("cross_entropy_rows", f"{M}x{V}", dict(M=M, V=V), small, lambda s, P, direction: (1, s["M"]), limits)


def _linear_cross_entropy(M: int, D: int, V: int) -> Shape:
    blocks = [(b, v, d) for b in (1, 2) for v in (1, 2) for d in (1, 2)] + [(2, 3, 2)]
    small = [dict(M=256 * b, V=128 * v, D=256 * d, SMS=1) for b, v, d in blocks]

    def terms(s: Sizes, P: int, direction: str) -> tuple[int, ...]:
        M, V, D = s["M"], s["V"], s["D"]
        return 1, M, V, D, M * V, M * D, V * D, M * V * D

    hidden, weight = 2 * M * D, 2 * V * D
    limits = {"forward": hidden + weight + 12 * M, "backward": 2 * hidden + 2 * weight + 12 * M}
    return Shape("linear_cross_entropy", f"{M}x{D}, V={V}", dict(M=M, D=D, V=V), small, terms, limits)


RMS = [_norm("rms_norm", 8192, N, 2, 3) for N in (4096, 1024)]
ADD_RMS = [_norm("add_rms_norm", 8192, 4096, 4, 4)]
SWIGLU = [_swiglu(8192, 12288), _swiglu(8192, 3072)]
QK = [_qk(8192, 16, 8), _qk(8192, 32, 8)]  # Qwen3-0.6B, Qwen3-8B
ATTENTION = [_attention(4096, 32, 8, 128)]
ROWS = [_cross_entropy(4096, 151936)]  # a chunk of linear_cross_entropy
LINEAR = [_linear_cross_entropy(8192, D, 151936) for D in (4096, 1024)]  # Qwen3-8B, Qwen3-0.6B


# Ours


def _run_rms(s: Sizes) -> Backward:
    x, weight = fresh(s["M"], s["N"]), fresh(s["N"])
    return trained(rms_norm(x, weight), [x, weight])


def _run_add_rms(s: Sizes) -> Backward:
    x, residual, weight = fresh(s["M"], s["N"]), fresh(s["M"], s["N"]), fresh(s["N"])
    return trained(add_rms_norm(x, residual, weight), [x, residual, weight])


def _run_swiglu(s: Sizes) -> Backward:
    gate, up = fresh(s["M"], s["N"]), fresh(s["M"], s["N"])
    return trained(swiglu(gate, up), [gate, up])


def _run_qk(s: Sizes) -> Backward:
    q, k = (fresh(1, s["M"], heads, s["D"]) for heads in (s["Hq"], s["Hk"]))
    weights = fresh(s["D"]), fresh(s["D"])
    tables = [torch.empty(s["M"], s["D"] // 2) for _ in ("cos", "sin")]
    return trained(qk_norm_rope(q, k, *weights, *tables), [q, k, *weights])


def _run_attention(s: Sizes) -> Backward:
    q, k, v = (fresh(1, s["T"], heads, s["D"]) for heads in (s["Hq"], s["Hk"], s["Hk"]))
    return trained(attention(q, k, v, backend="triton"), [q, k, v])


def _run_cross_entropy(s: Sizes) -> None:
    logits = torch.empty(s["M"], s["V"], dtype=BF16)
    options = LossOptions(ignore_index=-100, z_loss=0.0, label_smoothing=0.0, softcap=None)
    cross_entropy_triton(logits, s["V"], targets(s["M"]), torch.empty(s["M"]), options, stats=False)


def _run_linear(s: Sizes) -> Backward:
    """The op on meta tensors, its matmuls recorded instead of computed."""
    hidden, weight = (torch.empty(s[rows], s["D"], dtype=BF16, device="meta") for rows in "MV")
    labels = torch.empty(s["M"], dtype=torch.int64, device="meta")
    autocast = patch("torch.autocast", lambda *_, **__: nullcontext())  # there is none for such tensors
    with patch.object(chunked, "_matmul", record_matmul), autocast:
        _, dhidden, dweight, scale = op._forward(
            *(hidden, weight, labels, None, -100, 0.0, 0.0, None, True, True, True), use_triton=True
        )
    return lambda: [op._finished(grad, scale, BF16) for grad in (dhidden, dweight)]


def _run_linear_small(s: Sizes) -> None:
    linear_cross_entropy(fresh(s["M"], 16), fresh(s["V"], 16), targets(s["M"]))


def program_per_row(s: Sizes, P: int, direction: str) -> tuple[int, ...]:
    """Terms of a launch with a program per row."""
    return 1, P


CHUNKED: dict[str, Any] = dict(small=[dict(M=m, V=151936, SMS=1) for m in (1, 2, 3)], terms=program_per_row)

_OURS = {
    _run_rms: RMS,
    _run_add_rms: ADD_RMS,
    _run_swiglu: SWIGLU,
    _run_qk: QK,
    _run_attention: ATTENTION,
    _run_cross_entropy: ROWS,
}
OURS = [StaticCase("fasttrain", shape, run) for run, shapes in _OURS.items() for shape in shapes]
OURS += [StaticCase("fasttrain", shape, _run_linear, small_run=_run_linear_small, **CHUNKED) for shape in LINEAR]
