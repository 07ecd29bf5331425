"""The shipped cases cover every kernel."""

import importlib
import pkgutil
from pathlib import Path

import pytest
import triton

import fasttrain_kernels
from fasttrain_kernels.testing.compiled import rules
from fasttrain_kernels.testing.targets import TARGETS

STORED = Path(__file__).parents[4] / "bench" / "results" / "compiled.json"


def kernels_in_the_library() -> set[str]:
    found = set()
    for module in pkgutil.walk_packages(fasttrain_kernels.__path__, "fasttrain_kernels."):
        if ".testing" not in module.name and not module.name.endswith("__main__"):
            members = vars(importlib.import_module(module.name)).values()
            found |= {
                m.__name__ for m in members if isinstance(m, triton.JITFunction) and m.__name__.endswith("_kernel")
            }
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_of_the_library_has_stored_figures(target):
    _, figures = rules.read(STORED)
    stored = {key.split(": ")[1].split("#")[0] for op in figures[target].values() for key in op}
    assert stored == kernels_in_the_library()
