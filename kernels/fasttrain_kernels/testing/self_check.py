"""The self-check: every op forward and backward against its reference, as a table.

    python -m fasttrain_kernels.testing.self_check

On a GPU the Triton kernels run there; without one, in the interpreter. CPU implementations are checked too. The exit
code is 1 if an op is out of tolerance (see fasttrain_kernels.testing.accuracy).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import fasttrain_kernels as ft
from fasttrain_kernels.ops.attention.reference import visible_keys
from fasttrain_kernels.testing.accuracy import Comparison, compare


@dataclass(frozen=True)
class SelfCheckCase:
    """One op with its inputs in the self-check."""

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    eager: Callable[..., Any]  # as one would write it in PyTorch: its error sets the tolerance
    inputs: Callable[[Callable[..., Tensor]], dict[str, Any]]  # from a maker of random tensors


def _eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, 1e-6), total


def _rotary(randn: Callable[..., Tensor]) -> dict[str, Any]:
    q = randn(2, 24, 4, 64)
    cos, sin = ft.rotary_table(24, 64, device=q.device)
    return dict(q=q, k=randn(2, 24, 2, 64), q_weight=randn(64), k_weight=randn(64), cos=cos, sin=sin)


def _eager_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        first, second = F.rms_norm(x, x.shape[-1:], weight, 1e-6).chunk(2, dim=-1)
        c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    return rotated(q, q_weight), rotated(k, k_weight)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _documents(randn: Callable[..., Tensor]) -> dict[str, Any]:
    q, k, v = randn(1, 96, 6, 32), randn(1, 96, 2, 32), randn(1, 96, 2, 32)
    return dict(q=q, k=k, v=v, cu_seqlens=torch.tensor([0, 37, 38, 96], dtype=torch.int32, device=q.device), window=24)


def _eager_attention(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    query, key, value = q.transpose(1, 2), *(x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    visible = visible_keys(q.shape[1], k.shape[1], True, window, cu_seqlens, q.device)
    scores = (query @ key.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def _head(randn: Callable[..., Tensor]) -> dict[str, Any]:
    hidden = randn(24, 64)
    target = torch.arange(24, device=hidden.device) * 41 % 1000
    return dict(hidden=hidden, weight=randn(1000, 64), target=target, z_loss=1e-4)


def _eager_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, z_loss: float) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, target) + z_loss * logits.logsumexp(-1).square().mean()


def _eager_swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weight)


CASES = [
    SelfCheckCase(
        "rms_norm",
        ft.rms_norm,
        ft.rms_norm_reference,
        lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6),
        lambda randn: dict(x=randn(32, 512), weight=randn(512)),
    ),
    SelfCheckCase(
        "add_rms_norm",
        ft.add_rms_norm,
        ft.add_rms_norm_reference,
        _eager_add_rms_norm,
        lambda randn: dict(x=randn(32, 512), residual=randn(32, 512), weight=randn(512)),
    ),
    SelfCheckCase("qk_norm_rope", ft.qk_norm_rope, ft.qk_norm_rope_reference, _eager_qk_norm_rope, _rotary),
    SelfCheckCase(
        "attention, causal",
        ft.attention,
        ft.attention_reference,
        _sdpa,
        lambda randn: dict(q=randn(2, 80, 4, 32), k=randn(2, 80, 2, 32), v=randn(2, 80, 2, 32)),
    ),
    SelfCheckCase("attention, documents", ft.attention, ft.attention_reference, _eager_attention, _documents),
    SelfCheckCase(
        "linear_cross_entropy",
        ft.linear_cross_entropy,
        ft.linear_cross_entropy_reference,
        _eager_linear_cross_entropy,
        _head,
    ),
    SelfCheckCase(
        "swiglu",
        ft.swiglu,
        ft.swiglu_reference,
        lambda gate, up: F.silu(gate) * up,
        lambda randn: dict(gate=randn(32, 1024), up=randn(32, 1024)),
    ),
    SelfCheckCase(
        "swiglu_linear",
        ft.swiglu_linear,
        ft.swiglu_linear_reference,
        _eager_swiglu_linear,
        lambda randn: dict(gate_up=randn(32, 512), weight=randn(64, 256)),
    ),
]


@dataclass(frozen=True)
class Implementation:
    """A way to run the ops: device, dtype, and the context around the call."""

    name: str
    device: str
    dtype: torch.dtype
    context: Callable[[], contextlib.AbstractContextManager[Any]]


def implementations() -> Iterator[Implementation]:
    """All implementations that this machine can run."""
    if not torch.cuda.is_available():
        from fasttrain_kernels.testing.interpreter import interpret

        yield Implementation("Triton", "cpu", torch.bfloat16, interpret)
        yield Implementation("Triton", "cpu", torch.float32, interpret)
    yield from training_implementations()


def training_implementations() -> Iterator[Implementation]:
    """The implementations that training uses here: nothing is interpreted, and no extra is needed."""
    if torch.cuda.is_available():
        for dtype in (torch.bfloat16, torch.float32):
            yield Implementation("Triton", "cuda", dtype, contextlib.nullcontext)
    yield Implementation("CPU", "cpu", torch.float32, contextlib.nullcontext)


def run(case: SelfCheckCase, implementation: Implementation) -> list[Comparison]:
    """Compare outputs and gradients of the op with its reference."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(implementation.device, implementation.dtype).requires_grad_()

    with implementation.context():
        return compare(case.op, case.reference, case.inputs(randn), eager=case.eager)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every op forward and backward against its reference.")
    parser.add_argument("--op", action="append", metavar="NAME", help="only ops whose name contains NAME; repeatable")
    wanted = parser.parse_args(argv).op
    cases = [case for case in CASES if not wanted or any(name in case.name for name in wanted)]
    if not cases:
        parser.error(f"no op is called {', '.join(wanted)}; there are {', '.join(case.name for case in CASES)}")
    console = Console()
    table = Table(title="Max error (share of tolerance)", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in ("op", "impl", "dtype", "forward", "gradients", "result"):
        table.add_column(column, justify="right" if column in ("forward", "gradients") else "left", no_wrap=True)
    failed = 0
    pairs = [(case, implementation) for case in cases for implementation in implementations()]
    for i, (case, implementation) in enumerate(track(pairs, "comparing", console=console, transient=True)):
        results = run(case, implementation)
        failed += (ok := all(c.ok for c in results)) is False
        outputs = [c for c in results if c.name.startswith("output")]
        gradients = [c for c in results if c not in outputs]
        table.add_row(
            case.name if i == 0 or pairs[i - 1][0] is not case else "",
            implementation.name,
            _SHORT[implementation.dtype],
            _share(outputs),
            _share(gradients),
            "[green]OK" if ok else "[red]FAILED",
            end_section=i + 1 == len(pairs) or pairs[i + 1][0] is not case,
        )
    console.print(table)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreted on the CPU: there is no GPU"
    console.print(
        f"Triton kernels ({where}) and CPU implementations against their references in float64. The tolerance is twice "
        "the error of eager PyTorch in the same dtype, plus one rounding. "
        + ("[green]All ops OK." if not failed else f"[red]{failed} of {len(pairs)} comparisons failed.")
    )
    return 1 if failed else 0


_SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _share(comparisons: list[Comparison]) -> str:
    worst = max(comparisons, key=lambda c: c.error / c.tolerance)
    return f"{worst.error:.0e} ({worst.error / worst.tolerance:4.0%})"


if __name__ == "__main__":
    sys.exit(main())
