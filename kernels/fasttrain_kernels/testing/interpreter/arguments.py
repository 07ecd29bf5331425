"""The arguments of a launch: bound to the kernel's parameters, and converted as Triton's JIT does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor
from triton.backends.amd.compiler import HIPOptions
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.jit import JITFunction, TensorWrapper, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from fasttrain_kernels.testing.interpreter.language import semantic
from fasttrain_kernels.testing.interpreter.tiles import Tile, scalar


def bind(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The value of every parameter; launch options such as num_warps mean nothing to the interpreter."""
    parameters = kernel.signature.parameters
    for name in kwargs:
        if name not in parameters and name not in _launch_options():
            raise TypeError(f"{kernel.fn.__name__}: {name} is neither a parameter of the kernel nor a launch option")
    bound = kernel.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in parameters})
    bound.apply_defaults()
    return {name: tl.core._unwrap_if_constexpr(value) for name, value in bound.arguments.items()}


@functools.cache
def _launch_options() -> set[str]:
    return {*CUDAOptions.__dataclass_fields__, *HIPOptions.__dataclass_fields__}


class Converter:
    """Turns values into what a kernel sees, and collects the tensors among them."""

    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = kernel
        self.tensors: list[tuple[str, Tensor]] = []  # with their names; pointers carry the index into this list

    def __call__(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            parameter.name: self._convert(parameter.name, values[parameter.name], parameter.annotation_type)
            if not parameter.is_constexpr
            else values[parameter.name]
            for parameter in self._kernel.params
        }

    def _convert(self, name: str, value: Any, annotation: str = "") -> Any:
        if isinstance(value, bool | int | float):
            return scalar(value, tl.str_to_ty(annotation or _type_of_number(value), None))
        if isinstance(value, Tensor | TensorWrapper):
            return self._pointer(name, value)
        if isinstance(value, tuple):
            items = [self._convert(f"{name}[{i}]", item) for i, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, TensorDescriptor):
            return semantic.make_tensor_descriptor(
                base=self._pointer(name, value.base),
                shape=list(self._numbers(value.shape)),
                strides=[*self._numbers(value.strides[:-1]), tl.constexpr(1)],
                block_shape=[tl.constexpr(length) for length in value.block_shape],
                padding_option=value.padding,
            )
        return value  # None, functions, dtypes: constants for the compiler too

    def _pointer(self, name: str, value: Tensor | TensorWrapper) -> tl.tensor:
        tensor = value.base if isinstance(value, TensorWrapper) else value
        if tensor.device.type != "cpu":
            kernel = self._kernel.fn.__name__
            raise ValueError(f"{kernel}: {name} is on {tensor.device}; interpret() runs kernels on CPU tensors")
        dtype = tl.str_to_ty(mangle_type(value), None)
        pointer = Tile(np.array([tensor.data_ptr()], np.uint64), dtype, origin=len(self.tensors))
        self.tensors.append((name, tensor))
        return tl.tensor(pointer, dtype)

    def _numbers(self, values: list[int]) -> Iterator[tl.tensor]:
        return (scalar(value, tl.str_to_ty(_type_of_number(value), None)) for value in values)


def _type_of_number(value: float) -> str:
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    if -(2**31) <= value < 2**31:
        return "i32"
    return "i64" if value < 2**63 else "u64"
