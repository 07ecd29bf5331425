"""Numbers in registers: what the bits of each PTX type mean, and roundings that numpy does not do by itself.

Registers hold unsigned integers. A kind decodes them for a rule and encodes its result: 16-bit floats are computed in
float32 and rounded once, packed types are arrays of (lanes, elements).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

F16, F32, F64 = np.float16, np.float32, np.float64
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I32, I64 = np.int32, np.int64
REGISTER: dict[int, Any] = {1: np.bool_, 8: U8, 16: U16, 32: U32, 64: U64}  # by width


@dataclass(frozen=True)
class RegisterKind:
    """A PTX type: its width, and for plain types the numpy type of the same bits."""

    name: str
    bits: int
    dtype: Any  # of the encoded bits
    decode: Callable[[Any], Any] | None = None  # None: the bits, seen as dtype, are the number
    encode: Callable[[Any], Any] | None = None


def bf16_to_f32(bits: Any) -> Any:
    return (np.asarray(bits, U16).astype(U32) << U32(16)).view(F32)


def f32_to_bf16(x: Any) -> Any:
    """Round to nearest even; NaN becomes the hardware's."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    rounded = ((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)).astype(U16)
    nan = (bits & U32(0x7FFFFFFF)) > U32(0x7F800000)
    return np.where(nan, U16(0x7FFF), rounded) if nan.any() else rounded


def f16_to_f32(bits: Any) -> Any:
    return np.asarray(bits, U16).view(F16).astype(F32)


def f32_to_f16(x: Any) -> Any:
    return np.ascontiguousarray(np.asarray(x).astype(F16)).view(U16)


def _fp8(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    import ml_dtypes

    dtype = np.dtype({"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[name])
    largest = F32(ml_dtypes.finfo(dtype).max)

    def encode(x: Any) -> Any:  # .satfinite, the only rounding that PTX has
        return np.clip(np.asarray(x, F32), -largest, largest).astype(dtype).view(U8)

    return lambda bits: np.asarray(bits, U8).view(dtype).astype(F32), encode


def _packed(narrow: Any, wide: Any, decode: Callable[[Any], Any], encode: Callable[[Any], Any]) -> dict[str, Any]:
    """Decoding and encoding of several elements in a register: (lanes,) of wide <-> (lanes, elements) of numbers."""
    number = np.dtype(wide).itemsize // np.dtype(narrow).itemsize

    def unpack(bits: Any) -> Any:
        return decode(np.ascontiguousarray(np.atleast_1d(bits)).view(narrow).reshape(-1, number))

    def pack(numbers: Any) -> Any:
        return np.ascontiguousarray(encode(numbers)).view(wide)[..., 0]

    return dict(decode=unpack, encode=pack)


def _kinds() -> dict[str, RegisterKind]:
    same: Callable[[Any], Any] = lambda bits: bits  # noqa: E731
    plain = {"pred": np.bool_, "f32": F32, "f64": F64}
    for width in (8, 16, 32, 64):
        unsigned = REGISTER[width]
        plain |= {f"b{width}": unsigned, f"u{width}": unsigned, f"s{width}": np.dtype(f"i{width // 8}").type}
    found = {name: RegisterKind(name, 8 * np.dtype(dtype).itemsize, dtype) for name, dtype in plain.items()}
    found["pred"] = RegisterKind("pred", 1, np.bool_)
    found["f16"] = RegisterKind("f16", 16, U16, f16_to_f32, f32_to_f16)
    found["bf16"] = RegisterKind("bf16", 16, U16, bf16_to_f32, f32_to_bf16)
    found["f16x2"] = RegisterKind("f16x2", 32, U32, **_packed(U16, U32, f16_to_f32, f32_to_f16))
    found["bf16x2"] = RegisterKind("bf16x2", 32, U32, **_packed(U16, U32, bf16_to_f32, f32_to_bf16))
    found["f32x2"] = RegisterKind("f32x2", 64, U64, **_packed(F32, U64, same, lambda x: np.asarray(x, F32)))
    for name in ("e4m3", "e5m2"):
        found[f"{name}x2"] = RegisterKind(f"{name}x2", 16, U16, **_packed(U8, U16, *_fp8(name)))
    return found


KINDS = _kinds()


def elements(bits: Any, kind: str) -> Any:
    """Numbers of a matmul's operand, packed in unsigned integers: float32, or int32 of 8-bit integers."""
    bits = np.ascontiguousarray(bits)
    match kind:
        case "bf16":
            return bf16_to_f32(bits.view(U16))
        case "f16":
            return f16_to_f32(bits.view(U16))
        case "tf32":  # the low 13 bits are ignored
            return (bits.view(U32) & U32(0xFFFFE000)).view(F32)
        case "e4m3" | "e5m2":
            return _fp8(kind)[0](bits.view(U8))
        case "s8":
            return bits.view(np.int8).astype(I32)
        case "u8":
            return bits.view(U8).astype(I32)
    raise AssertionError(kind)


ELEMENT_BITS = {"bf16": 16, "f16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


def truncated_bf16(x: Any) -> Any:
    """float32 that bfloat16 holds, rounded toward zero."""
    return (np.ascontiguousarray(x, F32).view(U32) & U32(0xFFFF0000)).view(F32)


def truncated_f16(x: Any) -> Any:
    near = np.asarray(x, F32).astype(F16)
    lower = np.nextafter(near, F16(0))
    return np.where(np.abs(near.astype(F32)) > np.abs(x), lower, near).astype(F32)


def round_tf32(bits: Any) -> Any:
    """float32 to the nearest tf32, ties away from zero."""
    return (np.asarray(bits, U32) + U32(0x1000)) & U32(0xFFFFE000)


def to_odd_f32(x: Any) -> Any:
    """float64 to float32, rounded to odd, so that rounding again to fewer bits is as good as rounding once."""
    near = x.astype(F32)
    error = x - near.astype(F64)
    wrong = (error != 0) & ((near.view(U32) & U32(1)) == 0) & np.isfinite(x) & np.isfinite(near)
    if not wrong.any():
        return near
    toward = np.where(error > 0, F32(np.inf), F32(-np.inf))
    return np.where(wrong, np.nextafter(near, toward, dtype=F32), near)


def fma_f32(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once: the product is exact in float64; a sum halfway between two float32 is corrected."""
    product = np.asarray(a, F64) * b
    total = np.atleast_1d(product + c)
    ties = (total.view(U64) & U64(0x1FFFFFFF)) == U64(0x10000000)
    if ties.any():
        wide = np.asarray(c, F64)
        back = total - product
        error = (product - (total - back)) + (wide - back)
        fix = ties & (error != 0) & np.isfinite(error)
        if fix.any():
            total = np.where(fix, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return total.astype(F32)


def fma_16(a: Any, b: Any, c: Any) -> Any:
    """a * b + c for operands of 16 bits, so that encoding the result rounds once."""
    return to_odd_f32(np.atleast_1d(np.asarray(a, F64) * b + c))


def flush(x: Any) -> Any:
    """Subnormals to zero of the same sign."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    small = (bits & U32(0x7F800000)) == 0
    return np.where(small, bits & U32(0x80000000), bits).view(F32) if small.any() else np.asarray(x, F32)
