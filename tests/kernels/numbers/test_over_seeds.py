"""Every op in the interpreter, outputs and gradients, all dtypes, against float64; eager PyTorch is the measure.

error over seeds <= 2 x eager's error over seeds            (fasttrain_kernels.testing.accuracy)
"""

import dataclasses
from functools import partial

import pytest
import torch

from fasttrain_kernels import attention
from fasttrain_kernels.ops.attention import layout
from fasttrain_kernels.testing import assert_accurate_over_seeds, compare_over_seeds, interpret
from tests.kernels.numbers.cases import ATTENTION, CASES, DTYPES, Case


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_are_as_accurate_as_eager(case, dtype):
    """Trap 2 too: the interpreter hands out memory full of NaN, so an element that nobody writes is seen."""
    with interpret():
        assert_accurate_over_seeds(case.op, **case.arguments(dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cpu_forms_are_as_accurate_as_eager(case, dtype):
    op = partial(attention, backend="blocked") if case.op is attention else case.op
    assert_accurate_over_seeds(op, **case.arguments(dtype))


CPP = {name: case for name, case in ATTENTION.items() if "softcap" not in name and "one query" not in name}


@pytest.mark.parametrize("case", CPP.values(), ids=CPP)
def test_cpp_implementation_is_as_accurate_as_eager(case):
    assert_accurate_over_seeds(partial(attention, backend="cpp"), **case.arguments(torch.float32))


SUMS = ATTENTION | {name: CASES[name] for name in ("rms_norm (3, 1000)", "linear_cross_entropy, all options")}


@pytest.mark.parametrize("case", SUMS.values(), ids=SUMS)
def test_the_measure_is_fair(case):
    """Eager with its sums in one order, measured by the other orders: also where one rounding decides."""
    for implementation in case.eager[:2]:
        others = [other for other in case.eager if other is not implementation]
        assert_accurate_over_seeds(implementation, **case.arguments(torch.float32) | dict(eager=others))


# That it has teeth: what a kernel may do to its precision, and eager does not.


def assert_fails(case: Case, *names: str, dtype: torch.dtype = torch.float32) -> None:
    with interpret():
        found = compare_over_seeds(case.op, **case.arguments(dtype))
    assert set(names) <= {comparison.name for comparison in found if not comparison.ok}, "; ".join(map(str, found))


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("one query, outliers", ["dv"]),
        ("logits beyond 1,000", ["dv"]),
    ],
)
def test_probabilities_from_lse_fail_in_float32(case, names, monkeypatch):
    """The arithmetic of 16 bits: lse in one number, delta from out, matmuls in one chain."""
    monkeypatch.setattr(layout, "is_exact", lambda q: False)
    assert_fails(ATTENTION[case], *names)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("head dimension 64", ["output 0", "dq", "dk", "dv"]),
        ("rms_norm (7, 63)", ["output 0", "dx", "dweight"]),
        ("add_rms_norm (7, 63)", ["output 0", "output 1", "dx", "dresidual", "dweight"]),
        ("qk_norm_rope", ["output 0", "output 1", "dq", "dk", "dq_weight", "dk_weight"]),
        ("linear_cross_entropy, per token", ["output 0", "dhidden", "dweight"]),
        ("swiglu (3, 63)", ["output 0", "dgate", "dup"]),
    ],
)
def test_operands_in_bfloat16_fail(case, names, dtype):
    def narrow(**inputs):
        return op(**{n: x.bfloat16().to(x) if torch.is_tensor(x) and x.requires_grad else x for n, x in inputs.items()})

    op = CASES[case].op
    assert_fails(dataclasses.replace(CASES[case], op=narrow), *names, dtype=DTYPES[dtype])
