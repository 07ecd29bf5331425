"""The C++ compiler with which torch.compile compiles for a CPU. Asked without the kernels, for `fasttrain doctor`."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path


def cpp_compiler() -> str:
    """Its name or path; empty: there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return shutil.which(get_cpp_compiler()) or ""
    except InvalidCxxCompiler:
        return ""


def missing_compiler() -> str:
    """What torch.compile lacks on this machine; empty: nothing."""
    if not cpp_compiler():
        return "there is no C++ compiler (g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "there are no Python headers (python3-dev)"
    return ""
