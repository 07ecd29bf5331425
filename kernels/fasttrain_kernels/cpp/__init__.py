"""CPU implementations in C++, where torch's own ops leave speed unused: matmul, attention, softmax of rows, and the
streaming ops (streaming.py).

They are compiled by the machine's g++ or clang++ (or by CXX) for its own processor when first needed, in a few seconds,
and kept in the user's cache: ~/.cache/fasttrain, or $XDG_CACHE_HOME/fasttrain. Without a compiler, ops use torch
(`missing` says why).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HEADERS = ("simd.h", "tile.h", "rows.h")
_UNITS = ("matmul.cpp", "attention.cpp", "softmax.cpp", "norm.cpp", "rope.cpp", "swiglu.cpp")
_SOURCES = [Path(__file__).with_name(name) for name in (*_HEADERS, *_UNITS)]
# contract: fused multiply and add, which compilers other than GCC do not assume
_OPTIONS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-Wno-psabi"]


class Matrix(ctypes.Structure):
    """The struct of that name in matmul.cpp."""

    _fields_ = [("x", ctypes.c_void_p), ("row", ctypes.c_int64), ("column", ctypes.c_int64)]


class Strides(ctypes.Structure):
    """The struct of that name in simd.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "token", "head")]


class AttentionArgs(ctypes.Structure):
    """The struct of that name in attention.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "num_queries", "num_keys", "num_heads", "num_kv_heads", "head_dim")
        ),
        ("scale", ctypes.c_float),
        ("lo", ctypes.c_void_p),
        ("hi", ctypes.c_void_p),
        ("threads", ctypes.c_int),
    ]


def missing() -> str:
    """Return why there is no C++ on this machine, or "" if there is."""
    return _missing()


def faster_matmuls() -> tuple[int, int] | None:
    """The least rows and columns, and multiplications, from which `matmul` is faster than torch's BLAS: measured
    against MKL on AMD's processors up to Zen 5 (docs/log.md). None: it never is.

    A rule, not a measurement at the start of a run: a resumed run has to choose as before.
    """
    return _faster_matmuls()


# All that torch.compiler.assume_constant_result does, but the decorator imports torch._dynamo, which takes seconds.
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]
faster_matmuls._dynamo_marked_constant = True  # type: ignore[attr-defined]


def matmul(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:  # (M, K), (K, N), (M, N), all float32
    """Write out = a @ b, or add a @ b to out. Rows of out are contiguous; it overlaps neither a nor b."""
    (M, K), N = a.shape, b.shape[1]
    A, B = Matrix(a.data_ptr(), *a.stride()), Matrix(b.data_ptr(), *b.stride())
    _matmul()(
        M, N, K, ctypes.byref(A), ctypes.byref(B), out.data_ptr(), out.stride(0), accumulate, torch.get_num_threads()
    )


@functools.cache
def _matmul() -> Any:
    function = library().matmul  # ctypes converts its arguments itself: 3 us less than in Python
    sizes, matrices = [ctypes.c_int64] * 3, [ctypes.POINTER(Matrix)] * 2
    function.argtypes = [*sizes, *matrices, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    return function


def attention_forward(
    args: AttentionArgs,
    q: Tensor,  # (B, T_q, H, D) float32, as all tensors; elements of a head contiguous
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    out: Tensor,  # (B, T_q, H, D), contiguous
    lse: Tensor,  # (2, H, B * T_q), contiguous
) -> None:
    """Fill out and lse (the maximum and 1 / sum of each row)."""
    given = [argument for x in (q, k, v) for argument in _strided(x)]
    library().attention_forward(ctypes.byref(args), *given, _pointer(out), *map(_pointer, lse))


def attention_backward(
    args: AttentionArgs,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,  # (2, H, B * T_q), contiguous
    gradients: tuple[Tensor, Tensor, Tensor],  # as q, k, v, contiguous
) -> None:
    """Fill the gradient of q, and add to those of k and v."""
    given = [argument for x in (dout, q, k, v) for argument in _strided(x)]
    library().attention_backward(ctypes.byref(args), *given, *map(_pointer, lse), *map(_pointer, gradients))


def softmax_rows(x: Tensor) -> tuple[Tensor, Tensor]:  # (R, C) float32 -> (R,), (R,)
    """Softmax of each row in place; returns its maximum and the sum of exp(x - maximum)."""
    rows, columns = x.shape
    top, total = x.new_empty(rows), x.new_empty(rows)
    sizes = (ctypes.c_int64(size) for size in (rows, columns, x.stride(0)))
    library().softmax_rows(_pointer(x), *sizes, _pointer(top), _pointer(total), torch.get_num_threads())
    return top, total


def _strided(x: Tensor) -> tuple[ctypes.c_void_p, object]:
    return _pointer(x), ctypes.byref(Strides(*x.stride()[:3]))


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


@functools.cache
def _missing() -> str:
    try:
        library()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        return str(error)
    return ""


@functools.cache
def _faster_matmuls() -> tuple[int, int] | None:
    known = {key.strip(): value.split() for key, _, value in (line.partition(":") for line in _cpuinfo())}
    flags, family = set(known.get("flags", [])), known.get("cpu family")
    if known.get("vendor_id") != ["AuthenticAMD"] or not {"avx2", "fma"} <= flags or missing():
        return None
    if "avx512f" not in flags or family == ["25"]:  # up to Zen 3, and Zen 4, whose units have 256 bits
        return 96, 1 << 25  # MKL does not pack the operands of smaller ones
    return (32, 1 << 19) if family == ["26"] else None  # Zen 5: MKL computes with half of each unit


@functools.cache
def library() -> ctypes.CDLL:
    """Return all of the C++, compiled now or before."""
    compiler = _compiler()
    known = [*_OPTIONS, *compiler, os.stat(compiler[0]).st_mtime_ns, _processor(), *(f.read_text() for f in _SOURCES)]
    digest = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fasttrain", f"cpp-{digest}.so")
    return ctypes.CDLL(str(kept)) if os.path.exists(kept) else _built(compiler, kept)  # False where it is not readable


def _built(compiler: list[str], kept: Path) -> ctypes.CDLL:
    """Build under a temporary name, as several processes may do so at once; only for this process if the cache is not
    writable."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=kept.parent)
    except OSError:
        temporary = tempfile.TemporaryDirectory()
    with temporary as directory:
        made = Path(directory, kept.name)
        sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
        result = subprocess.run([*compiler, *_OPTIONS, *sources, "-o", str(made)], capture_output=True, text=True)
        if result.returncode:
            raise OSError(f"{compiler[0]} cannot compile fasttrain_kernels/cpp: {result.stderr.strip()[:500]}")
        library = ctypes.CDLL(str(made))  # stays loaded, whatever becomes of the file
        with contextlib.suppress(OSError):
            made.rename(kept)
    return library


def _compiler() -> list[str]:
    """The compiler's path, and the arguments in CXX."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for name, *arguments in [asked] if asked else (["g++"], ["clang++"]):
        if path := shutil.which(name):
            return [path, *arguments]
    raise FileNotFoundError(f"there is no C++ compiler ({f'CXX={asked[0]}' if asked else 'g++'})")


def _processor() -> str:
    """Return what -march=native depends on: a cache may be shared by several machines."""
    flags = (line for line in _cpuinfo() if line.startswith(("flags", "Features")))
    return next(flags, platform.machine() + platform.processor())


def _cpuinfo() -> list[str]:
    """Return what Linux says of the first processor."""
    try:
        return Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return []
