"""C++ for CPUs, where torch's own ops leave much of the processor's speed unused: attention, and softmax of rows.

Compiled by the machine's g++ or clang++ for its own processor when first needed, in about two seconds, and kept in
the user's cache directory. Without a compiler, ops take their form in torch (`missing` says why).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_SOURCES = [Path(__file__).with_name(name) for name in ("simd.h", "attention.cpp", "softmax.cpp")]
# contract: fused multiply and add, which compilers other than GCC do not assume
_OPTIONS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-Wno-psabi"]


class Strides(ctypes.Structure):
    """As in attention.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "token", "head")]


class Problem(ctypes.Structure):
    """As in attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "queries", "keys", "heads", "kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
        ("lo", ctypes.c_void_p),
        ("hi", ctypes.c_void_p),
        ("threads", ctypes.c_int),
    ]


def missing() -> str:
    """Why there is no native code on this machine; empty: there is."""
    return _missing()


# All that torch.compiler.assume_constant_result does, but the decorator imports torch._dynamo, which takes seconds.
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attention_forward(
    problem: Problem,
    q: Tensor,  # (B, T_q, H, D) float32, as all tensors; elements of a head side by side
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    out: Tensor,  # (B, T_q, H, D), contiguous
    stats: Tensor,  # (2, H, B * T_q), contiguous
) -> None:
    """Fill out and stats."""
    given = [argument for x in (q, k, v) for argument in _strided(x)]
    _library().attention_forward(ctypes.byref(problem), *given, _pointer(out), *map(_pointer, stats))


def attention_backward(
    problem: Problem,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # (B, T_q, H, D), contiguous
    stats: Tensor,  # (2, H, B * T_q), contiguous
    gradients: tuple[Tensor, Tensor, Tensor],  # as q, k, v, contiguous
) -> None:
    """Fill the gradients."""
    given = [argument for x in (dout, q, k, v) for argument in _strided(x)]
    _library().attention_backward(
        ctypes.byref(problem), *given, _pointer(out), *map(_pointer, stats), *map(_pointer, gradients)
    )


def softmax_rows(x: Tensor) -> tuple[Tensor, Tensor]:  # (R, C) float32 -> (R,), (R,)
    """Softmax of each row in place; its greatest value and the sum of exp(x - greatest)."""
    rows, columns = x.shape
    top, total = torch.empty(rows), torch.empty(rows)
    sizes = (ctypes.c_int64(size) for size in (rows, columns, x.stride(0)))
    _library().softmax_rows(_pointer(x), *sizes, _pointer(top), _pointer(total), torch.get_num_threads())
    return top, total


def _strided(x: Tensor) -> tuple[ctypes.c_void_p, object]:
    return _pointer(x), ctypes.byref(Strides(*x.stride()[:3]))


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


@functools.cache
def _missing() -> str:
    try:
        _library()
    except OSError as error:
        return str(error)
    return ""


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler (g++)")
    known = [*_OPTIONS, compiler, os.stat(compiler).st_mtime_ns, _processor(), *(f.read_text() for f in _SOURCES)]
    digest = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasttrain"
    built = home / f"native-{digest}.so"
    if not built.exists():
        _build(compiler, built)
    return ctypes.CDLL(str(built))


def _build(compiler: str, target: Path) -> None:
    """Under another name first: several processes may be at it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / target.name
        sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
        result = subprocess.run([compiler, *_OPTIONS, *sources, "-o", str(made)], capture_output=True, text=True)
        if result.returncode:
            raise OSError(f"{compiler} cannot compile fasttrain_kernels/native: {result.stderr.strip()[:500]}")
        made.rename(target)


def _processor() -> str:
    """What -march=native depends on: a cache may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()
