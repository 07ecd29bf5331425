"""Every op on the inputs that tell: odd shapes, outliers (randn * 3), options. For each of DTYPES.

Small, because the interpreter is slow; many seeds, because the measure is one over seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fasttrain_kernels as ft
from fasttrain_kernels import linear_cross_entropy_stats, linear_cross_entropy_stats_reference
from fasttrain_kernels.testing.specs import SPECS
from tests.kernels.numbers import eager

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEEDS = 10
MANY_SEEDS = 24  # where few elements decide: of logits beyond 1,000, few rows are not one-hot


@dataclass(frozen=True)
class Case:
    """`inputs(dtype)` draws one set of inputs from torch's generator."""

    op: Callable[..., Any]
    reference: Callable[..., Any]
    eager: list[Callable[..., Any]]  # in several orders of summation, or one
    inputs: Callable[[torch.dtype], dict[str, Any]]
    seeds: int = SEEDS  # in float32

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments of compare_over_seeds."""
        exact = dtype == torch.float32
        return dict(
            reference=self.reference,
            inputs=partial(self.inputs, dtype),
            seeds=range(self.seeds if exact else self.seeds // 2),  # 16 bits: roundings outweigh luck and order
            eager=self.eager if exact else self.eager[:1],
        )


def in_four_orders(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [partial(function, order=order) for order in (None, 0, 1, 2)]


def tensor(*shape: int, dtype: torch.dtype, size: float = 3.0) -> torch.Tensor:
    return (torch.randn(shape) * size).to(dtype).requires_grad_()


# Attention


def qkv(dtype, batch=1, queries=50, keys=None, heads=2, kv_heads=1, dim=16, size=1.0, **options):
    keys = queries if keys is None else keys
    q = tensor(batch, queries, heads, dim, dtype=dtype, size=size)
    k, v = (tensor(batch, keys, kv_heads, dim, dtype=dtype, size=size) for _ in "kv")
    return dict(q=q, k=k, v=v) | options


def undecided(dtype, queries=40, keys=40, dim=16):
    """Logits beyond 1,000, and in every row two that differ by about 1: of random ones, few rows are not one-hot.

    A query is the sum of two keys that it sees, scaled, plus what makes both products equal.
    """
    k, v = torch.randn(2, 1, keys, 1, dim) * 30
    first = keys - queries + torch.arange(queries)
    other = (torch.rand(queries) * first).long()
    a, b = k[0, first, 0], k[0, other, 0]
    difference = a - b
    q = (a + b) / (a + b).square().sum(-1, keepdim=True) * 3000 * dim**0.5
    excess = (q * difference).sum(-1, keepdim=True) - torch.randn(queries, 1) * dim**0.5
    q = q - difference * (excess / difference.square().sum(-1, keepdim=True).clamp(min=1.0))
    q = q[None, :, None]
    return {name: x.to(dtype).requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)}


def documents(dtype):
    """Documents of 3, 0, 37, 1, 34 and 25 tokens, across the borders of blocks and of the batch."""
    return qkv(dtype, batch=2, size=3.0, cu_seqlens=torch.tensor([0, 3, 3, 40, 41, 75, 100]).int())


def attention(inputs, seeds=SEEDS, **options):
    eagers = in_four_orders(eager.attention)
    return Case(ft.attention, ft.attention_reference, eagers, partial(inputs, **options), seeds)


ATTENTION = {
    "head dimension 64": attention(qkv, queries=66, heads=1, dim=64),
    "head dimension 128, scale 0.2": attention(qkv, queries=33, heads=1, dim=128, scale=0.2),
    "outliers": attention(qkv, queries=70, size=3.0),
    "logits beyond 1,000": attention(qkv, MANY_SEEDS, queries=40, heads=4, size=25.0),
    "logits beyond 1,000, head dimension 128": attention(qkv, MANY_SEEDS, queries=32, heads=4, dim=128, size=25.0),
    "logits beyond 1,000, undecided": attention(undecided),
    "logits beyond 1,000, undecided, head dimension 128": attention(undecided, dim=128),
    "one query": attention(qkv, heads=3, queries=1, keys=130),
    "one query, outliers": attention(qkv, heads=3, queries=1, keys=130, size=3.0),
    "one query, outliers, head dimension 128": attention(qkv, heads=3, queries=1, keys=65, dim=128, size=3.0),
    "softcap": attention(qkv, softcap=2.0, scale=0.5),
    "softcap, outliers": attention(qkv, softcap=20.0, size=3.0),
    "softcap, logits beyond 1,000": attention(qkv, softcap=50.0, size=30.0),
    "window, outliers": attention(qkv, queries=100, heads=1, window=20, size=3.0),
    "bidirectional window, outliers": attention(qkv, causal=False, window=20, size=3.0),
    "documents, outliers": attention(documents),
    "5 heads per key head, outliers": attention(qkv, queries=40, heads=5, size=3.0),
    "fewer queries than keys, outliers": attention(qkv, queries=17, keys=70, size=3.0),
    "queries that see nothing": attention(qkv, queries=50, keys=30),
}


# Norms


def rms_norm(*shape, offset=0.0, weight=True, size=3.0):
    def inputs(dtype):
        given = dict(x=tensor(*shape, dtype=dtype, size=size))
        return given | (dict(weight=tensor(shape[-1], dtype=dtype, size=1.0), offset=offset) if weight else {})

    return Case(ft.rms_norm, ft.rms_norm_reference, in_four_orders(eager.rms_norm), inputs)


def qk_norm_rope(B=2, T=5, Hq=3, Hk=1, D=64, R=None, norm=True, **options):
    def inputs(dtype):
        cos, sin = ft.rotary_table(40, R or D)
        q, k = tensor(B, T, Hq, D, dtype=dtype), tensor(B, T, Hk, D, dtype=dtype)
        weights = [tensor(D, dtype=dtype, size=1.0) if norm else None for _ in "qk"]
        return dict(q=q, k=k, q_weight=weights[0], k_weight=weights[1], cos=cos, sin=sin) | options

    return Case(ft.qk_norm_rope, ft.qk_norm_rope_reference, [ft.qk_norm_rope_reference], inputs)


NORMS = {
    "rms_norm (7, 63)": rms_norm(7, 63),
    "rms_norm (3, 1000)": rms_norm(3, 1000),
    "rms_norm (300, 16)": rms_norm(300, 16),
    "rms_norm (2, 2049)": rms_norm(2, 2049),
    "rms_norm, offset": rms_norm(7, 63, offset=1.0),
    "rms_norm, no weight": rms_norm(7, 63, weight=False),
    "rms_norm, values of 1e4": rms_norm(7, 63, size=1e4),
    "qk_norm_rope": qk_norm_rope(),
    "qk_norm_rope, interleaved": qk_norm_rope(interleaved=True),
    "qk_norm_rope, partial, D 80": qk_norm_rope(D=80, R=32),
    "qk_norm_rope, partial, interleaved, D 63": qk_norm_rope(D=63, R=62, interleaved=True),
    "qk_norm_rope, no norm": qk_norm_rope(norm=False),
    "qk_norm_rope, positions": qk_norm_rope(positions=torch.arange(10).view(2, 5) * 7 % 40),
}


# Cross entropy, SwiGLU


def logits_of(dtype, M=17, H=24, V=101, spread=3.0, token_weight=False, **options):
    """spread is the logits' standard deviation: 3 makes some p close to 1. Every fifth target is ignored."""
    target = torch.randint(V, (M,))
    target[1::5] = -100
    if token_weight:
        options["token_weight"] = torch.randint(1, 9, (M,)) / 8
    hidden = tensor(M, H, dtype=dtype, size=1.0)
    return dict(hidden=hidden, weight=tensor(V, H, dtype=dtype, size=spread / H**0.5), target=target) | options


def linear_cross_entropy(**options):
    return Case(
        ft.linear_cross_entropy,
        ft.linear_cross_entropy_reference,
        in_four_orders(eager.linear_cross_entropy),
        partial(logits_of, **options),
        SEEDS if options.get("reduction") == "none" else 16,  # a scalar is one sample
    )


def stats(**options):
    return Case(
        linear_cross_entropy_stats,
        linear_cross_entropy_stats_reference,
        [eager.linear_cross_entropy_stats],
        lambda dtype: {
            name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in logits_of(dtype, **options).items()
        },
    )


def swiglu(*shape, size=3.0):
    def inputs(dtype):
        return dict(gate=tensor(*shape, dtype=dtype, size=size), up=tensor(*shape, dtype=dtype, size=size))

    return Case(ft.swiglu, ft.swiglu_reference, [eager.swiglu], inputs)


ALL = dict(z_loss=0.01, label_smoothing=0.1, softcap=8.0, token_weight=True)
OTHERS = {
    "linear_cross_entropy": linear_cross_entropy(),
    "linear_cross_entropy (7, 16, 1000)": linear_cross_entropy(M=7, H=16, V=1000),
    "linear_cross_entropy (3, 1, 33)": linear_cross_entropy(M=3, H=1, V=33),
    "linear_cross_entropy, per token": linear_cross_entropy(reduction="none"),
    "linear_cross_entropy, sum": linear_cross_entropy(reduction="sum"),
    "linear_cross_entropy, outliers": linear_cross_entropy(spread=30.0),
    "linear_cross_entropy, logits of 1,000": linear_cross_entropy(spread=300.0, reduction="none"),
    "linear_cross_entropy, z_loss": linear_cross_entropy(z_loss=0.1),
    "linear_cross_entropy, smoothing": linear_cross_entropy(label_smoothing=0.2),
    "linear_cross_entropy, softcap": linear_cross_entropy(softcap=5.0, spread=9.0),
    "linear_cross_entropy, token_weight": linear_cross_entropy(token_weight=True),
    "linear_cross_entropy, all options": linear_cross_entropy(**ALL),
    "linear_cross_entropy, all options, per token": linear_cross_entropy(**ALL, reduction="none"),
    "linear_cross_entropy_stats": stats(),
    "linear_cross_entropy_stats, all options": stats(z_loss=0.01, label_smoothing=0.1, softcap=8.0),
    "linear_cross_entropy_stats, outliers": stats(spread=30.0),
    "swiglu, values of 30": swiglu(3, 63, size=30.0),
}

# Ops that the lists above do not have, on their odd shapes


def of_spec(spec, size):
    def inputs(dtype):
        return spec.inputs(size, lambda *shape: tensor(*shape, dtype=dtype))

    return Case(spec.function, spec.reference, [spec.eager], inputs)


SPECIFIED = {f"{spec.title} ({', '.join(map(str, s.values()))})": of_spec(spec, s) for spec in SPECS for s in spec.odd}
CASES = ATTENTION | NORMS | OTHERS | SPECIFIED
