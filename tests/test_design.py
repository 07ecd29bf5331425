"""The rules of the design that a number can hold: sizes, names, layers."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "fasttrain").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def test_the_loop_fits_two_screens_and_the_trunk_an_evening() -> None:
    assert lines([ROOT / "fasttrain" / "train" / "loop.py"]) <= 120
    assert lines(sorted((ROOT / "fasttrain" / "train").glob("*.py"))) <= 1100


def test_the_package_stays_small() -> None:
    assert len(SOURCES) <= 150
    assert lines(SOURCES) <= 20_000


def test_a_class_name_exists_once() -> None:
    names = Counter(
        node.name
        for path in [*SOURCES, *KERNELS]
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_a_rollback_is_one_function_and_crosses_few_files() -> None:
    """The modules that its file imports, its own, and the one that calls it."""
    source = (ROOT / "fasttrain" / "train" / "rollback.py").read_text("utf-8")
    tree = ast.parse(source)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert len({name for name in imported if name.startswith("fasttrain")}) + 2 <= 12
    assert sum(isinstance(node, ast.FunctionDef) and node.name == "roll_back" for node in ast.walk(tree)) == 1


def test_imports_have_at_most_nine_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layered = [contract for contract in contracts if contract["type"] == "layers"]
    containers = [name for contract in layered for name in contract["containers"]]
    assert containers == ["fasttrain_kernels", "fasttrain"]
    assert all(len(contract["layers"]) <= 9 for contract in layered)
