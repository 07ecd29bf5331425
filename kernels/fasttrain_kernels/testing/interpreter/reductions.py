"""tl.reduce and tl.associative_scan: by numpy for sums, maxima and minima, by the kernel's own function otherwise.

A sum is a tree of halves, as between the lanes of a GPU. numpy's own order adds some tiles one element after the other,
which is several times less accurate than the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.jit import JITFunction

from fasttrain_kernels.testing.interpreter.tiles import numpy_dtype, tensor

_EXTREMES = {
    tl.standard._elementwise_max.fn: np.fmax,
    tl.standard._elementwise_min.fn: np.fmin,
}  # NaN loses, as on a GPU
BY_NUMPY = {*_EXTREMES, tl.standard._sum_combine.fn}
_SCANS = {tl.standard._sum_combine.fn: np.add, tl.standard._prod_combine.fn: np.multiply}

Arrays = list[np.ndarray]  # the operands of a reduction of tuples, side by side


def reduce(
    operand: Any, axis: int | None, combine_fn: JITFunction, keep_dims: bool = False, _generator: object = None
) -> Any:
    operands = _operands(operand)
    rank = len(operands[0].shape)
    axis = tl.core._unwrap_if_constexpr(axis)
    arrays = [x.handle.data for x in operands]
    if axis is None:
        arrays = [array.reshape(-1) for array in arrays]
    position = 0 if axis is None else _checked(axis, rank)
    dtypes = [x.dtype for x in operands]
    if combine_fn.fn in _EXTREMES:
        reduced = [_EXTREMES[combine_fn.fn].reduce(arrays[0], axis=position)]
    elif combine_fn.fn is tl.standard._sum_combine.fn:
        reduced = [_tree_sum(arrays[0], position)]
    else:
        reduced = _tree(arrays, dtypes, position, combine_fn)
    if tl.core._unwrap_if_constexpr(keep_dims):
        shape = [1] * rank if axis is None else list(arrays[0].shape)
        shape[position] = 1
        reduced = [array.reshape(shape) for array in reduced]
    return _like(operand, [tensor(array, dtype) for array, dtype in zip(reduced, dtypes, strict=True)])


def associative_scan(
    operand: Any, axis: int, combine_fn: JITFunction, reverse: bool = False, _generator: object = None
) -> Any:
    operands = _operands(operand)
    axis = _checked(tl.core._unwrap_if_constexpr(axis), len(operands[0].shape))
    backwards = tl.core._unwrap_if_constexpr(reverse)
    arrays = [np.flip(x.handle.data, axis) if backwards else x.handle.data for x in operands]
    dtypes = [x.dtype for x in operands]
    ufunc = _SCANS.get(combine_fn.fn)
    if ufunc is not None:
        scanned = [ufunc.accumulate(arrays[0], axis=axis, dtype=arrays[0].dtype)]
    else:
        scanned = _running(arrays, dtypes, axis, combine_fn)
    if backwards:
        scanned = [np.flip(array, axis) for array in scanned]
    return _like(operand, [tensor(array, dtype) for array, dtype in zip(scanned, dtypes, strict=True)])


def _tree_sum(array: np.ndarray, axis: int) -> np.ndarray:
    array = np.moveaxis(array, axis, 0)
    while len(array) > 1:
        half = len(array) // 2
        array = array[:half] + array[half:]
    return array[0]


def _tree(arrays: Arrays, dtypes: list[tl.dtype], axis: int, combine_fn: JITFunction) -> Arrays:
    """Combine halves until one element is left along the axis: log2(length) calls on whole tiles."""
    while arrays[0].shape[axis] > 1:
        halves = [np.split(array, 2, axis) for array in arrays]
        arrays = _combined(combine_fn, [left for left, _ in halves], [right for _, right in halves], dtypes)
    return [array.squeeze(axis) for array in arrays]


def _running(arrays: Arrays, dtypes: list[tl.dtype], axis: int, combine_fn: JITFunction) -> Arrays:
    """Slice by slice along the axis."""
    slices = [[array.take([i], axis) for array in arrays] for i in range(arrays[0].shape[axis])]
    for i in range(1, len(slices)):
        slices[i] = _combined(combine_fn, slices[i - 1], slices[i], dtypes)
    return [np.concatenate(parts, axis) for parts in zip(*slices, strict=True)]


def _combined(combine_fn: JITFunction, left: Arrays, right: Arrays, dtypes: list[tl.dtype]) -> Arrays:
    results = combine_fn(*(tensor(array, dtype) for array, dtype in zip(left + right, dtypes * 2, strict=True)))
    return [
        result.handle.data.astype(numpy_dtype(dtype), copy=False)
        for result, dtype in zip(_operands(results), dtypes, strict=True)
    ]


def _operands(operand: Any) -> Sequence[tl.tensor]:
    return operand if isinstance(operand, tuple | tl.tuple) else (operand,)


def _like(operand: Any, results: list[tl.tensor]) -> Any:
    return tuple(results) if isinstance(operand, tuple | tl.tuple) else results[0]


def _checked(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a tile with {rank} dimensions")
    return axis % rank
