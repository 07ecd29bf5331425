"""A tour of the ops: each one forward and backward against its reference, as a table.

    python -m fasttrain_kernels.testing.tour

On a GPU the Triton kernels run there. Without one, they run in the interpreter, and the CPU forms beside them. The exit
code is 1 if an op is less accurate than eager PyTorch allows (see fasttrain_kernels.testing.accuracy).
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
from fasttrain_kernels.attention.reference import visible_keys
from fasttrain_kernels.testing.accuracy import Comparison, compare


@dataclass(frozen=True)
class Case:
    """One op with the inputs that the tour gives it."""

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    eager: Callable[..., Any]  # as one would write it in PyTorch: the measure of the error
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


CASES = [
    Case(
        "rms_norm",
        ft.rms_norm,
        ft.rms_norm_reference,
        lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6),
        lambda randn: dict(x=randn(32, 512), weight=randn(512)),
    ),
    Case(
        "add_rms_norm",
        ft.add_rms_norm,
        ft.add_rms_norm_reference,
        _eager_add_rms_norm,
        lambda randn: dict(x=randn(32, 512), residual=randn(32, 512), weight=randn(512)),
    ),
    Case("qk_norm_rope", ft.qk_norm_rope, ft.qk_norm_rope_reference, _eager_qk_norm_rope, _rotary),
    Case(
        "attention, causal",
        ft.attention,
        ft.attention_reference,
        _sdpa,
        lambda randn: dict(q=randn(2, 80, 4, 32), k=randn(2, 80, 2, 32), v=randn(2, 80, 2, 32)),
    ),
    Case("attention, documents", ft.attention, ft.attention_reference, _eager_attention, _documents),
    Case(
        "linear_cross_entropy",
        ft.linear_cross_entropy,
        ft.linear_cross_entropy_reference,
        _eager_linear_cross_entropy,
        _head,
    ),
    Case(
        "swiglu",
        ft.swiglu,
        ft.swiglu_reference,
        lambda gate, up: F.silu(gate) * up,
        lambda randn: dict(gate=randn(32, 1024), up=randn(32, 1024)),
    ),
]


@dataclass(frozen=True)
class Form:
    """A way to run the ops: where, in which dtype, and inside which context."""

    name: str
    device: str
    dtype: torch.dtype
    context: Callable[[], contextlib.AbstractContextManager[Any]]


def forms() -> Iterator[Form]:
    """The forms that this machine can run."""
    if not torch.cuda.is_available():
        from fasttrain_kernels.testing.interpreter import interpret

        yield Form("Triton", "cpu", torch.bfloat16, interpret)
        yield Form("Triton", "cpu", torch.float32, interpret)
    yield from forms_of_a_run()


def forms_of_a_run() -> Iterator[Form]:
    """Those that training uses here: nothing is interpreted, and no extra is needed."""
    if torch.cuda.is_available():
        for dtype in (torch.bfloat16, torch.float32):
            yield Form("Triton", "cuda", dtype, contextlib.nullcontext)
    yield Form("CPU", "cpu", torch.float32, contextlib.nullcontext)


def run(case: Case, form: Form) -> list[Comparison]:
    """The op in this form against its reference: outputs and gradients."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(form.device, form.dtype).requires_grad_()

    with form.context():
        return compare(case.op, case.reference, case.inputs(randn), eager=case.eager)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every op forward and backward against its reference.")
    parser.add_argument("--op", action="append", metavar="NAME", help="only ops whose name contains NAME; repeatable")
    wanted = parser.parse_args(argv).op
    cases = [case for case in CASES if not wanted or any(name in case.name for name in wanted)]
    if not cases:
        parser.error(f"no op is called {', '.join(wanted)}; there are {', '.join(case.name for case in CASES)}")
    console = Console()
    table = Table(
        title="Greatest error, as a share of the allowed", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    for column in ("op", "form", "dtype", "forward", "gradients", "verdict"):
        table.add_column(column, justify="right" if column in ("forward", "gradients") else "left", no_wrap=True)
    wrong = 0
    pairs = [(case, form) for case in cases for form in forms()]
    for i, (case, form) in enumerate(track(pairs, "comparing", console=console, transient=True)):
        results = run(case, form)
        wrong += (ok := all(c.ok for c in results)) is False
        outputs = [c for c in results if c.name.startswith("output")]
        gradients = [c for c in results if c not in outputs]
        table.add_row(
            case.name if i == 0 or pairs[i - 1][0] is not case else "",
            form.name,
            _SHORT[form.dtype],
            _share(outputs),
            _share(gradients),
            "[green]right" if ok else "[red]WRONG",
            end_section=i + 1 == len(pairs) or pairs[i + 1][0] is not case,
        )
    console.print(table)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreted on the CPU, for want of a GPU"
    console.print(
        f"Triton kernels ({where}) and CPU forms against their references in float64. Allowed is twice the error of "
        "eager PyTorch in the same dtype, plus one rounding. "
        + ("[green]Every op is right." if not wrong else f"[red]{wrong} of {len(pairs)} comparisons are wrong.")
    )
    return 1 if wrong else 0


_SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _share(comparisons: list[Comparison]) -> str:
    worst = max(comparisons, key=lambda c: c.error / c.allowed)
    return f"{worst.error:.0e} ({worst.error / worst.allowed:4.0%})"


if __name__ == "__main__":
    sys.exit(main())
