"""Every function outside @triton.jit states its types; mypy checks them."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent


def untyped(tree: ast.Module) -> list[str]:
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f.name for f in functions if not is_kernel(f) and not (f.returns and all(map(is_typed, arguments(f))))]


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]


def is_typed(argument: ast.arg) -> bool:
    return argument.annotation is not None or argument.arg in ("self", "cls")


def test_every_function_outside_kernels_is_typed():
    files = [*ROOT.glob("kernels/**/*.py"), *ROOT.glob("fasttrain/**/*.py")]
    found = {str(f.relative_to(ROOT)): names for f in files if (names := untyped(ast.parse(f.read_text())))}
    assert files
    assert not found
