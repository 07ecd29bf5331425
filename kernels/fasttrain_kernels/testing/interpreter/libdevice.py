"""Functions of CUDA's libdevice, in numpy. `tl.extra.libdevice` and Triton's interpreter have only stubs of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Function = Callable[..., np.ndarray]


def function_of(symbol: str) -> Function:
    """The function behind a symbol of the library: __nv_tanhf (float) and __nv_tanh (double) are one."""
    name = symbol.removeprefix("__nv_")
    for candidate in (
        name,
        name.removesuffix("f"),
        name.removesuffix("d"),
        name.replace("f_", "_"),
        name.replace("d_", "_"),
    ):
        if candidate in FUNCTIONS:
            return FUNCTIONS[candidate]
    raise NotImplementedError(f"the interpreter does not know libdevice's {symbol}")


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return np.reciprocal(np.sqrt(x))


def _through_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    return lambda x: function(torch.from_numpy(np.ascontiguousarray(x))).numpy()


FUNCTIONS: dict[str, Function] = dict(
    abs=np.abs,
    acos=np.arccos,
    acosh=np.arccosh,
    add_rn=np.add,
    asin=np.arcsin,
    asinh=np.arcsinh,
    atan=np.arctan,
    atan2=np.arctan2,
    atanh=np.arctanh,
    cbrt=np.cbrt,
    ceil=np.ceil,
    copysign=np.copysign,
    cos=np.cos,
    cosh=np.cosh,
    div_rn=np.divide,
    erf=_through_torch(torch.erf),
    erfc=_through_torch(torch.erfc),
    erfinv=_through_torch(torch.erfinv),
    exp=np.exp,
    exp10=lambda x: np.power(np.array(10, x.dtype), x),
    exp2=np.exp2,
    expm1=np.expm1,
    fabs=np.abs,
    fast_cos=np.cos,
    fast_exp=np.exp,
    fast_fdivide=np.divide,
    fast_log=np.log,
    fast_log2=np.log2,
    fast_pow=np.power,
    fast_sin=np.sin,
    fast_tan=np.tan,
    fast_tanh=np.tanh,
    floor=np.floor,
    fma=lambda x, y, z: x * y + z,
    fma_rn=lambda x, y, z: x * y + z,
    fmax=np.fmax,
    fmin=np.fmin,
    fmod=np.fmod,
    hypot=np.hypot,
    isinf=np.isinf,
    isnan=np.isnan,
    lgamma=_through_torch(torch.lgamma),
    log=np.log,
    log10=np.log10,
    log1p=np.log1p,
    log2=np.log2,
    mul_rn=np.multiply,
    nearbyint=np.rint,
    pow=np.power,
    powi=np.power,
    rcp_rn=np.reciprocal,
    rint=np.rint,
    round=lambda x: np.trunc(x + np.copysign(np.array(0.5, x.dtype), x)),
    rsqrt=_rsqrt,
    rsqrt_rn=_rsqrt,
    saturatef=lambda x: np.clip(x, 0, 1),
    signbit=np.signbit,
    sin=np.sin,
    sinh=np.sinh,
    sqrt=np.sqrt,
    sqrt_rn=np.sqrt,
    sub_rn=np.subtract,
    tan=np.tan,
    tanh=_through_torch(torch.tanh),  # half the error of numpy's: eager's own, as on a GPU, where both call libdevice
    trunc=np.trunc,
)
