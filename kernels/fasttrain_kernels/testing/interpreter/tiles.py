"""Values in a kernel: numpy arrays with a Triton type, and the numpy type of each Triton type."""

from __future__ import annotations

import numpy as np
import triton.language as tl

try:
    import ml_dtypes
except ImportError as error:
    raise ImportError(
        "fasttrain_kernels.testing needs ml_dtypes for bfloat16 and fp8: pip install fasttrain-kernels[testing]"
    ) from error

# numpy itself has no floats narrower than float16; Triton's interpreter keeps them as integers.
NARROW_FLOATS = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_NUMPY_DTYPES = {
    **NARROW_FLOATS,
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"fp{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "int1": np.dtype(bool),
}
_POINTER = np.dtype(np.uint64)


def numpy_dtype(dtype: tl.dtype) -> np.dtype:
    """The numpy type that holds the elements of a Triton type."""
    scalar = dtype.scalar
    if scalar.is_ptr():
        return _POINTER
    if scalar.name not in _NUMPY_DTYPES:
        raise NotImplementedError(f"the interpreter has no {scalar}")
    return _NUMPY_DTYPES[scalar.name]


class Tile:
    """A numpy array, of shape (1,) for scalars, with the Triton type of its elements.

    A tile of pointers also knows its origin: the number, among the launch's tensors, of the one that they point into.
    """

    __slots__ = ("data", "dtype", "origin")

    def __init__(self, data: np.ndarray, dtype: tl.dtype, origin: int | None = None) -> None:
        self.data = data
        self.dtype = dtype
        self.origin = origin

    def __bool__(self) -> bool:
        return bool(self.data.all())

    def get_element_ty(self) -> tl.dtype:
        dtype = self.dtype
        while hasattr(dtype, "element_ty"):
            dtype = dtype.element_ty
        return dtype

    def clone(self) -> Tile:
        return Tile(self.data.copy(), self.dtype, self.origin)


def scalar(value: float, dtype: tl.dtype) -> tl.tensor:
    return tl.tensor(Tile(np.array([value]).astype(numpy_dtype(dtype)), dtype), dtype)


def tensor(array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """An array as a value of the language; without dimensions, as a scalar."""
    array = array.astype(numpy_dtype(dtype), copy=False)
    if array.ndim == 0:
        return tl.tensor(Tile(array.reshape(1), dtype), dtype)
    return tl.tensor(Tile(array, dtype), tl.block_type(dtype, list(array.shape)))
