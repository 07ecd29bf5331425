"""Shapes of tiles, made once.

Triton builds the shape of every value anew, as a tuple of constexpr objects. In the compiler that is nothing; in an
interpreter it is half of the time. These constructors do what Triton's do, but look shapes up: equal shapes are one
object.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape


@functools.cache
def _block(shape: tuple[int, ...]) -> tuple[tl.tuple, int, str]:
    if not shape:
        raise TypeError("0d block_type is forbidden")
    return tl.tuple(shape), validate_block_shape(shape), str(tl.tuple(shape))


@functools.cache
def _constants(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    numel = 1
    for length in shape:
        numel *= length
    return tl.tuple([tl.constexpr(length) for length in shape]), tl.constexpr(numel)


def block_type_init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    lengths = tuple(length.value if isinstance(length, tl.constexpr) else length for length in shape)
    self.element_ty = element_ty
    self.shape, self.numel, text = _block(lengths)
    self.name = f"<{text}, {element_ty}>"


def tensor_init(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _constants(tuple(type.shape.values) if type.is_block() else ())


@functools.cache
def common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tl.tuple:
    """The shape that two tiles broadcast to."""
    try:
        return _block(np.broadcast_shapes(left, right))[0]
    except ValueError:
        raise ValueError(f"tiles of shapes {left} and {right} do not broadcast") from None
