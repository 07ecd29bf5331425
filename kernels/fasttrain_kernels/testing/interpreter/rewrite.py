"""A @triton.jit function as a Python function that the interpreter can call.

Triton's compiler gives three things a meaning that Python does not: an assignment makes a tensor of a number, `range`
counts in tensors, and min and max compare tensors. The function is therefore compiled again from its source with those
replaced. They reach it as free variables, so the namespace of the kernel's module stays as it is.
"""

from __future__ import annotations

import ast
import builtins
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction

from fasttrain_kernels.testing.interpreter.tiles import scalar

_FACTORY = "_interpreted"
_AS_TENSOR = "_as_tensor"


class Rewriter:
    """Rewrites functions once and remembers them."""

    def __init__(self, semantic: TritonSemantic) -> None:
        self._semantic = semantic
        self._builtins: dict[str, Callable[..., Any]] = {
            "range": self.range,
            "min": self._extremum(tl.core.builtin_min, builtins.min),
            "max": self._extremum(tl.core.builtin_max, builtins.max),
        }
        self._rewritten: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()

    def __call__(self, kernel: JITFunction) -> Callable[..., Any]:
        function = self._rewritten.get(kernel.fn)
        if function is None:
            function = self._rewritten[kernel.fn] = self._compile(kernel)
        return function

    def _compile(self, kernel: JITFunction) -> Callable[..., Any]:
        python = kernel.fn
        definition = _Assignments().visit(kernel.parse().body[0])
        ast.increment_lineno(definition, kernel.starting_line_number - 1 + _lines_of_decorators(kernel))
        injected = {name: value for name, value in self._builtins.items() if name not in python.__globals__}
        injected[_AS_TENSOR] = self.as_tensor
        for name, cell in zip(python.__code__.co_freevars, python.__closure__ or (), strict=True):
            injected[name] = cell.cell_contents
        code = compile(_factory(definition, list(injected)), python.__code__.co_filename, "exec")
        namespace: dict[str, Any] = {}
        exec(code, python.__globals__, namespace)
        return namespace[_FACTORY](**injected)

    def as_tensor(self, value: Any) -> Any:
        """Convert as an assignment does: a number to a tensor, anything else as it is."""
        if isinstance(value, tl.tensor):
            return value
        if type(value) in (tuple, tl.tuple):
            return type(value)(self.as_tensor(item) for item in value)
        return self._semantic.to_tensor(value, False)

    def range(self, *bounds: Any) -> Iterator[tl.tensor]:
        """A loop whose counter is a tensor of the bounds' type, as on the GPU: an int32 counter overflows like one."""
        start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        tensors = [self._semantic.to_tensor(bound) for bound in (start, end, step)]
        for bound in tensors:
            if bound.type.is_block() or not bound.dtype.is_int():
                raise TypeError(f"the bounds and the step of a loop must be integer scalars, got {bound.type}")
        dtype = tensors[0].dtype
        for bound in tensors[1:]:
            dtype = self._semantic.integer_promote_impl(dtype, bound.dtype)
        for counter in builtins.range(*(int(bound.handle.data.item()) for bound in tensors)):
            yield scalar(counter, dtype)

    def _extremum(self, of_tensors: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
        def extremum(*values: Any) -> Any:
            if any(isinstance(value, tl.tensor) for value in values):
                return of_tensors(*values, _semantic=self._semantic)
            return of_numbers(*(value.value if isinstance(value, tl.constexpr) else value for value in values))

        return extremum


class _Assignments(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if len(node.targets) > 1:
            raise SyntaxError("a kernel cannot assign to several targets at once: a = b = value")
        node.value = _tensor_of(node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        value = ast.copy_location(ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value), node)
        return ast.copy_location(ast.Assign([node.target], _tensor_of(value)), node)


def _tensor_of(value: ast.expr) -> ast.expr:
    call = ast.Call(ast.Name(_AS_TENSOR, ast.Load()), [value], [])
    return ast.fix_missing_locations(ast.copy_location(call, value))


def _factory(definition: ast.AST, parameters: list[str]) -> ast.Module:
    assert isinstance(definition, ast.FunctionDef)
    arguments = ast.arguments([], [ast.arg(name) for name in parameters], None, [], [], None, [])
    body: list[ast.stmt] = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
    factory = ast.copy_location(ast.FunctionDef(_FACTORY, arguments, body, [], None), definition)
    return ast.fix_missing_locations(ast.Module([factory], []))


def _lines_of_decorators(kernel: JITFunction) -> int:
    for count, line in enumerate(kernel.raw_src):
        if re.match(r"\s*def\s", line):
            return count
    raise AssertionError("a function without def")
