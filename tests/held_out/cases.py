"""Kernels that others wrote, with the references that they test against: torch, or the package's naive functions.

Small, at odd sizes, float32. `reference` gets the same tensors as `op`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Op = Callable[..., Any]
Inputs = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class HeldOut:
    """An op, its reference, and a maker of inputs. Gradients are compared for those that require them."""

    op: Op
    reference: Op
    inputs: Inputs
    tolerance: float = 5e-3  # of the largest value: float32 matmuls are in tf32
    wrong: str = ""  # why the op's own results are not its reference's


CASES: dict[str, HeldOut] = {}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def case(name: str, op: Op, reference: Op, inputs: Inputs, **options: Any) -> None:
    CASES[name] = HeldOut(op, reference, inputs, **options)


def imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


# Liger-Kernel


def liger(module: str, name: str, *rest: Any, first: bool = False) -> Callable[..., Any]:
    def op(**inputs: Tensor) -> Any:
        # A product with 1: some write gradients, or results, into their inputs.
        function = imported(f"liger_kernel.ops.{module}", f"Liger{name}Function")
        result = function.apply(*(x * 1 if x.is_floating_point() else x for x in inputs.values()), *rest)
        return result[0] if first else result

    return op


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _targets() -> Tensor:
    return torch.tensor([5, 299, -100, 0, 17, 17, 250])


def _cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    z_loss = x.logsumexp(-1)[target >= 0].square().sum() / 6
    return F.cross_entropy(x, target, label_smoothing=0.1) + 1e-3 * z_loss


def _jsd(x: Tensor, y: Tensor) -> Tensor:
    mean = ((x.exp() + y.exp()) / 2).log()
    terms = [F.kl_div(mean, one, log_target=True, reduction="sum") for one in (x, y)]
    return (terms[0] + terms[1]) / 2 / x.shape[0]


def _sparsemax(x: Tensor) -> Tensor:
    z = x.sort(-1, descending=True).values
    total = z.cumsum(-1)
    support = (1 + torch.arange(1, x.shape[-1] + 1) * z > total).sum(-1, keepdim=True)
    return (x - (total.gather(-1, support - 1) - 1) / support).clamp(min=0)


def _rotated(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos[:, None] + _rotated(q) * sin[:, None], k * cos[:, None] + _rotated(k) * sin[:, None]


def _rope_inputs() -> dict[str, Tensor]:
    angle = torch.randn(1, 9, 16).repeat(1, 1, 2)
    return dict(q=randn(2, 4, 9, 32), k=randn(2, 2, 9, 32), cos=angle.cos(), sin=angle.sin())


def _poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    normed = [u * (u.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for u in (x**3, x**2, x)]
    return torch.stack([w * u for w, u in zip(weight, normed, strict=True)]).sum(0) + bias


def _log_probabilities() -> Tensor:
    return torch.randn(5, 200).log_softmax(-1)


ROWS = (6, 200)
case("Liger rms_norm", liger("rms_norm", "RMSNorm", 1e-6), _rms_norm, lambda: dict(x=randn(*ROWS), weight=randn(200)))
case(
    "Liger layer_norm",
    liger("layer_norm", "LayerNorm", 1e-6),
    lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6),
    lambda: dict(x=randn(*ROWS), weight=randn(200), bias=randn(200)),
)
case(
    "Liger group_norm",
    liger("group_norm", "GroupNorm", 6, 2, 1e-6),
    lambda x, weight, bias: F.group_norm(x, 2, weight, bias, 1e-6),
    lambda: dict(x=randn(3, 6, 40), weight=randn(6), bias=randn(6)),
)
case(
    "Liger fused_add_rms_norm",
    liger("fused_add_rms_norm", "FusedAddRMSNorm", 1e-6),
    lambda x, residual, weight: (_rms_norm(x + residual, weight), x + residual),
    lambda: dict(x=randn(*ROWS), residual=randn(*ROWS), weight=randn(200)),
)
case(
    "Liger poly_norm",
    liger("poly_norm", "PolyNorm", 1e-6, False),
    _poly_norm,
    lambda: dict(x=randn(*ROWS), weight=randn(3), bias=randn()),
)
case(
    "Liger swiglu", liger("swiglu", "SiLUMul"), lambda a, b: F.silu(a) * b, lambda: dict(a=randn(*ROWS), b=randn(*ROWS))
)
case(
    "Liger geglu",
    liger("geglu", "GELUMul"),
    lambda a, b: F.gelu(a, approximate="tanh") * b,
    lambda: dict(a=randn(*ROWS), b=randn(*ROWS)),
)
case("Liger relu_squared", liger("relu_squared", "ReLUSquared"), lambda x: x.relu() ** 2, lambda: dict(x=randn(*ROWS)))
case("Liger softmax", liger("softmax", "Softmax"), lambda x: x.softmax(-1), lambda: dict(x=randn(5, 300)))
case("Liger sparsemax", liger("sparsemax", "Sparsemax", -1), _sparsemax, lambda: dict(x=randn(5, 60)))
case(
    "Liger cross_entropy",
    liger("cross_entropy", "CrossEntropy", None, -100, 1e-3, 0.1, "mean", None, False, first=True),
    _cross_entropy,
    lambda: dict(x=randn(7, 300), target=_targets()),
)
case(
    "Liger fused_linear_cross_entropy",
    liger("fused_linear_cross_entropy", "FusedLinearCrossEntropy", first=True),
    lambda x, weight, target: F.cross_entropy(x @ weight.T, target),
    lambda: dict(x=randn(7, 32), weight=randn(300, 32), target=_targets()),
)
case(
    "Liger kl_div",
    liger("kl_div", "KLDivLoss", "batchmean", False, 1e-10),
    lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    lambda: dict(x=_log_probabilities().requires_grad_(), y=_log_probabilities().exp()),
)
case(
    "Liger jsd",
    liger("jsd", "JSD", None, 0.5, -100),
    _jsd,
    lambda: dict(x=_log_probabilities().requires_grad_(), y=_log_probabilities()),
)
case(
    "Liger tvd",
    liger("tvd", "TVDLoss", None, "batchmean", -100),
    lambda p, q: (p - q).abs().sum() / 2 / p.shape[0],
    lambda: dict(p=_log_probabilities().exp().requires_grad_(), q=_log_probabilities().exp()),
)
case("Liger rope", liger("rope", "Rope"), _rope, _rope_inputs)


# flash-linear-attention


def fla(package: str, name: str, **options: Any) -> Callable[..., Any]:
    def op(**inputs: Tensor) -> Any:
        result = imported(f"fla.{package}", name)(**inputs, **options)
        return result[0] if isinstance(result, tuple) else result

    return op


def naive(package: str, name: str, *, heads_first: bool = False, **options: Any) -> Callable[..., Any]:
    """The package's own reference."""

    def reference(**inputs: Tensor) -> Any:
        given = {n: x.transpose(1, 2) for n, x in inputs.items()} if heads_first else inputs
        result = imported(f"fla.ops.{package}.naive", name)(**given, **options)
        result = result[0] if isinstance(result, tuple) else result
        return result.transpose(1, 2) if heads_first else result

    return reference


def _qkv(T: int = 80, H: int = 2, D: int = 32) -> dict[str, Tensor]:
    return {name: randn(1, T, H, D) for name in "qkv"}


def _decayed(*shape: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: _qkv() | dict(g=F.logsigmoid(torch.randn(1, 80, 2, *shape)).requires_grad_())


def _deltas(*, gated: bool) -> dict[str, Tensor]:
    inputs = _qkv(T=64)
    inputs["k"] = F.normalize(inputs["k"].detach(), dim=-1).requires_grad_()
    inputs["beta"] = torch.rand(1, 64, 2).requires_grad_()
    return inputs | (dict(g=F.logsigmoid(torch.randn(1, 64, 2)).requires_grad_()) if gated else {})


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhts,bshd->bthd", scores.tril(), v)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _hgrn() -> dict[str, Tensor]:
    return dict(x=randn(1, 80, 64), g=F.logsigmoid(torch.randn(1, 80, 64)).requires_grad_())


for _name in ("chunk_linear_attn", "fused_recurrent_linear_attn", "fused_chunk_linear_attn"):
    case(f"FLA {_name}", fla("ops.linear_attn", _name, normalize=False), _linear, _qkv)
for _name in ("chunk_retention", "fused_recurrent_retention", "parallel_retention"):
    case(f"FLA {_name}", fla("ops.retention", _name), naive("retention", "naive_retention", heads_first=True), _qkv)
for _name in ("chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"):
    reference = naive("simple_gla", "naive_recurrent_simple_gla")
    case(f"FLA {_name}", fla("ops.simple_gla", _name), reference, _decayed())
for _name in ("chunk_gla", "fused_recurrent_gla"):
    gate = "g" if _name == "chunk_gla" else "gk"
    case(
        f"FLA {_name}",
        lambda g, _name=_name, gate=gate, **inputs: fla("ops.gla", _name)(**inputs, **{gate: g}),
        lambda g, **inputs: naive("gla", "naive_recurrent_gla")(**inputs, gk=g),
        _decayed(32),
    )
case(  # the chunked one refuses float32
    "FLA fused_recurrent_delta_rule",
    fla("ops.delta_rule", "fused_recurrent_delta_rule"),
    naive("delta_rule", "delta_rule_recurrence", heads_first=True),
    lambda: _deltas(gated=False),
)
reference = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
case(
    "FLA chunk_gated_delta_rule",
    fla("ops.gated_delta_rule", "chunk_gated_delta_rule"),
    reference,
    lambda: _deltas(gated=True),
)
case(  # it has no backward
    "FLA fused_recurrent_gated_delta_rule",
    fla("ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    reference,
    lambda: {name: x.detach() for name, x in _deltas(gated=True).items()},
)
for _name in ("chunk_hgrn", "fused_recurrent_hgrn"):
    case(f"FLA {_name}", fla("ops.hgrn", _name), naive("hgrn", "naive_recurrent_hgrn"), _hgrn)
case(
    "FLA parallel_attn",
    fla("ops.attn", "parallel_attn"),
    _attention,
    _qkv,
)
case(
    "FLA parallel_forgetting_attn",
    fla("ops.forgetting_attn", "parallel_forgetting_attn"),
    naive("forgetting_attn", "naive_forgetting_attn"),
    _decayed(),
)
case(
    "FLA l2_norm",
    fla("modules.norm.l2norm", "l2_norm"),
    lambda x: F.normalize(x, dim=-1),
    lambda: dict(x=randn(30, 64)),
)
case(
    "FLA chunk_local_cumsum",
    fla("ops.utils", "chunk_local_cumsum", chunk_size=16),
    lambda g: g.unflatten(1, (-1, 16)).cumsum(2).flatten(1, 2),
    lambda: dict(g=torch.randn(2, 80, 3)),
)
case(
    "FLA chunk_global_cumsum",
    fla("ops.utils", "chunk_global_cumsum"),
    lambda s: s.cumsum(1),
    lambda: dict(s=torch.randn(2, 80, 3)),
)
