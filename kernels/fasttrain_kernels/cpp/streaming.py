"""The streaming ops in C++: RMSNorm, rotary QK-norm and SwiGLU of float32 rows, forward and backward.

What they compute does not depend on the number of threads. Tensors that are None are not there, or not wanted.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels import cpp

_THREADED = 1 << 15  # elements that are worth waking another thread

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ROWS = [_POINTER, _SIZE]  # a tensor, and the elements from row to row
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm_forward": [*_ROWS, *_ROWS, _POINTER, _FLOAT, _FLOAT, *[_POINTER] * 3, _SIZE, _SIZE, _INT],
    "rms_norm_backward": [*_ROWS, *_ROWS, *_ROWS, _POINTER, _FLOAT, *[_POINTER] * 4, _SIZE, _SIZE, _INT],
    "swiglu_forward": [*_ROWS, *_ROWS, _POINTER, _SIZE, _SIZE, _INT],
    "swiglu_backward": [*_ROWS, *_ROWS, *_ROWS, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT],
    "qk_norm_rope_forward": [_POINTER] * 5,
    "qk_norm_rope_backward": [_POINTER] * 9,
    "outside": [_POINTER, _SIZE, _SIZE],
    "part_rows": [],
}


class _Heads(ctypes.Structure):
    """The struct of that name in rope.cpp."""

    _fields_ = [
        *((name, _SIZE) for name in ("batch", "tokens", "heads", "dim", "half")),
        *((name, _POINTER) for name in ("cos", "sin", "positions")),
        ("positions_batch", _SIZE),
        ("eps", _FLOAT),
        ("threads", _INT),
    ]


def handles(*tensors: Tensor | None) -> bool:
    """Whether these are tensors for the C++: float32 on a CPU, not empty, and a compiler has been found."""
    given = (x for x in tensors if x is not None)
    usual = all(x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() for x in given)
    return usual and not cpp.missing()


def rms_norm_forward(
    x: Tensor,  # (M, N), rows contiguous
    residual: Tensor | None,  # (M, N), rows contiguous
    weight: Tensor | None,  # (N,)
    total: Tensor | None,  # (M, N), contiguous, written where there is a residual
    out: Tensor,  # (M, N), contiguous, written
    rstd: Tensor,  # (M,), written
    *,
    eps: float,
    offset: float,
) -> None:
    weight = None if weight is None else weight.contiguous()
    given = (*_rows(x), *_rows(residual), _address(weight), offset, eps, *map(_address, (total, out, rstd)))
    _function("rms_norm_forward")(*given, *x.shape, _threads(x))


def rms_norm_backward(
    dout: Tensor,  # (M, N), rows contiguous, as those of dtotal and x
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,  # (N,)
    rstd: Tensor,  # (M,)
    dx: Tensor | None,  # (M, N), contiguous, written
    dweight: Tensor | None,  # (N,), written
    *,
    offset: float,
) -> None:
    weight = None if weight is None else weight.contiguous()
    parts = None if dweight is None else _parts(*x.shape)
    given = (*_rows(dout), *_rows(dtotal), *_rows(x), _address(weight), offset)
    written = map(_address, (rstd, dx, parts, dweight))
    _function("rms_norm_backward")(*given, *written, *x.shape, _threads(x))


def swiglu_forward(gate: Tensor, up: Tensor, out: Tensor) -> None:  # (M, F) with contiguous rows; out contiguous
    _function("swiglu_forward")(*_rows(gate), *_rows(up), out.data_ptr(), *gate.shape, _threads(gate))


def swiglu_backward(
    dout: Tensor,  # (M, F), rows contiguous, as those of all others
    gate: Tensor,
    up: Tensor,
    dgate: Tensor | None,  # written, as dup; if both are wanted, with the same stride
    dup: Tensor | None,
) -> None:
    stride = next(grad.stride(0) for grad in (dgate, dup) if grad is not None)
    given = (*_rows(dout), *_rows(gate), *_rows(up), _address(dgate), _address(dup), stride)
    _function("swiglu_backward")(*given, *gate.shape, _threads(gate))


def first_outside(positions: Tensor, size: int) -> int | None:
    """Return the number of the first position that is no row of a table of this size, if there is one."""
    positions = positions.to(torch.int64).contiguous()
    found: int = _function("outside")(positions.data_ptr(), positions.numel(), size)
    return None if found < 0 else found


def qk_norm_rope_forward(
    x: Tensor,  # (B, T, H, D), heads contiguous
    weight: Tensor | None,  # (D,)
    cos: Tensor,  # (S, R/2)
    sin: Tensor,
    positions: Tensor | None,  # (B, T) or (T,)
    out: Tensor,  # (B, T, H, D), contiguous, written
    *,
    eps: float,
) -> None:
    heads = _heads(x, cos, sin, positions, eps)
    weight = None if weight is None else weight.contiguous()
    strides = cpp.Strides(*x.stride()[:3])
    _function("qk_norm_rope_forward")(
        ctypes.addressof(heads), x.data_ptr(), ctypes.addressof(strides), _address(weight), out.data_ptr()
    )


def qk_norm_rope_backward(
    dout: Tensor,  # (B, T, H, D), heads contiguous
    x: Tensor | None,  # as dout, with other strides; not needed without a weight
    weight: Tensor | None,  # (D,)
    cos: Tensor,  # (S, R/2)
    sin: Tensor,
    positions: Tensor | None,  # (B, T) or (T,)
    dx: Tensor | None,  # (B, T, H, D), contiguous, written
    dweight: Tensor | None,  # (D,), written
    *,
    eps: float,
) -> None:
    heads = _heads(dout, cos, sin, positions, eps)
    weight = None if weight is None else weight.contiguous()
    x = dout if x is None else x
    parts = None if dweight is None else _parts(dout.numel() // dout.shape[3], dout.shape[3])
    dout_strides, strides = cpp.Strides(*dout.stride()[:3]), cpp.Strides(*x.stride()[:3])
    _function("qk_norm_rope_backward")(
        *(ctypes.addressof(heads), dout.data_ptr(), ctypes.addressof(dout_strides)),
        *(x.data_ptr(), ctypes.addressof(strides), *map(_address, (weight, dx, parts, dweight))),
    )


def _heads(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float) -> _Heads:
    cos, sin = cos.contiguous(), sin.contiguous()
    positions = None if positions is None else positions.to(torch.int64).contiguous()
    batch = 0 if positions is None or positions.dim() == 1 else positions.stride(0)
    sizes = (*x.shape, cos.shape[1], *map(_address, (cos, sin, positions)), batch)
    heads = _Heads(*sizes, eps, _threads(x))
    heads.kept = (cos, sin, positions)  # as long as their addresses
    return heads


@functools.cache
def _function(name: str) -> Any:
    function = cpp.library()[name]
    function.argtypes = _SIGNATURES[name]
    function.restype = _SIZE if name in ("outside", "part_rows") else None
    return function


@functools.cache
def _part_rows() -> int:
    rows: int = _function("part_rows")()
    return rows


def _parts(rows: int, columns: int) -> Tensor:
    """Room for the parts of a weight's gradient."""
    return torch.empty(-(-rows // _part_rows()), columns)


def _rows(x: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if x is None else (x.data_ptr(), x.stride(0))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() >= _THREADED else 1
