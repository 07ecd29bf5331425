"""triton.language while kernels are interpreted: what must be replaced, and how it is put back.

Triton's built-in functions refuse to run without the compiler's `_semantic`. They all share one wrapper, so they get a
code object that fills in the interpreter's instead. The function objects stay the same: it does not matter under which
name or from which module a kernel imported them, and the compiler, which passes its own `_semantic`, sees no change.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import triton.compiler.code_generator  # noqa: F401  # it copies functions of tl at its import: before they are replaced
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter as stock

from fasttrain_kernels.testing.interpreter import reductions
from fasttrain_kernels.testing.interpreter.numerics import Builder, Semantic
from fasttrain_kernels.testing.interpreter.rewrite import Rewriter
from fasttrain_kernels.testing.interpreter.shapes import block_type_init, tensor_init
from fasttrain_kernels.testing.interpreter.tiles import Tile, numpy_dtype

builder = Builder()
semantic = Semantic(builder)
rewritten = Rewriter(semantic)

_MISSING = object()


class Replacements:
    """Attributes that are set for a while and restored in reverse order."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        # vars, not getattr: what was inherited is deleted again, not copied into the subclass.
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def set_code(self, function: FunctionType, code: CodeType, keyword_defaults: dict[str, Any]) -> None:
        self._before.append((function, "__code__", function.__code__))
        self._before.append((function, "__kwdefaults__", function.__kwdefaults__))
        function.__code__ = code
        function.__kwdefaults__ = keyword_defaults

    def restore(self) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def replaced(apply: Callable[[Replacements], None]) -> Iterator[None]:
    """Apply replacements for the duration of a block, whatever happens in it."""
    replacements = Replacements()
    try:
        apply(replacements)
        yield
    finally:
        replacements.restore()


def replace_language(replacements: Replacements) -> None:
    """Make triton.language executable on numpy arrays."""
    for function in _builtins():
        replacements.set_code(function, _BUILTIN_CODE, {"_semantic": semantic})
    for function, implementation in _OWN_IMPLEMENTATIONS.items():
        defaults = {"_semantic": semantic, "_interpreter": semantic, "_implementation": implementation}
        replacements.set_code(function, _REPLACED_CODE, defaults)
    for name, stub in inspect.getmembers(libdevice, inspect.isfunction):
        if hasattr(cuda_libdevice, name):
            replacements.set_code(stub, _STUB_CODE, {"_function": getattr(cuda_libdevice, name)})
    replacements.set(tl.range, "__iter__", lambda self: rewritten.range(self.start, self.end, self.step))
    replacements.set(tl.static_range, "__init__", _static_range_init)
    replacements.set(tl.static_range, "__iter__", _static_range_iterator)
    for kind in (tl.dtype, tl.pointer_type, tl.block_type):
        replacements.set(kind, "to_ir", _to_ir(kind.to_ir))
    replacements.set(tl.block_type, "__init__", block_type_init)
    replacements.set(tl.tensor, "__init__", tensor_init)
    replacements.set(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    replacements.set(tl.tensor, "__bool__", _truth)
    replacements.set(tl.tensor, "__repr__", lambda self: f"{self.type} {self.handle.data}")
    replacements.set(tl.tensor, "T", property(lambda self: semantic.permute(self, (1, 0))))
    replacements.set(stock, "TensorHandle", Tile)  # what the parts of Triton's interpreter that we use create
    replacements.set(stock, "_get_np_dtype", numpy_dtype)


@functools.cache
def _builtins() -> list[FunctionType]:
    owners = [tl, tl.core, tl.math, tl.extra.cuda, cuda_libdevice]
    owners += [value for value in vars(tl.core).values() if inspect.isclass(value)]
    code = tl.load.__code__
    found = {
        id(member): member
        for owner in owners
        for member in vars(owner).values()
        if inspect.isfunction(member) and tl.core.is_builtin(member) and member.__code__ is code
    }
    return list(found.values())


def _codes() -> tuple[CodeType, CodeType]:
    def fn(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("only its name matters: in a builtin, fn is the free variable that holds the function")

    def call(*args: Any, _semantic: Any, **kwargs: Any) -> Any:
        return fn(*args, _semantic=_semantic, **kwargs)

    def replace(*args: Any, _semantic: Any, _interpreter: Any, _implementation: Any, **kwargs: Any) -> Any:
        if _semantic is _interpreter:
            return _implementation(*args, **kwargs)
        return fn(*args, _semantic=_semantic, **kwargs)

    return call.__code__, replace.__code__


def _stub(*args: Any, _function: Any, **kwargs: Any) -> Any:
    return _function(*args, **kwargs)


_BUILTIN_CODE, _REPLACED_CODE = _codes()
_STUB_CODE = _stub.__code__
_static_range = tl.static_range.__init__


def _to_ir(compiler_type: Callable[..., Any]) -> Callable[..., Any]:
    # Types need no translation: unlike MLIR's, those of Triton tell signed integers from unsigned ones.
    return lambda dtype, target: dtype if target is builder else compiler_type(dtype, target)


def _truth(tensor: tl.tensor) -> bool:
    # Triton's own code asks `if mask` for "is there a mask": a block is true whatever it holds.
    tile = tensor.handle
    return bool(tile.data.item()) if isinstance(tile, Tile) and tile.data.size == 1 else True


def _static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise AssertionError(f"tl.static_assert failed: {message}")


def _hint(x: Any, values: Any) -> Any:
    return x


def _multiple_of(x: Any, values: Any) -> Any:
    # The compiler believes it, and a scalar that is none makes wide accesses go wrong.
    tensor, multiple = semantic.to_tensor(x), tl.core._unwrap_if_constexpr(values)
    if isinstance(multiple, int) and not tensor.type.is_block() and int(tensor.handle.data.item()) % multiple:
        raise AssertionError(f"tl.multiple_of: {tensor.handle.data.item()} is not a multiple of {multiple}")
    return x


def _reduce(operand: Any, axis: int | None, combine_fn: Any, *args: Any, **kwargs: Any) -> Any:
    result = reductions.reduce(operand, axis, combine_fn, *args, **kwargs)
    if combine_fn.fn in reductions.BY_NUMPY and operand.dtype.is_floating():  # others run the kernel's own function
        builder.memory.launch.elementwise += operand.handle.data.size - result.handle.data.size
    return result


def _static_range_init(self: Any, *bounds: Any, **kwargs: Any) -> None:
    _static_range(self, *map(_constexpr, bounds), **{name: _constexpr(value) for name, value in kwargs.items()})


def _static_range_iterator(self: Any) -> Iterator[int]:
    return iter(builtins.range(self.start.value, self.end.value, self.step.value))


def _constexpr(value: Any) -> Any:
    return tl.constexpr(value) if isinstance(value, int) else value


# Functions that Triton's compiler handles itself, or that take a function of the kernel's.
_OWN_IMPLEMENTATIONS: dict[FunctionType, Callable[..., Any]] = {
    tl.core.reduce: _reduce,
    tl.core.associative_scan: reductions.associative_scan,
    tl.core.static_assert: _static_assert,
    tl.core.static_print: print,
    tl.core.multiple_of: _multiple_of,
    tl.core.max_contiguous: _hint,
    tl.core.max_constancy: _hint,
}
