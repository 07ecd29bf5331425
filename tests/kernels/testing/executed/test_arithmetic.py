import itertools
import math
import operator
import re
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain_kernels.testing import Unsupported
from fasttrain_kernels.testing.executed.arithmetic import TABLE
from tests.kernels.testing.executed.written import address, compute, run

BIG, SMALL = 2**31 - 1, -(2**31)
F32_MAX = torch.finfo(torch.float32).max
TINY = 2.0**-149  # subnormal
NAN, INF = math.nan, math.inf

CASES: list[Any] = [
    # opcode, result, sources, operands ..., expected
    ("add.s32", "s32", ["s32", "s32"], [BIG, -5], [1, 3], [SMALL, -2]),
    ("add.u64", "u64", ["u64", "u64"], [2**64 - 1], [2], [1]),
    ("sub.s32", "s32", ["s32", "s32"], [SMALL, 7], [1, 9], [BIG, -2]),
    ("mul.lo.s32", "s32", ["s32", "s32"], [65536, -3], [65536, 7], [0, -21]),
    ("mul.hi.s32", "s32", ["s32", "s32"], [SMALL, -1], [2, 1], [-1, -1]),
    ("mul.hi.u32", "u32", ["u32", "u32"], [2**32 - 1], [2**32 - 1], [2**32 - 2]),
    ("mul.hi.u64", "u64", ["u64", "u64"], [2**64 - 1, 2**33 + 5], [2**64 - 1, 2**40 + 3], [2**64 - 2, 512]),
    ("mul.hi.s64", "s64", ["s64", "s64"], [-1, -(2**63)], [1, 2], [-1, -1]),
    ("mul.wide.s16", "s32", ["s16", "s16"], [-300], [300], [-90000]),
    ("mul.wide.u32", "u64", ["u32", "u32"], [2**32 - 1], [2**32 - 1], [(2**32 - 1) ** 2]),
    ("mad.lo.s32", "s32", ["s32", "s32", "s32"], [3, BIG], [-4, 2], [5, 0], [-7, -2]),
    ("mad.wide.u16", "u32", ["u16", "u16", "u32"], [65535], [65535], [1], [65535**2 + 1]),
    ("mad.wide.s32", "s64", ["s32", "s32", "s64"], [SMALL], [2], [-1], [-(2**32) - 1]),
    ("div.s32", "s32", ["s32", "s32"], [-7, 7, -7, 5], [2, -2, -2, 0], [-3, -3, 3, -1]),
    ("div.u32", "u32", ["u32", "u32"], [7, 7], [2, 0], [3, 2**32 - 1]),
    ("rem.s32", "s32", ["s32", "s32"], [-7, 7, -7], [2, -2, 4], [-1, 1, -3]),
    ("min.s32", "s32", ["s32", "s32"], [-1, 4], [1, 3], [-1, 3]),
    ("max.u32", "u32", ["u32", "u32"], [-1, 4], [1, 3], [2**32 - 1, 4]),
    ("min.relu.s32", "s32", ["s32", "s32"], [-1, 4], [1, 3], [0, 3]),
    ("max.relu.s32", "s32", ["s32", "s32"], [-1, 4], [-3, 3], [0, 4]),
    ("neg.s32", "s32", ["s32"], [5, SMALL], [-5, SMALL]),
    ("abs.s32", "s32", ["s32"], [-5, 6], [5, 6]),
    ("and.b32", "b32", ["b32", "b32"], [0b1100], [0b1010], [0b1000]),
    ("or.b64", "b64", ["b64", "b64"], [1 << 40], [1], [(1 << 40) + 1]),
    ("xor.b16", "b16", ["b16", "b16"], [0xFF00], [0x0FF0], [0xF0F0]),
    ("xor.pred", "pred", ["pred", "pred"], [1, 1], [1, 0], [False, True]),
    ("not.b32", "b32", ["b32"], [0xF], [0xFFFFFFF0]),
    ("not.pred", "pred", ["pred"], [1, 0], [False, True]),
    ("lop3.b32", "b32", ["b32", "b32", "b32", "#0x96"], [0b1100], [0b1010], [0b1001], [], [0b1111]),
    ("prmt.b32", "b32", ["b32", "b32", "b32"], [0x33221100], [0x77665544], [0x7531], [0x77553311]),
    ("prmt.b32", "b32", ["b32", "b32", "b32"], [0x000000F1], [0], [0x8880], [0xFFFFFFF1]),
    ("shl.b32", "b32", ["b32", "b32"], [3, 3, 3], [4, 31, 32], [48, 1 << 31, 0]),
    ("shr.u32", "u32", ["u32", "b32"], [0x80000000, 5], [31, 40], [1, 0]),
    ("shr.s32", "s32", ["s32", "b32"], [-8, -8], [1, 40], [-4, -1]),
    ("shf.l.wrap.b32", "b32", ["b32", "b32", "b32"], [0x80000001], [0x2], [33], [0x5]),
    ("shf.r.wrap.b32", "b32", ["b32", "b32", "b32"], [0x80000001], [0x2], [4], [0x28000000]),
    ("shf.l.clamp.b32", "b32", ["b32", "b32", "b32"], [7], [1], [40], [7]),
    ("shf.r.clamp.b32", "b32", ["b32", "b32", "b32"], [7], [1], [40], [1]),
    ("bfe.u32", "u32", ["u32", "b32", "b32"], [0xABCD1234, 5], [8, 0], [8, 0], [0x12, 0]),
    ("bfe.u64", "u64", ["u64", "b32", "b32"], [0xF << 60, 7], [60, 0], [8, 64], [0xF, 7]),
    ("bfe.s64", "s64", ["s64", "b32", "b32"], [1 << 40, -8], [40, 2], [1, 70], [-1, -2]),
    ("bfe.s32", "s32", ["s32", "b32", "b32"], [0x00000F00, 0x7FFFFFFF, -5], [8, 31, 0], [3, 4, 0], [-1, 0, 0]),
    ("bfe.s32", "s32", ["s32", "b32", "b32"], [0x0000F000], [12], [4], [-1]),
    ("bfi.b32", "b32", ["b32", "b32", "b32", "b32"], [0xF], [0], [8], [2], [0x300]),
    ("popc.b32", "u32", ["b32"], [0xF0F, 0], [8, 0]),
    ("clz.b32", "u32", ["b32"], [1, 0, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFF], [31, 32, 0, 0, 1]),
    ("brev.b32", "b32", ["b32"], [1, 0x80000000, 6], [0x80000000, 1, 0x60000000]),
    ("add.f32", "f32", ["f32", "f32"], [1.0, TINY], [2.0**-24, TINY], [1.0, 2 * TINY]),
    ("add.ftz.f32", "f32", ["f32", "f32"], [TINY, 1.0], [TINY, TINY], [0.0, 1.0]),
    ("add.rn.f16", "f16", ["f16", "f16"], [2048.0, 65504.0], [1.0, 100.0], [2048.0, INF]),
    ("add.rn.bf16x2", "bf16x2", ["bf16x2", "bf16x2"], [(256.0, 1.0)], [(1.0, 2.0)], [(256.0, 3.0)]),
    ("add.f32.bf16", "f32", ["bf16", "f32"], [1.5], [0.25], [1.75]),
    ("add.rn.f32x2", "f32x2", ["f32x2", "f32x2"], [(1.0, 2.0)], [(0.5, 0.25)], [(1.5, 2.25)]),
    ("add.f64", "f64", ["f64", "f64"], [1.0], [2.0**-52], [1.0 + 2.0**-52]),
    ("sub.f32", "f32", ["f32", "f32"], [1.0], [3.0], [-2.0]),
    ("sub.f32.f16", "f32", ["f16", "f32"], [1.5], [0.25], [1.25]),
    ("mul.rn.f32", "f32", ["f32", "f32"], [F32_MAX, 3.0], [2.0, -0.5], [INF, -1.5]),
    ("mul.bf16", "bf16", ["bf16", "bf16"], [1.0078125], [1.0078125], [1.015625]),
    ("fma.rn.f32", "f32", ["f32", "f32", "f32"], [1 + 2.0**-12], [1 + 2.0**-12], [-1 - 2.0**-11], [2.0**-24]),
    ("fma.rn.ftz.f32", "f32", ["f32", "f32", "f32"], [TINY], [2.0], [1.0], [1.0]),
    ("fma.rn.bf16", "bf16", ["bf16", "bf16", "bf16"], [1.0078125], [1.0], [2.0**-8 + 2.0**-15], [1.015625]),
    ("fma.rn.f16x2", "f16x2", ["f16x2"] * 3, [(2.0, 3.0)], [(4.0, 5.0)], [(1.0, 2.0)], [(9.0, 17.0)]),
    ("fma.rn.f32.bf16", "f32", ["bf16", "bf16", "f32"], [1.5], [1.5], [0.25], [2.5]),
    ("div.rn.f32", "f32", ["f32", "f32"], [1.0, 1.0], [3.0, 0.0], [float(np.float32(1) / np.float32(3)), INF]),
    ("div.full.f32", "f32", ["f32", "f32"], [1.0], [4.0], [0.25]),
    ("sqrt.rn.f32", "f32", ["f32"], [2.0], [float(np.sqrt(np.float32(2)))]),
    ("rcp.rn.f32", "f32", ["f32"], [3.0], [float(np.float32(1) / np.float32(3))]),
    ("min.f32", "f32", ["f32", "f32"], [NAN, 1.0], [2.0, -1.0], [2.0, -1.0]),
    ("min.f32", "f32", ["f32", "f32", "f32"], [3.0], [2.0], [1.0], [1.0]),
    ("max.f32", "f32", ["f32", "f32"], [NAN, 1.0], [2.0, -1.0], [2.0, 1.0]),
    ("max.f32", "f32", ["f32", "f32", "f32"], [3.0], [5.0], [1.0], [5.0]),
    ("min.NaN.f32", "f32", ["f32", "f32"], [NAN, 1.0], [2.0, -1.0], [NAN, -1.0]),
    ("max.NaN.bf16x2", "bf16x2", ["bf16x2", "bf16x2"], [(1.0, NAN)], [(2.0, 1.0)], [(2.0, NAN)]),
    ("neg.f32", "f32", ["f32"], [1.0, -INF], [-1.0, INF]),
    ("neg.bf16x2", "bf16x2", ["bf16x2"], [(1.0, -2.0)], [(-1.0, 2.0)]),
    ("abs.f32", "f32", ["f32"], [-1.0], [1.0]),
    ("abs.ftz.f32", "f32", ["f32"], [-TINY], [0.0]),
    ("copysign.f32", "f32", ["f32", "f32"], [-1.0], [3.0], [-3.0]),
    ("cvt.s32.s8", "s32", ["s8"], [-1], [-1]),
    ("cvt.u16.u32", "u16", ["u32"], [0x12345], [0x2345]),
    ("cvt.s64.s32", "s64", ["s32"], [-7], [-7]),
    ("cvt.rn.f32.s32", "f32", ["s32"], [2**24 + 1, -3], [2.0**24, -3.0]),
    ("cvt.rn.bf16.f32", "bf16", ["f32"], [1.00390625, 1.01171875, NAN], [1.0, 1.015625, NAN]),
    ("cvt.rn.f16.f32", "f16", ["f32"], [2049.0, 70000.0], [2048.0, INF]),
    ("cvt.rz.bf16.f32", "bf16", ["f32"], [1.0117, -1.0117, 3.0], [1.0078125, -1.0078125, 3.0]),
    ("cvt.rz.f16.f32", "f16", ["f32"], [2049.0, -2051.0, 70000.0, INF], [2048.0, -2050.0, 65504.0, INF]),
    ("cvt.f32.bf16", "f32", ["bf16"], [1.5], [1.5]),
    ("cvt.f64.f32", "f64", ["f32"], [0.1], [float(np.float32(0.1))]),
    ("cvt.rn.f32.f64", "f32", ["f64"], [0.1], [float(np.float32(0.1))]),
    ("cvt.rn.bf16x2.f32", "bf16x2", ["f32", "f32"], [1.0], [2.0], [(2.0, 1.0)]),
    ("cvt.rn.relu.f16.f32", "f16", ["f32"], [-1.0, 2.0], [0.0, 2.0]),
    ("cvt.rn.satfinite.e4m3x2.f32", "e4m3x2", ["f32", "f32"], [1000.0], [0.3], [(0.3125, 448.0)]),
    ("cvt.rn.satfinite.e5m2x2.f16x2", "e5m2x2", ["f16x2"], [(3.0, 65504.0)], [(3.0, 57344.0)]),
    ("cvt.rn.f16x2.e4m3x2", "f16x2", ["e4m3x2"], [(0.3125, -448.0)], [(0.3125, -448.0)]),
    ("cvt.rna.tf32.f32", "f32", ["f32"], [1 + 2.0**-11, 1 + 2.0**-12], [1 + 2.0**-10, 1.0]),
    ("selp.b32", "b32", ["b32", "b32", "pred"], [1, 1], [2, 2], [1, 0], [1, 2]),
    ("testp.finite.f32", "pred", ["f32"], [1.0, INF, NAN], [True, False, False]),
    ("setp.lt.and.f32", "pred", ["f32", "f32", "pred"], [1.0, 1.0], [2.0, 2.0], [1, 0], [True, False]),
]
ROUNDINGS: dict[str, Any] = {"rzi": math.trunc, "rni": round, "rmi": math.floor, "rpi": math.ceil}
for _rounding, _function in ROUNDINGS.items():
    _values = [2.5, -2.5, 3.5, -0.75, 7.0]
    CASES.append((f"cvt.{_rounding}.f32.f32", "f32", ["f32"], _values, [float(_function(x)) for x in _values]))
    for _kind in ("s32", "s64", "u32", "u64", "s16", "u16"):
        _low, _high = (0, 2 ** int(_kind[1:]) - 1) if _kind[0] == "u" else (-(2 ** (int(_kind[1:]) - 1)), 2**15 - 1)
        _expected = [max(_low, _function(x)) for x in _values]
        CASES.append((f"cvt.{_rounding}.{_kind}.f32", _kind, ["f32"], _values, _expected))
COMPARE: dict[str, Any] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
PAIRS = list(itertools.product([-1.0, 2.0, NAN, INF], repeat=2))
for _name, _compare in COMPARE.items():
    _a, _b = ([p[i] for p in PAIRS] for i in (0, 1))
    _ordered = [a == a and b == b for a, b in PAIRS]
    _expected = [bool(_compare(a, b)) for a, b in PAIRS]
    CASES.append(
        (
            f"setp.{_name}.f32",
            "pred",
            ["f32", "f32"],
            _a,
            _b,
            [e and o for e, o in zip(_expected, _ordered, strict=True)],
        )
    )
    CASES.append(
        (
            f"setp.{_name}u.bf16",
            "pred",
            ["bf16", "bf16"],
            _a,
            _b,
            [e or not o for e, o in zip(_expected, _ordered, strict=True)],
        )
    )
    _x, _y = [-1, 3, 5, 5], [1, -3, 5, 6]
    CASES.append(
        (
            f"setp.{_name}.s32",
            "pred",
            ["s32", "s32"],
            _x,
            _y,
            [bool(_compare(a, b)) for a, b in zip(_x, _y, strict=True)],
        )
    )
    _x, _y = [-1, 3], [1, 5]
    _expected = [bool(_compare(a % 2**32, b)) for a, b in zip(_x, _y, strict=True)]
    CASES.append((f"setp.{_name}.u32", "pred", ["u32", "u32"], _x, _y, _expected))
CASES += [
    ("setp.num.f32", "pred", ["f32", "f32"], [1.0, NAN], [2.0, 2.0], [True, False]),
    ("setp.nan.f32", "pred", ["f32", "f32"], [1.0, NAN], [2.0, 2.0], [False, True]),
    ("setp.lo.u32", "pred", ["u32", "u32"], [1, -1], [2, 2], [True, False]),
    ("setp.ls.u32", "pred", ["u32", "u32"], [2, -1], [2, 2], [True, False]),
    ("setp.hi.u32", "pred", ["u32", "u32"], [1, -1], [2, 2], [False, True]),
    ("setp.hs.u32", "pred", ["u32", "u32"], [2, 1], [2, 2], [True, False]),
]


@pytest.mark.parametrize(("opcode", "case"), [(case[0], case[1:]) for case in CASES])
def test_an_instruction_computes_what_the_manual_says(opcode, case):
    result, sources, *operands, expected = case
    got = compute(opcode, result, sources, *operands)
    assert len(got) == len(expected)
    np.testing.assert_array_equal(np.array(got), np.array(expected))


def test_every_row_of_the_table_is_tested():
    """Of the rows that differ by rounding, relation and type in a loop, one for each."""
    tested = [re.sub(r"\.ftz", "", case[0]) for case in CASES]
    looped = re.compile(r"setp\\\.\w+\\\.(and|or|xor)|cvt\\\.r[zmnp]i\\\.[us]8")
    missing = [row[0] for row in TABLE if not looped.match(row[0]) and not any(re.fullmatch(row[0], t) for t in tested)]
    assert missing == []


FUNCTIONS: dict[str, Any] = {
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x,
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_approximations_are_exact_or_as_wrong_as_the_manual_allows(name):
    x = [0.3, 0.75, 1.7, 6.25]
    exact = FUNCTIONS[name](np.array(x, np.float32).astype(np.float64))
    good = np.array(compute(f"{name}.approx.f32", "f32", ["f32"], x))
    bad = np.array(compute(f"{name}.approx.f32", "f32", ["f32"], x, worst_case=True))
    allowed = {"lg2": np.maximum(np.abs(exact), 1), "sin": 2**1.5, "cos": 2**1.5, "tanh": 2**11 * np.abs(exact)}
    limit = 2**-22 * allowed.get(name, np.abs(exact))
    assert np.all(np.abs(good - exact) <= 2**-24 * np.abs(exact))
    assert np.all(np.abs(bad - exact) <= limit + 2**-24 * np.abs(exact))  # and its rounding
    assert np.all(bad != good)


def test_an_approximation_of_zero_is_what_the_manual_says():
    assert compute("ex2.approx.ftz.f32", "f32", ["f32"], [0.0, -TINY], worst_case=True) == [1.0, 1.0]


def test_worst_errors_are_functions_of_the_value():
    got = compute("ex2.approx.f32", "f32", ["f32"], [0.7] * 32, worst_case=True)
    assert len(set(got)) == 1


@pytest.mark.parametrize(
    "opcode", ["add.sat.f32", "fma.rz.f32", "fma.rn.f64", "cvt.rz.f32.f64", "mul.hi.f32", "foo.b32"]
)
def test_a_spelling_without_a_rule_is_refused_with_its_line(opcode):
    with pytest.raises(Unsupported, match=rf"{opcode} \(PTX line \d+"):
        compute(opcode, "f32", ["f32", "f32"], [1.0], [2.0])


def test_halves_are_compared_into_two_predicates():
    out = torch.zeros(32, dtype=torch.int32)
    run(
        "mov.b32 %r1, 0x40A03F80; mov.b32 %r2, 0x40404000;"  # bf16x2: (1, 5) and (2, 3)
        "setp.lt.bf16x2 %p0|%p1, %r1, %r2;"
        "selp.b32 %r3, 1, 0, %p0; selp.b32 %r4, 2, 0, %p1; or.b32 %r3, %r3, %r4;"
        + address("%in0") + "st.global.b32 [%rd0], %r3;", out,
    )  # fmt: skip
    assert out.unique().tolist() == [1]
