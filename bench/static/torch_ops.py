"""Torch operations between the launches of an op: a sum, a cast, a fill, a matmul by BLAS.

Such an operation reads its inputs and writes its outputs, once each. That is exact for all but BLAS, whose order is not
known: it is assumed to work in tiles of 128 x 256, each of which reads its rows and columns, by rows or by columns, one
or eight of these together, in the order that moves the fewest bytes past L2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.static.cache import Operand, Result, Tiling
from bench.static.counts import Counts
from fasttrain_kernels.testing import Traffic

BLAS = "BLAS"
_MATMULS = ("mm", "addmm")
_TILE = (128, 256)
_GROUPS = (1, 8)
_NO_TRAFFIC = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "_local_scalar_dense")
_FILLS = ("zeros", "ones", "full", "arange", "new_zeros", "new_full", "zeros_like", "full_like", "zero_", "fill_")
_active: list[TorchOps] = []


class TorchOps(TorchDispatchMode):
    """Collects operations of torch, in order with the launches that `launches` collects."""

    def __init__(self, launches: list[Any]) -> None:
        super().__init__()
        self._launches = launches
        self._taken = 0
        self._events: list[Any] = []

    def events(self) -> list[Any]:
        """Everything so far: launches, and the counts of operations."""
        self._events += self._launches[self._taken :]
        self._taken = len(self._launches)
        return self._events

    def __enter__(self) -> TorchOps:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _active.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            counts = _counts(func.overloadpacket.__name__, args, kwargs or {}, result)
            if counts.issued:
                self.events().append(counts)
        return result


def record_matmul(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """Record a matmul instead of computing it: out = a @ b, or out += a @ b."""
    if _active:
        _active[-1].events().append(_matmul([a, b, out] if accumulate else [a, b], [out]))


def _counts(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Counts:
    if name in _NO_TRAFFIC:
        return Counts(name)
    written = _tensors(kwargs.pop("out", None)) or _tensors(result)
    args = args[1:] if name == "copy_" else args  # it does not read what it overwrites
    inputs = [] if name in _FILLS else _tensors([*args, *kwargs.values()])
    return (
        _matmul(inputs[-2:] + inputs[:-2], written) if name in _MATMULS else _traffic(f"torch {name}", inputs, written)
    )


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _matmul(read: list[Tensor], written: list[Tensor]) -> Counts:
    (M, K), N = read[0].shape, read[1].shape[1]
    counts = _traffic(f"{BLAS} {M}x{K} @ {K}x{N}", read, written, flops=2 * math.prod((M, N, K)))
    for name, tiles in (("in0", -(-N // _TILE[1])), ("in1", -(-M // _TILE[0]))):
        counts.arguments[name] = replace(counts.arguments[name], loaded=tiles * counts.arguments[name].loaded)
    loop = tuple(Operand(f"in{side}", side, read[side].itemsize) for side in (0, 1))
    added = len(read) > 2
    result = Result(("in2", "out0") if added else ("out0",), written[0].itemsize, added)
    orders = [(group, by_columns) for group in _GROUPS for by_columns in (False, True)]
    return replace(counts, tilings=tuple(Tiling(M, N, K, _TILE, (loop,), *order, result) for order in orders))


def _traffic(name: str, read: Sequence[Tensor], written: Sequence[Tensor], flops: int = 0) -> Counts:
    loads = {f"in{i}": Traffic(loaded=x.nbytes, unique=x.nbytes) for i, x in enumerate(read)}
    stores = {f"out{i}": Traffic(stored=x.nbytes, unique=x.nbytes) for i, x in enumerate(written)}
    return Counts(name, loads | stores, flops)
