"""The package's public names: found when they are first used, and known to type checkers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fasttrain_kernels


def test_type_checkers_see_the_names_that_programs_see():
    tree = ast.parse(Path(fasttrain_kernels.__file__).read_text("utf-8"))
    imported = {
        (node.module.removeprefix("fasttrain_kernels").removeprefix("."), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("fasttrain_kernels")
        for alias in node.names
    }
    listed = {(module, name) for module, names in fasttrain_kernels._MODULES.items() for name in names}
    assert imported == listed | {("", "testing")}
    assert sorted(fasttrain_kernels.__all__) == sorted(fasttrain_kernels._MODULE_OF)


@pytest.mark.parametrize("name", fasttrain_kernels.__all__)
def test_every_name_is_there(name):
    assert getattr(fasttrain_kernels, name).__name__ == name


def test_an_unknown_name_is_named():
    with pytest.raises(AttributeError, match="module 'fasttrain_kernels' has no attribute 'atention'"):
        _ = fasttrain_kernels.atention


def test_the_chunk_rule_needs_no_torch():
    code = (
        "import sys; from fasttrain_kernels import loss_chunk; "
        "print(loss_chunk(8192, 4096, 151_936, dtype='bfloat16', use_triton=True).tokens, 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "8192 False\n"


def test_names_of_the_package_compile_without_a_graph_break():
    """In a fresh process, where nothing has been used yet."""
    code = (
        "import torch, fasttrain_kernels as ft\n"
        "compiled = torch.compile(lambda x: ft.swiglu(ft.rms_norm(x, None)), fullgraph=True, backend='eager')\n"
        "print(tuple(compiled(torch.randn(4, 16)).shape))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "(4, 8)\n"
