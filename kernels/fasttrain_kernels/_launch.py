"""Launching kernels at the least cost to the host.

Triton's own launch binds and classifies its arguments in Python every time: 13 us for ten of them, on a machine that
launches in 2. Small models wait for the host, so the compiled kernel is remembered by what Triton compiles by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fasttrain_kernels import _recorded, _registration

_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants) on the current device; constants come in the same order at every call."""
    if _registration.is_traced():
        torch.library.wrap_triton(kernel)[grid](*args, **constants)
        return
    if _registration.is_simulated() or kernel.pre_run_hooks or _recorded.is_observed():
        _recorded.launched_by_triton()
        kernel[grid](*args, **constants)
        return
    device = torch._C._cuda_getDevice()
    key = (id(kernel), device, *_kind(args), *constants.values())
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[grid](*args, **constants)
        defaults = {parameter.name: parameter.default for parameter in kernel.params}
        rest = tuple((defaults | constants)[name] for name in list(defaults)[len(args) :])
        _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, rest
        _recorded.launched_by_triton()
        return
    run, function, metadata, rest = known
    x, y, z = (*grid, 1, 1)[:3]
    _recorded.launched(run, (x, y, z), function, metadata, (*args, *rest))
    run(x, y, z, torch._C._cuda_getCurrentRawStream(device), function, metadata, None, None, None, *args, *rest)


def _kind(args: tuple[Any, ...]) -> list[Any]:
    """What Triton compiles a kernel anew for."""
    kind: list[Any] = []
    for a in args:
        if isinstance(a, Tensor):
            kind += a.dtype, not a.data_ptr() & 15
        elif type(a) is int:
            kind += a == 1, not a & 15, a >> 31
        else:
            kind.append(type(a))
    return kind


P = ParamSpec("P")
R = TypeVar("R")


def remembered(choose: Callable[P, R]) -> Callable[P, R]:
    """What a launch table chooses for given sizes on a real GPU. A simulated one may change between two calls."""
    kept: Callable[P, R] = functools.lru_cache(maxsize=1024)(choose)  # type: ignore[assignment]

    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        symbolic = any(isinstance(argument, torch.SymInt) for argument in args)  # which have no hash
        return (choose if symbolic or _registration.is_simulated() else kept)(*args, **kwargs)

    return functools.wraps(choose)(chosen)
