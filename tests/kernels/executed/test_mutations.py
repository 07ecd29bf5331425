"""Do the checks bite? Every barrier, wait, fence, guard and swizzle of compiled kernels, removed one at a time.

Each mutant ends in a report (a fault, a finding, other numbers, more bank conflicts), or is redundant: under every
schedule and poison its results and findings are those of the kernel, bit for bit. The table says how many are, and of
which kernel: a check that stops working raises a number, a kernel that changes shows where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from fasttrain_kernels import add_rms_norm, attention, rms_norm
from fasttrain_kernels.testing.accuracy import _outputs_and_gradients
from tests.kernels.executed.mutants import KINDS, mutants, outcome, recorded, survey
from tests.kernels.numbers.cases import CASES


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def _attention() -> tuple[Any, dict[str, Any]]:
    return attention, dict(q=_bf16(1, 150, 1, 64), k=_bf16(1, 150, 1, 64), v=_bf16(1, 150, 1, 64), backend="triton")


def _case(name: str) -> tuple[Any, dict[str, Any]]:
    return CASES[name].op, CASES[name].inputs(torch.bfloat16)


CALLS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "attention": _attention,
    "rms_norm": lambda: (rms_norm, dict(x=_bf16(5, 1000), weight=_bf16(1000))),
    "add_rms_norm": lambda: (add_rms_norm, dict(x=_bf16(5, 1000), residual=_bf16(5, 1000), weight=_bf16(1000))),
    "qk_norm_rope": lambda: _case("qk_norm_rope, partial, D 80"),
    "linear_cross_entropy": lambda: _case("linear_cross_entropy (7, 16, 1000)"),
    "swiglu": lambda: _case("swiglu (2, 1025)"),
}


def launches(call: str, target: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    op, inputs = CALLS[call]()
    return recorded(lambda: _outputs_and_gradients(op, inputs, 0), target, monkeypatch)


# Of each kind: mutants, and of them the redundant ones. Their reasons:
#   barrier   Triton puts one between two uses of an allocation, also where a warp only meets its own data again
#   wait      of a group, or a phase, that a later wait covers before its data are read
#   fence     one of several between a write and a matmul
#   guard     every lane is inside: no row is left out, or all lanes store the same
#   swizzle   of an address that nobody uses, or of a register that holds 0
TABLE: dict[tuple[str, str], dict[str, dict[str, tuple[int, int]]]] = {
    ("attention", "sm_80"): {
        "_attention_fwd_kernel": dict(barrier=(11, 4), guard=(9, 0), swizzle=(30, 0), wait=(4, 0)),
        "_attention_delta_kernel": dict(barrier=(12, 0), guard=(9, 2), swizzle=(8, 0)),
        "_attention_key_gradient_kernel": dict(barrier=(7, 2), guard=(22, 0), swizzle=(17, 0), wait=(3, 0)),
        "_attention_query_gradient_kernel": dict(barrier=(7, 2), guard=(16, 0), swizzle=(30, 0), wait=(4, 0)),
    },
    ("attention", "sm_90"): {
        "_attention_fwd_kernel": dict(barrier=(11, 4), fence=(4, 2), guard=(9, 0), swizzle=(4, 0), wait=(8, 1)),
        "_attention_delta_kernel": dict(barrier=(3, 0), fence=(1, 0), guard=(9, 2), swizzle=(1, 1), wait=(1, 0)),
        "_attention_key_gradient_kernel": dict(
            barrier=(7, 2), fence=(3, 2), guard=(22, 0), swizzle=(4, 0), wait=(7, 1)
        ),
        "_attention_query_gradient_kernel": dict(
            barrier=(7, 2), fence=(4, 2), guard=(16, 0), swizzle=(4, 0), wait=(10, 1)
        ),
    },
    ("attention", "sm_100"): {
        "_attention_fwd_kernel": dict(barrier=(43, 23), fence=(10, 4), guard=(65, 12), swizzle=(7, 4), wait=(34, 7)),
        "_attention_delta_kernel": dict(barrier=(7, 2), fence=(1, 0), guard=(16, 3), swizzle=(1, 1), wait=(3, 0)),
        "_attention_key_gradient_kernel": dict(
            barrier=(40, 15), fence=(15, 13), guard=(112, 20), swizzle=(5, 1), wait=(31, 8)
        ),
        "_attention_query_gradient_kernel": dict(
            barrier=(28, 5), fence=(6, 2), guard=(60, 10), swizzle=(3, 0), wait=(14, 1)
        ),
    },
    ("attention", "sm_120"): {
        "_attention_fwd_kernel": dict(barrier=(11, 4), guard=(9, 0), swizzle=(30, 0), wait=(4, 0)),
        "_attention_delta_kernel": dict(barrier=(12, 0), guard=(9, 2), swizzle=(8, 0)),
        "_attention_key_gradient_kernel": dict(barrier=(7, 2), guard=(22, 0), swizzle=(17, 0), wait=(3, 0)),
        "_attention_query_gradient_kernel": dict(barrier=(7, 2), guard=(16, 0), swizzle=(30, 0), wait=(4, 0)),
    },
    ("rms_norm", "sm_90"): {
        "_rms_norm_fwd_kernel": dict(barrier=(9, 0), guard=(49, 3), swizzle=(2, 0)),
        "_rms_norm_bwd_kernel": dict(barrier=(13, 1), guard=(71, 6), swizzle=(4, 0), wait=(2, 0)),
        "_sum_partials_kernel": dict(barrier=(2, 0), guard=(9, 0)),
    },
    ("add_rms_norm", "sm_90"): {
        "_rms_norm_fwd_kernel": dict(barrier=(11, 0), guard=(81, 6), swizzle=(2, 0)),
        "_rms_norm_bwd_kernel": dict(barrier=(14, 1), guard=(47, 6), swizzle=(6, 0), wait=(2, 0)),
        "_sum_partials_kernel": dict(barrier=(2, 0), guard=(9, 0)),
    },
    ("qk_norm_rope", "sm_90"): {
        "_qk_norm_rope_fwd_kernel": dict(guard=(28, 6)),
        "_qk_norm_rope_bwd_kernel": dict(barrier=(19, 0), guard=(24, 3), swizzle=(2, 0)),
        "_sum_partials_kernel": dict(barrier=(9, 0), guard=(18, 0)),
    },
    ("linear_cross_entropy", "sm_90"): {
        "_cross_entropy_kernel": dict(barrier=(6, 0), guard=(10, 0)),
    },
    ("swiglu", "sm_90"): {
        "_swiglu_fwd_kernel": dict(guard=(24, 0)),
        "_swiglu_bwd_kernel": dict(guard=(40, 0)),
    },
}


@pytest.mark.executed
@pytest.mark.skipif(not triton.__version__.startswith("3.7."), reason="the table is of the pinned Triton")
@pytest.mark.parametrize(("call", "target"), TABLE)
def test_every_mutant_is_reported_or_redundant(call, target, monkeypatch):
    found = {
        execution.program.kernel.name: {
            kind: (outcomes.total(), outcomes["redundant"]) for kind, outcomes in sorted(survey(execution).items())
        }
        for execution in launches(call, target, monkeypatch)
    }
    assert found == TABLE[call, target]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutant_of_each_kind_is_reported(kind, monkeypatch):
    """One of a kernel with tensor cores; and the kernel itself is not."""
    execution = launches("attention", "sm_90", monkeypatch)[-1]
    swizzle = kind == "swizzle"
    assert outcome(execution, execution.program, swizzle=swizzle) == "redundant"
    found = (mutant for one, _, mutant in mutants(execution) if one == kind)
    assert any(outcome(execution, mutant, swizzle=swizzle) != "redundant" for mutant in found)
