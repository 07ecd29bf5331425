"""Instructions that compute a register from registers, as one table.

Each row says for a spelling, whose groups are $1, $2 ...: the kind of the result, the kinds of the sources, and the
value. Kinds are decoded and encoded around it (values.py): a row for bf16x2 is a function of float32. `.ftz` needs
no rows of its own: operands and result are flushed.

Approximations are computed exactly, or with the largest error that the PTX manual allows (columns of _SPECIAL).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fasttrain_kernels.testing.executed.translate import Mask, Rule, Step, Translator, rule
from fasttrain_kernels.testing.executed.values import (
    F32,
    F64,
    I64,
    KINDS,
    U32,
    U64,
    flush,
    fma_16,
    fma_f32,
    round_tf32,
    truncated_bf16,
    truncated_f16,
)

Value = Callable[..., Any]
INTEGER = r"([us](?:16|32|64))"
NARROW = r"(bf16x2|f16x2|bf16|f16)"
FLOAT = r"(f32x2|f32|bf16x2|bf16|f16x2|f16|f64)"
_COMPARED = r"(b16|b32|b64|[us](?:16|32|64)|f16|bf16|f32|f64)"
BITS = r"(b16|b32|b64|pred)"


def _divide(a: Any, b: Any) -> Any:
    """Truncated; all ones by 0."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, a.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((a - quotient * safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, a.dtype.type(-1 if a.dtype.kind == "i" else np.iinfo(a.dtype).max), quotient)


def _remainder(a: Any, b: Any) -> Any:
    a, b = np.broadcast_arrays(a, b)
    return np.where(b == 0, a, a - _divide(a, b) * b)


def _wide(a: Any, b: Any) -> Any:
    a, b = np.asarray(a), np.asarray(b)
    double = f"{a.dtype.kind}{2 * a.dtype.itemsize}"
    return a.astype(double) * b.astype(double)


def _high(a: Any, b: Any) -> Any:
    a, b = np.broadcast_arrays(a, b)
    if a.dtype.itemsize < 8:
        return (_wide(a, b) >> (8 * a.dtype.itemsize)).astype(a.dtype)
    signed = a.dtype.kind == "i"
    return _high_64(a.view(U64), b.view(U64), a.view(I64), b.view(I64), signed).view(a.dtype)


def _high_64(a: Any, b: Any, sa: Any, sb: Any, signed: bool) -> Any:
    low, half = U64(0xFFFFFFFF), U64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    high = a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half)
    if signed:
        high = high - np.where(sa < 0, b, U64(0)) - np.where(sb < 0, a, U64(0))
    return high


def _shift(a: Any, by: Any, *, left: bool) -> Any:
    a, by = np.asarray(a), np.asarray(by)
    width = 8 * a.dtype.itemsize
    amount = np.minimum(by, width - 1).astype(a.dtype)
    shifted = np.left_shift(a, amount) if left else np.right_shift(a, amount)
    if a.dtype.kind == "i" and not left:
        return shifted  # width - 1 leaves nothing but the sign, as more would
    return np.where(by >= width, a.dtype.type(0), shifted)


def _funnel_shift(low: Any, high: Any, by: Any, *, left: bool, wrap: bool) -> Any:
    both = np.asarray(high).astype(U64) << U64(32) | np.asarray(low).astype(U64)
    amount = (np.asarray(by) & 31 if wrap else np.minimum(by, 32)).astype(U64)
    return (both << amount >> U64(32) if left else both >> amount) & U64(0xFFFFFFFF)


def _extract(a: Any, position: Any, length: Any) -> Any:
    """A field of bits; bits above the register are its sign, or 0."""
    a = np.asarray(a)
    width, unsigned = 8 * a.dtype.itemsize, np.dtype(f"u{a.dtype.itemsize}").type
    position, length = np.asarray(position) & U32(0xFF), np.asarray(length) & U32(0xFF)
    value = _shift(a, position, left=False)
    last = np.minimum(position + length - (length > 0), width - 1)
    negative = (_shift(a, last, left=False) & a.dtype.type(1)).astype(np.bool_) & (a.dtype.kind == "i") & (length > 0)
    above = _shift(np.full_like(value, -1 if a.dtype.kind == "i" else np.iinfo(a.dtype).max), length, left=True)
    above = np.where(length >= width, a.dtype.type(0), above)
    return np.where(negative, value | above, value & ~above).astype(a.dtype).view(unsigned)


def _insert(a: Any, b: Any, position: Any, length: Any) -> Any:
    a, b = np.asarray(a).astype(I64), np.asarray(b).astype(I64)
    position, length = np.asarray(position).astype(I64) & 0xFF, np.asarray(length).astype(I64) & 0xFF
    mask = ((I64(1) << np.minimum(length, 32)) - 1) << np.minimum(position, 32)
    return ((b & ~mask) | (a << np.minimum(position, 32) & mask)) & 0xFFFFFFFF


def _permute(a: Any, b: Any, selector: Any) -> Any:
    """Bytes of b:a by the nibbles of the selector; their highest bit repeats the byte's sign."""
    both = np.asarray(b).astype(U64) << U64(32) | np.asarray(a).astype(U64)
    result: Any = U32(0)
    for i in range(4):
        nibble = (np.asarray(selector).astype(U64) >> U64(4 * i)) & U64(15)
        byte = (both >> ((nibble & U64(7)) * U64(8))) & U64(0xFF)
        byte = np.where(nibble & U64(8), np.where(byte & U64(0x80), U64(0xFF), U64(0)), byte)
        result = result | (byte.astype(U32) << U32(8 * i))
    return result


def _lut(a: Any, b: Any, c: Any, table: Any) -> Any:
    result = a & U32(0)
    for i in range(8):
        if int(table) >> i & 1:
            result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return result


def _population(a: Any) -> Any:
    return np.bitwise_count(np.asarray(a)).astype(U32)


def _leading_zeros(a: Any) -> Any:
    a = np.asarray(a)
    exponent = np.frexp((a & ~(a >> a.dtype.type(1))).astype(F64))[1]  # the highest bit survives, no rounding up
    return (8 * a.dtype.itemsize - exponent).astype(U32)


def _reversed_bits(a: Any) -> Any:
    flipped = np.unpackbits(np.atleast_1d(np.asarray(a, U32)).view(np.uint8), bitorder="little").reshape(-1, 32)
    return np.packbits(flipped[:, ::-1].copy(), axis=1, bitorder="little").view(U32)[:, 0]


def _to_integer(x: Any, rounding: Callable[[Any], Any], kind: str) -> Any:
    """Clamped to the integer's range; NaN becomes 0."""
    dtype = np.dtype(KINDS[kind].dtype)
    value = rounding(np.asarray(x, F64))
    limits = np.iinfo(dtype)
    low, high = value <= float(limits.min), value >= float(limits.max)
    inside = np.where(np.isnan(value) | low | high, 0, value).astype(dtype)
    return np.where(low, dtype.type(limits.min), np.where(high, dtype.type(limits.max), inside))


_ROUNDINGS: dict[str, Callable[[Any], Any]] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _pair(high: Any, low: Any) -> Any:
    """Two numbers as elements of one register; the first operand is the upper one."""
    return np.stack(np.broadcast_arrays(np.atleast_1d(low), np.atleast_1d(high)), -1)


def _ordered(a: Any, b: Any) -> Any:
    return (a == a) & (b == b)


def _either(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(a, b) | ~_ordered(a, b)


_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda a, b: (a != b) & _ordered(a, b),
    "equ": _either(np.equal), "neu": np.not_equal, "ltu": _either(np.less), "leu": _either(np.less_equal),
    "gtu": _either(np.greater), "geu": _either(np.greater_equal), "num": _ordered,
    "nan": lambda a, b: ~_ordered(a, b), "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _joined(relation: Value, join: Value, a: Any, b: Any, c: Any) -> Any:
    return join(relation(a, b), c)


def _of_all(function: Value) -> Value:
    return lambda *operands: functools.reduce(function, operands)


@dataclass(frozen=True)
class Special:
    """An approximation: its exact function, and the largest error by the PTX manual."""

    function: Callable[[Any], Any]
    relative: float = 0.0
    absolute: float = 0.0


_SPECIAL = {  # PTX ISA, "Floating-Point Instructions"
    #                             exact                        relative   absolute
    "ex2": Special(np.exp2, 2**-22),
    "lg2": Special(np.log2, 2**-22, 2**-22),  # relative outside of (0.5, 2), absolute inside
    "sqrt": Special(np.sqrt, 2**-23),
    "rsqrt": Special(lambda x: 1 / np.sqrt(x), 2**-22.9),
    "rcp": Special(lambda x: 1 / x, 2**-23),
    "sin": Special(np.sin, 0, 2**-20.5),
    "cos": Special(np.cos, 0, 2**-20.5),
    "tanh": Special(np.tanh, 2**-11),
}
_DIVISION_ERROR = 2**-22  # div.full, div.approx: 2 units in the last place


TABLE: list[tuple[str, str, str, Value]] = [
    # spelling                                   result    sources        value
    (rf"add\.{INTEGER}",                         "$1",     "$1 $1",       np.add),
    (rf"sub\.{INTEGER}",                         "$1",     "$1 $1",       np.subtract),
    (rf"mul\.lo\.{INTEGER}",                     "$1",     "$1 $1",       np.multiply),
    (rf"mul\.hi\.{INTEGER}",                     "$1",     "$1 $1",       _high),
    (r"mul\.wide\.([us])16",                     "$132",   "$116 $116",   _wide),
    (r"mul\.wide\.([us])32",                     "$164",   "$132 $132",   _wide),
    (rf"mad\.lo\.{INTEGER}",                     "$1",     "$1 $1 $1",    lambda a, b, c: a * b + c),
    (r"mad\.wide\.([us])16",                     "$132",   "$116 $116 $132", lambda a, b, c: _wide(a, b) + c),
    (r"mad\.wide\.([us])32",                     "$164",   "$132 $132 $164", lambda a, b, c: _wide(a, b) + c),
    (rf"div\.{INTEGER}",                         "$1",     "$1 $1",       _divide),
    (rf"rem\.{INTEGER}",                         "$1",     "$1 $1",       _remainder),
    (rf"min\.{INTEGER}",                         "$1",     "$1 $1",       np.minimum),
    (rf"max\.{INTEGER}",                         "$1",     "$1 $1",       np.maximum),
    (r"min\.relu\.s32",                          "s32",    "s32 s32",     lambda a, b: np.maximum(np.minimum(a, b), 0)),
    (r"max\.relu\.s32",                          "s32",    "s32 s32",     lambda a, b: np.maximum(np.maximum(a, b), 0)),
    (r"neg\.(s16|s32|s64)",                  "$1",     "$1",          np.negative),
    (r"abs\.(s16|s32|s64)",                  "$1",     "$1",          np.abs),
    (rf"and\.{BITS}",                            "$1",     "$1 $1",       np.bitwise_and),
    (rf"or\.{BITS}",                             "$1",     "$1 $1",       np.bitwise_or),
    (rf"xor\.{BITS}",                            "$1",     "$1 $1",       np.bitwise_xor),
    (rf"not\.{BITS}",                            "$1",     "$1",          np.invert),
    (r"lop3\.b32",                               "b32",    "b32 b32 b32 u32", _lut),
    (r"prmt\.b32",                               "b32",    "b32 b32 b32", _permute),
    (r"shl\.(b16|b32|b64)",                      "$1",     "$1 u32",      functools.partial(_shift, left=True)),
    (r"shr\.([bus](?:16|32|64))",                "$1",     "$1 u32",      functools.partial(_shift, left=False)),
    (r"bfe\.([us])(32|64)",                      "b$2",    "$1$2 u32 u32", _extract),
    (r"bfi\.b32",                                "b32",    "b32 b32 u32 u32", _insert),
    (r"popc\.(b32|b64)",                         "u32",    "$1",          _population),
    (r"clz\.(b32|b64)",                          "u32",    "$1",          _leading_zeros),
    (r"brev\.b32",                               "b32",    "b32",         _reversed_bits),
    (rf"add(?:\.rn)?\.{FLOAT}",                  "$1",     "$1 $1",       np.add),
    (rf"sub(?:\.rn)?\.{FLOAT}",                  "$1",     "$1 $1",       np.subtract),
    (rf"mul(?:\.rn)?\.{FLOAT}",                  "$1",     "$1 $1",       np.multiply),
    (r"add(?:\.rn)?\.f32\.(bf16|f16)",           "f32",    "$1 f32",      np.add),
    (r"sub(?:\.rn)?\.f32\.(bf16|f16)",           "f32",    "$1 f32",      np.subtract),
    (r"fma\.rn\.(f32|f32x2)",                    "$1",     "$1 $1 $1",    fma_f32),
    (rf"fma\.rn\.{NARROW}",                      "$1",     "$1 $1 $1",    fma_16),
    (r"fma\.rn\.f32\.(bf16|f16)",                "f32",    "$1 $1 f32",   fma_f32),
    (r"div\.rn\.f32",                            "f32",    "f32 f32",     np.divide),
    (r"sqrt\.rn\.f32",                           "f32",    "f32",         np.sqrt),
    (r"rcp\.rn\.f32",                            "f32",    "f32",         lambda x: F32(1) / x),
    (rf"min\.{FLOAT}",                           "$1",     "$1 *",        _of_all(np.fmin)),
    (rf"max\.{FLOAT}",                           "$1",     "$1 *",        _of_all(np.fmax)),
    (rf"min\.NaN\.{FLOAT}",                      "$1",     "$1 *",        _of_all(np.minimum)),
    (rf"max\.NaN\.{FLOAT}",                      "$1",     "$1 *",        _of_all(np.maximum)),
    (rf"neg\.{FLOAT}",                           "$1",     "$1",          np.negative),
    (rf"abs\.{FLOAT}",                           "$1",     "$1",          np.abs),
    (r"copysign\.f32",                           "f32",    "f32 f32",     lambda sign, x: np.copysign(x, sign)),
    (r"cvt\.([us](?:8|16|32|64))\.([us](?:8|16|32|64))", "$1", "$2",      lambda x: x),
    (r"cvt\.rn\.(f16|bf16|f32|f64)\.([us](?:8|16|32|64))", "$1", "$2",    lambda x: x),
    (r"cvt\.(f32|f64)\.(bf16|f16|f32)",          "$1",     "$2",          lambda x: x),
    (r"cvt\.rn\.(bf16|f16)\.(f32|bf16|f16)",     "$1",     "$2",          lambda x: x),
    (r"cvt\.rn\.(f16|f32)\.f64",                "$1",     "f64",         lambda x: x),
    (r"cvt\.rn\.(bf16x2|f16x2)\.f32",            "$1",     "f32 f32",     _pair),
    (r"cvt\.rz\.bf16\.f32",                      "bf16",   "f32",         truncated_bf16),
    (r"cvt\.rz\.f16\.f32",                       "f16",    "f32",         truncated_f16),
    (r"cvt\.rn\.relu\.(bf16|f16)\.f32",          "$1",     "f32",         lambda x: np.maximum(x, 0)),
    (r"cvt\.rn\.satfinite\.(e4m3x2|e5m2x2)\.f32", "$1",    "f32 f32",     _pair),
    (r"cvt\.rn\.satfinite\.(e4m3x2|e5m2x2)\.f16x2", "$1",  "f16x2",       lambda x: x),
    (r"cvt\.rn\.f16x2\.(e4m3x2|e5m2x2)",         "f16x2",  "$1",          lambda x: x),
    (r"cvt\.rna\.tf32\.f32",                     "b32",    "b32",         round_tf32),
    (r"selp\.(b16|b32|b64|u16|u32|u64|s16|s32|s64|f16|f32|f64)", "$1", "$1 $1 pred", lambda a, b, p: np.where(p, a, b)),
    (r"testp\.finite\.(f32|f64)",                "pred",   "$1",          np.isfinite),
]  # fmt: skip
TABLE += [
    (rf"shf\.{direction}\.{mode}\.b32", "b32", "b32 b32 u32", functools.partial(_funnel_shift, left=left, wrap=wrap))
    for direction, left in (("l", True), ("r", False))
    for mode, wrap in (("wrap", True), ("clamp", False))
]
for _name, _rounding in _ROUNDINGS.items():
    TABLE.append((rf"cvt\.{_name}\.(f32|f64)\.\1", "$1", "$1", _rounding))
    for _kind in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        _to = functools.partial(_to_integer, rounding=_rounding, kind=_kind)
        TABLE.append((rf"cvt\.{_name}\.{_kind}\.(f16|bf16|f32|f64)", _kind, "$1", _to))
for _name, _relation in _RELATIONS.items():
    TABLE.append((rf"setp\.{_name}\.{_COMPARED}", "pred", "$1 $1", _relation))
    for _join, _join_function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        _both = functools.partial(_joined, _relation, _join_function)
        TABLE.append((rf"setp\.{_name}\.{_join}\.{_COMPARED}", "pred", "$1 $1 pred", _both))


def _row(result: str, sources: str, value: Value) -> Rule:
    def translate_row(t: Translator, match: re.Match[str]) -> Step:
        kinds = [_kind_named(text, match) for text in sources.split()]
        if kinds[-1] == "*":
            kinds = kinds[:-1] * (len(t.operands) - 1)
        t.expect(1 + len(kinds))
        write = t.result(t.operands[0], _kind_named(result, match))
        read = [t.number(operand, kind) for operand, kind in zip(t.operands[1:], kinds, strict=True)]
        function = _flushed(value) if t.ftz else value
        if len(read) == 1:
            one = read[0]
            return lambda g, m: write(g, function(one(g)), m)
        if len(read) == 2:
            first, second = read
            return lambda g, m: write(g, function(first(g), second(g)), m)
        return lambda g, m: write(g, function(*(source(g) for source in read)), m)

    return translate_row


def _kind_named(text: str, match: re.Match[str]) -> str:
    return re.sub(r"\$(\d)", lambda group: match[int(group[1])], text)


def _flushed(value: Value) -> Value:
    def function(*operands: Any) -> Any:
        result = value(*(flush(x) if getattr(x, "dtype", None) == F32 else x for x in operands))
        return flush(result) if getattr(result, "dtype", None) == F32 else result

    return function


for _spelling, _result, _sources, _value in TABLE:
    rule(_spelling)(_row(_result, _sources, _value))


@rule(r"setp\.(\w+)\.(f16x2|bf16x2)")
def _compare_halves(t: Translator, match: re.Match[str]) -> Step:
    """p|q: of the lower and of the upper halves."""
    t.expect(3)
    low, high = (t.target(part) for part in t.parts(t.operands[0], 2))
    a, b, relation = t.number(t.operands[1], match[2]), t.number(t.operands[2], match[2]), _RELATIONS[match[1]]

    def compare(g: Any, m: Mask) -> None:
        both = relation(a(g), b(g))
        low(g, np.ascontiguousarray(both[:, 0]), m)
        high(g, np.ascontiguousarray(both[:, 1]), m)

    return compare


@rule(*(rf"{word}\.approx\.f32" for word in _SPECIAL))
def _approximation(t: Translator, match: re.Match[str]) -> Step:
    t.expect(2)
    name, ftz = match[0].split(".")[0], t.ftz
    row = _SPECIAL[name]
    read, write = t.number(t.operands[1], "f32"), t.result(t.operands[0], "f32")

    def step(g: Any, m: Mask) -> None:
        x = np.asarray(flush(read(g)) if ftz else read(g), F64)
        exact = row.function(x)
        if g.options.worst_case:
            inside = (x > 0.5) & (x < 2) if name == "lg2" else row.absolute > 0
            error = np.where(inside, row.absolute, row.relative * np.abs(exact))
            exact = np.where(x == 0, exact, exact + error * _sign(x))  # of 0, the manual gives the result
        result = exact.astype(F32)
        write(g, flush(result) if ftz else result, m)

    return step


@rule(r"div\.(?:full|approx)\.f32")
def _division(t: Translator, match: re.Match[str]) -> Step:
    t.expect(3)
    a, b, write = t.number(t.operands[1], "f32"), t.number(t.operands[2], "f32"), t.result(t.operands[0], "f32")
    ftz = t.ftz

    def step(g: Any, m: Mask) -> None:
        x, y = (np.asarray(flush(v) if ftz else v, F64) for v in (a(g), b(g)))
        quotient = x / y
        if g.options.worst_case:
            quotient = quotient * (1 + _DIVISION_ERROR * _sign(x * 3 + y))
        result = quotient.astype(F32)
        write(g, flush(result) if ftz else result, m)

    return step


def _sign(x: Any) -> Any:
    """+1 or -1 by the bits of a number: as on hardware, lanes that hold the same number get the same result."""
    bits = np.ascontiguousarray(np.atleast_1d(x).astype(F32)).view(U32)
    odd = (bits * U32(2654435761) >> U32(16)) & U32(1)
    return (odd.astype(F64) * 2 - 1).reshape(np.shape(x))
