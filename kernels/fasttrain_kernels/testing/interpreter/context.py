"""The switch between GPU and interpreter, and the execution of a launch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.testing.autotuned import run_configuration
from fasttrain_kernels.testing.interpreter.arguments import Converter, bind
from fasttrain_kernels.testing.interpreter.language import Replacements, builder, replace_language, replaced, rewritten
from fasttrain_kernels.testing.interpreter.launches import KernelError, Launch, Launches
from fasttrain_kernels.testing.interpreter.memory import GlobalMemory
from fasttrain_kernels.testing.interpreter.tiles import Tile
from fasttrain_kernels.testing.poison import poisoned_memory

_GRID_LIMITS = (2**31 - 1, 65_535, 65_535)  # of CUDA, in x, y and z


@dataclass(frozen=True)
class _Settings:
    launches: Launches
    order: str | int | None
    config: int
    locks: bool


_active: list[_Settings] = []  # innermost last


@contextlib.contextmanager
def interpret(
    *,
    order: str | int | None = None,  # of the programs: None (ascending), "reverse", or the seed of a shuffle
    poison: bool = True,  # uninitialised memory and undefined lanes hold NaN
    tf32: bool = True,  # tl.dot of float32 rounds its operands to tf32 unless input_precision="ieee"
    config: int = 0,  # which of an autotuned kernel's configurations runs
    locks: bool = False,  # programs share elements behind their own locks: no race
) -> Iterator[Launches]:
    """Run every launch of a @triton.jit kernel on CPU tensors, and yield the list of launches."""
    if order not in (None, "reverse") and not isinstance(order, int):
        raise ValueError(f'interpret: order {order!r} must be None, "reverse" or an integer seed')
    if triton.knobs.runtime.interpret:
        raise RuntimeError("interpret: unset TRITON_INTERPRET; it replaces every kernel by Triton's own interpreter")
    launches = Launches()
    before = builder.poison, builder.tf32
    with contextlib.ExitStack() as stack:
        if not _active:
            stack.enter_context(replaced(_replace_everything))
        stack.enter_context(kernels_on_cpu())
        if poison:
            stack.enter_context(poisoned_memory())
        _active.append(_Settings(launches, order, config, locks))
        builder.poison, builder.tf32 = poison, tf32
        try:
            yield launches
        finally:
            _active.pop()
            builder.poison, builder.tf32 = before


def _replace_everything(replacements: Replacements) -> None:
    replace_language(replacements)
    replacements.set(JITFunction, "run", _launch)
    replacements.set(JITFunction, "__call__", _call)
    replacements.set(JITFunction, "__get__", _get)
    replacements.set(Autotuner, "run", _launch_autotuned)


def _call(kernel: JITFunction, *args: Any, _semantic: Any = None, _generator: Any = None, **kwargs: Any) -> Any:
    """A kernel calls another @triton.jit function."""
    return rewritten(kernel)(*args, **kwargs)


def _get(kernel: JITFunction, instance: Any, owner: type | None = None) -> Any:
    """x.sum() and other methods of tensors are @triton.jit functions; the compiler binds them itself."""
    interpreted = isinstance(instance, tl.tensor) and isinstance(instance.handle, Tile)
    return functools.partial(kernel, instance) if interpreted else kernel


def _launch(
    kernel: JITFunction, *args: Any, grid: tuple[int, ...] | Callable[..., Any], warmup: bool, **kwargs: Any
) -> None:
    if warmup:
        return
    for hook in kernel.pre_run_hooks:
        hook(*args, **kwargs)
    values = bind(kernel, args, kwargs)
    settings = _active[-1]
    launch = Launch(kernel.fn.__name__, _grid(kernel, grid(values) if callable(grid) else grid))
    settings.launches.append(launch)
    convert = Converter(kernel)
    arguments = convert(values)
    memory = GlobalMemory(launch, convert.tensors, locks=settings.locks)
    _run_programs(rewritten(kernel), arguments, memory, settings.order)


def _run_programs(
    function: Callable[..., Any], arguments: dict[str, Any], memory: GlobalMemory, order: str | int | None
) -> None:
    builder.memory = memory
    builder.set_grid_dim(*memory.launch.grid)
    try:
        with np.errstate(all="ignore"):  # infinities, NaN and wrapping integers are as silent as on the GPU
            for program in _programs(memory.launch.grid, order):
                memory.program = program
                builder.set_grid_idx(*program)
                function(**arguments)
    except KernelError:
        raise
    except Exception as error:
        raise KernelError(
            f"{memory.launch.kernel}: program {memory.program}: {type(error).__name__}: {error}"
        ) from error
    finally:
        memory.close()


def _programs(grid: tuple[int, int, int], order: str | int | None) -> list[tuple[int, int, int]]:
    programs = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    if order == "reverse":
        programs.reverse()
    elif isinstance(order, int):
        shuffled = np.random.default_rng(order).permutation(len(programs))
        programs = [programs[i] for i in shuffled]
    return programs


def _grid(kernel: JITFunction, grid: tuple[int, ...]) -> tuple[int, int, int]:
    full = tuple(int(n) for n in grid) + (1,) * (3 - len(grid))
    if len(full) != 3 or any(n > limit for n, limit in zip(full, _GRID_LIMITS, strict=True)):
        raise ValueError(f"{kernel.fn.__name__}: grid {full} exceeds the GPU's limit {_GRID_LIMITS}")
    return full


def _launch_autotuned(autotuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
    """Run one configuration instead of measuring all."""
    return run_configuration(autotuner, _active[-1].config, "interpret", *args, **kwargs)
