"""The arithmetic of the interpreter: Triton's operations on numpy arrays, with the rounding that hardware does.

Triton's own interpreter keeps bfloat16 as 16-bit integers: matmuls come out as garbage, casts truncate, and some fp8
casts are wrong. Here those types are numpy types (from ml_dtypes), so that every operation rounds to nearest even.
Where Triton leaves a value undefined (a masked lane of a load without `other`), the interpreter can make it NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as libtriton_interpreter
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

from fasttrain_kernels.testing.interpreter.libdevice import FUNCTIONS, function_of
from fasttrain_kernels.testing.interpreter.memory import GlobalMemory
from fasttrain_kernels.testing.interpreter.shapes import common_shape
from fasttrain_kernels.testing.interpreter.tiles import NARROW_FLOATS, Tile, numpy_dtype

_ARITHMETIC = {np.add, np.subtract, np.multiply, np.divide, np.fmax, np.fmin, np.maximum, np.minimum}
_BITS = {itemsize: np.dtype(f"uint{8 * itemsize}") for itemsize in (1, 2, 4, 8)}


@dataclasses.dataclass(frozen=True)
class _BuilderOptions(stock.InterpreterOptions):
    debug: bool = True  # tl.device_assert acts
    sanitize_overflow: bool = False  # integers wrap, as they do on the GPU
    allowed_dot_input_precisions: tuple[str, ...] = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")


class Builder(stock.InterpreterBuilder):
    """Executes Triton's operations on the memory of the running launch."""

    memory: GlobalMemory
    poison: bool = True  # undefined values are NaN (-1 for integers)
    tf32: bool = True  # matmuls of float32 with input_precision="tf32" round their operands, as tensor cores do

    def __init__(self) -> None:
        super().__init__()
        self.options = _BuilderOptions()
        self.codegen_fns["min_dot_size"] = _min_dot_size

    def get_bf16(self, value: float) -> Tile:
        return Tile(np.array([value], numpy_dtype(tl.bfloat16)), tl.bfloat16)

    # Memory. hints: cache, eviction, volatility; from triton 3.9 on, the first two are one

    def create_load(self, pointers: Tile, *hints: object) -> Tile:
        return self._load(pointers, None, None)

    def create_masked_load(self, pointers: Tile, mask: Tile, other: Tile | None, *hints: object) -> Tile:
        return self._load(pointers, mask.data, other)

    def _load(self, pointers: Tile, mask: np.ndarray | None, other: Tile | None) -> Tile:
        dtype = pointers.get_element_ty()
        values = numpy_dtype(dtype)
        bits = _BITS[values.itemsize]
        if other is not None:
            fill = np.ascontiguousarray(other.data).view(bits)
        else:
            fill = _undefined(values).view(bits) if self.poison else np.zeros(1, bits)
        return Tile(self.memory.load(pointers.data, mask, fill, pointers.origin).view(values), dtype)

    def create_store(self, pointers: Tile, value: Tile, *hints: object) -> None:
        self._store(pointers, value.data, None)

    def create_masked_store(self, pointers: Tile, value: Tile, mask: Tile, *hints: object) -> None:
        self._store(pointers, value.data, mask.data)

    def _store(self, pointers: Tile, values: np.ndarray, mask: np.ndarray | None) -> None:
        bits = _BITS[values.dtype.itemsize]
        self.memory.store(pointers.data, mask, np.ascontiguousarray(values).view(bits), pointers.origin)

    def create_atomic_rmw(
        self, op: object, pointers: Tile, value: Tile, mask: Tile, sem: object, scope: object
    ) -> Tile:
        self.memory.count_atomic(pointers.data, mask.data, value.data.dtype.itemsize, pointers.origin)
        if value.data.dtype in NARROW_FLOATS.values():
            return self._narrow_atomic_add(op, pointers, value, mask)
        return super().create_atomic_rmw(op, pointers, value, mask, sem, scope)

    def create_atomic_cas(self, pointers: Tile, compare: Tile, value: Tile, sem: object, scope: object) -> Tile:
        self.memory.count_atomic(pointers.data, None, value.data.dtype.itemsize, pointers.origin)
        return super().create_atomic_cas(pointers, compare, value, sem, scope)

    def _narrow_atomic_add(self, op: object, pointers: Tile, value: Tile, mask: Tile) -> Tile:
        if op != ir.ATOMIC_OP.FADD:
            raise NotImplementedError(f"of the atomics on {value.dtype}, the interpreter knows only atomic_add")
        dtype = value.data.dtype
        bits = _BITS[dtype.itemsize]
        shape = pointers.data.shape
        addresses = pointers.data.reshape(-1)
        terms = np.broadcast_to(value.data, shape).reshape(-1)
        active = np.broadcast_to(mask.data, shape).reshape(-1)
        before = np.zeros(addresses.shape, dtype)
        always = np.ones(1, bool)
        for lane in np.flatnonzero(active):  # one by one: lanes may share an address
            place = addresses[lane : lane + 1]
            old = libtriton_interpreter.load(place, always, np.zeros(1, bits), bits).view(dtype)
            before[lane] = old[0]
            libtriton_interpreter.store(place, (old + terms[lane]).view(bits), always)
        return Tile(before.reshape(shape), value.dtype.scalar)

    # Block pointers and descriptors: Triton's interpreter computes the addresses.

    def create_tensor_pointer_load(self, block: Any, boundary_check: Any, padding: Any, *hints: object) -> Tile:
        pointers, mask = block.materialize_pointers(boundary_check)
        pointers.origin = block.base.origin
        return self._load(pointers, mask, _padding(pointers, padding))

    def create_tensor_pointer_store(self, block: Any, value: Tile, boundary_check: Any, *hints: object) -> None:
        pointers, mask = block.materialize_pointers(boundary_check)
        pointers.origin = block.base.origin
        self._store(pointers, value.data, mask)

    def create_descriptor_load(self, descriptor: Any, indices: Any, *hints: object) -> Tile:
        pointers, mask = descriptor.materialize_pointers(indices)
        pointers.origin = descriptor.base.origin
        return self._load(pointers, _lanes(mask), _padding(pointers, descriptor.padding))

    def create_descriptor_store(self, descriptor: Any, value: Tile, indices: Any) -> None:
        pointers, mask = descriptor.materialize_pointers(indices)
        pointers.origin = descriptor.base.origin
        self._store(pointers, value.data, _lanes(mask))

    # Casts: numpy and ml_dtypes round to nearest even.

    def cast_impl(self, source: Tile, dtype: tl.dtype) -> Tile:
        return Tile(source.data.astype(numpy_dtype(dtype)), dtype.scalar)

    def create_fp_to_fp(self, source: Tile, dtype: tl.dtype, rounding: object) -> Tile:
        if rounding is None or rounding == ir.ROUNDING_MODE.RTNE:
            return self.cast_impl(source, dtype)
        bits = source.data.view(_BITS[source.data.itemsize])
        truncated = stock._convert_float(bits, source.dtype.scalar, dtype.scalar, rounding)
        return Tile(truncated.view(numpy_dtype(dtype)), dtype.scalar)

    def create_bitcast(self, source: Tile, dtype: tl.dtype) -> Tile:
        return Tile(source.data.view(numpy_dtype(dtype)), dtype.scalar, source.origin)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    # Element by element

    def binary_op(self, left: Tile, right: Tile, op: Callable[..., Any]) -> Tile:
        if op in _ARITHMETIC and left.dtype.scalar.is_floating():
            self.memory.launch.elementwise += left.data.size
        return Tile(op(left.data, right.data), left.dtype.scalar)

    def ternary_op(self, first: Tile, second: Tile, third: Tile, op: Callable[..., Any]) -> Tile:
        return Tile(op(first.data, second.data, third.data), third.dtype.scalar)

    def unary_op(self, operand: Tile, op: Callable[..., Any]) -> Tile:
        return Tile(op(operand.data), operand.dtype.scalar)

    def create_maxnumf(self, left: Tile, right: Tile) -> Tile:  # NaN loses; in create_maximumf it wins
        return self.binary_op(left, right, np.fmax)

    def create_minnumf(self, left: Tile, right: Tile) -> Tile:
        return self.binary_op(left, right, np.fmin)

    def create_fma(self, x: Tile, y: Tile, z: Tile) -> Tile:
        self.memory.launch.elementwise += 2 * z.data.size
        return Tile(x.data * y.data + z.data, z.dtype.scalar)

    def create_fabs(self, operand: Tile) -> Tile:
        return self.unary_op(operand, np.abs)

    def create_select(self, condition: Tile, left: Tile, right: Tile) -> Tile:
        origin = left.origin if left.origin == right.origin else None
        return Tile(np.where(condition.data, left.data, right.data), left.dtype.scalar, origin)

    def special(self, operand: Tile, op: Callable[..., Any]) -> Tile:
        self.memory.launch.special += operand.data.size
        return self.unary_op(operand, op)

    def create_rsqrt(self, operand: Tile) -> Tile:
        return self.special(operand, FUNCTIONS["rsqrt"])

    def create_erf(self, operand: Tile) -> Tile:
        return self.special(operand, FUNCTIONS["erf"])

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, operands: list[Tile], dtype: tl.dtype, is_pure: bool
    ) -> Tile:
        function = function_of(symbol)
        values = np.asarray(function(*(operand.data for operand in operands)))
        self.memory.launch.special += values.size
        return Tile(values.astype(numpy_dtype(dtype), copy=False), dtype.scalar)

    def create_assert(self, condition: Tile, message: str) -> None:
        if not condition:
            raise AssertionError(f"tl.device_assert failed: {message}")

    # Matmul

    def create_dot(self, a: Tile, b: Tile, accumulator: Tile, input_precision: object, imprecise: object) -> Tile:
        self.memory.launch.flops += 2 * a.data.size * b.data.shape[-1]
        dtype = accumulator.data.dtype
        if a.data.dtype.kind in "iu":
            result = np.matmul(a.data, b.data, dtype=dtype)
            return Tile(result + accumulator.data, accumulator.dtype.scalar)
        left, right = a.data, b.data
        on_cuda_cores = left.dtype == np.float32
        if self.tf32 and input_precision == ir.INPUT_PRECISION.TF32 and on_cuda_cores:
            left, right, on_cuda_cores = _round_to_tf32(left), _round_to_tf32(right), False
        if left.dtype == np.float64:
            result = np.matmul(left, right) + accumulator.data
        else:  # a chain of fused multiply-adds, or matrix instructions of 16 terms
            result = _matmul_float32(left, right, accumulator.data, 1 if on_cuda_cores else 16)
        return Tile(result.astype(dtype, copy=False), accumulator.dtype.scalar)

    # Shapes, and pointer arithmetic: the origin of a pointer stays with it.

    def create_addptr(self, pointers: Tile, offset: Tile) -> Tile:
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        offsets = offset.data.astype(np.int64, copy=False).view(np.uint64)
        return Tile(pointers.data + offsets * np.uint64(itemsize), pointers.dtype, pointers.origin)

    def create_splat(self, shape: tl.block_type, operand: Tile) -> Tile:
        return Tile(np.full(shape.shape, operand.data[0], operand.data.dtype), operand.dtype.scalar, operand.origin)

    def create_unsplat(self, operand: Tile) -> Tile:
        return Tile(operand.data.reshape(-1)[:1], operand.dtype.scalar, operand.origin)

    def create_broadcast(self, operand: Tile, shape: list[int]) -> Tile:
        return Tile(np.broadcast_to(operand.data, shape), operand.dtype.scalar, operand.origin)

    def create_expand_dims(self, operand: Tile, axis: int) -> Tile:
        shape = list(operand.data.shape)
        shape.insert(axis, 1)
        return Tile(operand.data.reshape(shape), operand.dtype.scalar, operand.origin)

    def create_reshape(self, operand: Tile, shape: list[int], allow_reorder: bool) -> Tile:
        return Tile(operand.data.reshape(shape), operand.dtype.scalar, operand.origin)

    def create_trans(self, operand: Tile, order: list[int]) -> Tile:
        return Tile(np.transpose(operand.data, order), operand.dtype.scalar, operand.origin)


class Semantic(TritonSemantic):
    """Triton's type rules on top of the builder.

    Every operation casts and broadcasts its operands; these two methods do it in less time than Triton's.
    """

    def cast(self, input: tl.tensor, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> tl.tensor:
        if input.dtype is dst_ty.scalar:
            return input
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def broadcast_impl_value(self, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        left, right = lhs.type, rhs.type
        if lhs.shape is rhs.shape:  # equal shapes are one object: see shapes.py
            return lhs, rhs
        if not right.is_block():
            return lhs, self._broadcast(rhs, left.shape)
        if not left.is_block():
            return self._broadcast(lhs, right.shape), rhs
        shape = common_shape(tuple(left.shape.values), tuple(right.shape.values))
        return self._broadcast(lhs, shape), self._broadcast(rhs, shape)

    def _broadcast(self, operand: tl.tensor, shape: tl.tuple) -> tl.tensor:
        if operand.type.is_block() and operand.type.shape is shape:
            return operand
        tile = operand.handle
        wide = Tile(np.broadcast_to(tile.data, shape.values), tile.dtype, tile.origin)
        return tl.tensor(wide, tl.block_type(operand.dtype, shape))


def _special(op: Callable[..., Any]) -> Callable[[Builder, Tile], Tile]:
    return lambda self, operand: self.special(operand, op)


for _name, _function in dict(
    exp=np.exp, exp2=np.exp2, log=np.log, log2=np.log2, sqrt=np.sqrt, precise_sqrt=np.sqrt, sin=np.sin, cos=np.cos
).items():
    setattr(Builder, f"create_{_name}", _special(_function))


def _min_dot_size(a: tl.block_type, b: tl.block_type) -> tuple[int, int, int]:  # M, N, K
    # The smallest matmul that tensor cores take, as in Triton's CUDA backend.
    return (1, 1, 32 if a.scalar.primitive_bitwidth == 8 else 16)


def _undefined(dtype: np.dtype) -> np.ndarray:
    value = {"b": True, "i": -1, "u": -1}.get(dtype.kind, np.nan)
    return np.array([value]).astype(dtype)


def _lanes(mask: Any) -> np.ndarray:
    """From triton 3.9 on it is a tile."""
    return mask.data if isinstance(mask, Tile) else mask


def _padding(pointers: Tile, padding: object) -> Tile | None:
    if padding is None:
        return None
    value = np.nan if padding == ir.PADDING_OPTION.PAD_NAN else 0
    dtype = pointers.get_element_ty()
    return Tile(np.full(pointers.data.shape, value, numpy_dtype(dtype)), dtype)


def _round_to_tf32(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _matmul_float32(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray, step: int) -> np.ndarray:
    """accumulator + a @ b in float32, rounded after every `step` terms, in their order.

    numpy's own matmul depends on its shape and on which operand is transposed. On a GPU it does not, and kernels may
    rely on it: recompute a matmul in backward, and subtract what forward made of it.
    """
    total = accumulator.astype(np.float32)
    a, b = a.astype(np.float64), b.astype(np.float64)  # float32 times float32 is exact in it
    combine = np.multiply if step == 1 else np.matmul
    for k in range(0, a.shape[-1], step):
        terms = combine(a[..., k : k + step], b[..., k : k + step, :])
        np.add(total, terms, out=total, casting="same_kind")
    return total
