"""C++ for CPUs, where torch's own ops leave some of the processor's speed unused: products, attention, softmax of rows.

Compiled by the machine's g++ or clang++ (or by CXX) for its own processor when first needed, in a few seconds, and kept
in the user's cache: ~/.cache/fasttrain, or $XDG_CACHE_HOME/fasttrain. Without a compiler, ops take their form in torch
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

import torch
from torch import Tensor

_SOURCES = [
    Path(__file__).with_name(name) for name in ("simd.h", "tile.h", "product.cpp", "attention.cpp", "softmax.cpp")
]
# contract: fused multiply and add, which compilers other than GCC do not assume
_OPTIONS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-Wno-psabi"]


class Matrix(ctypes.Structure):
    """As in product.cpp."""

    _fields_ = [("x", ctypes.c_void_p), ("row", ctypes.c_int64), ("column", ctypes.c_int64)]


class Strides(ctypes.Structure):
    """As in attention.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "token", "head")]


class Problem(ctypes.Structure):
    """As in attention.cpp."""

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
    """Why there is no native code on this machine; empty: there is."""
    return _missing()


def has_faster_products() -> bool:
    """Whether `product` is faster than torch's BLAS: measured against MKL on AMD's processors with AVX2 (docs/log.md).

    A rule, not a race at the start of a run: a run that is continued has to choose as before.
    """
    return _has_faster_products()


# All that torch.compiler.assume_constant_result does, but the decorator imports torch._dynamo, which takes seconds.
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_faster_products._dynamo_marked_constant = True  # type: ignore[attr-defined]


def product(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:  # (M, K), (K, N), (M, N), all float32
    """out = a @ b, or out += a @ b. A row of out lies side by side; it overlaps neither a nor b."""
    (M, K), N = a.shape, b.shape[1]
    sizes = (ctypes.c_int64(size) for size in (M, N, K))
    operands = (ctypes.byref(Matrix(x.data_ptr(), *x.stride())) for x in (a, b))
    _library().product(
        *sizes, *operands, _pointer(out), ctypes.c_int64(out.stride(0)), accumulate, torch.get_num_threads()
    )


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
    stats: Tensor,  # (2, H, B * T_q), contiguous
    gradients: tuple[Tensor, Tensor, Tensor],  # as q, k, v, contiguous
) -> None:
    """Fill the gradient of q, and add to those of k and v."""
    given = [argument for x in (dout, q, k, v) for argument in _strided(x)]
    _library().attention_backward(ctypes.byref(problem), *given, *map(_pointer, stats), *map(_pointer, gradients))


def softmax_rows(x: Tensor) -> tuple[Tensor, Tensor]:  # (R, C) float32 -> (R,), (R,)
    """Softmax of each row in place; its greatest value and the sum of exp(x - greatest)."""
    rows, columns = x.shape
    top, total = x.new_empty(rows), x.new_empty(rows)
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
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody has a home directory
        return str(error)
    return ""


@functools.cache
def _has_faster_products() -> bool:
    known = {key.strip(): value.split() for key, _, value in (line.partition(":") for line in _cpuinfo())}
    flags = known.get("flags", [])
    measured = known.get("vendor_id") == ["AuthenticAMD"] and {"avx2", "fma"} <= set(flags) and "avx512f" not in flags
    return measured and not missing()


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = _compiler()
    known = [*_OPTIONS, *compiler, os.stat(compiler[0]).st_mtime_ns, _processor(), *(f.read_text() for f in _SOURCES)]
    digest = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fasttrain", f"native-{digest}.so")
    return ctypes.CDLL(str(kept)) if os.path.exists(kept) else _built(compiler, kept)  # False where we may not look


def _built(compiler: list[str], kept: Path) -> ctypes.CDLL:
    """Under another name first, as several processes may be at it; for this process alone if nobody may write there."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        room = tempfile.TemporaryDirectory(dir=kept.parent)
    except OSError:
        room = tempfile.TemporaryDirectory()
    with room as directory:
        made = Path(directory, kept.name)
        sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
        result = subprocess.run([*compiler, *_OPTIONS, *sources, "-o", str(made)], capture_output=True, text=True)
        if result.returncode:
            raise OSError(f"{compiler[0]} cannot compile fasttrain_kernels/native: {result.stderr.strip()[:500]}")
        library = ctypes.CDLL(str(made))  # stays, whatever becomes of the file
        with contextlib.suppress(OSError):
            made.rename(kept)
    return library


def _compiler() -> list[str]:
    """Its path, and arguments that CXX may have."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for name, *arguments in [asked] if asked else (["g++"], ["clang++"]):
        if path := shutil.which(name):
            return [path, *arguments]
    raise FileNotFoundError(f"there is no C++ compiler ({f'CXX={asked[0]}' if asked else 'g++'})")


def _processor() -> str:
    """What -march=native depends on: a cache may be shared by several machines."""
    flags = (line for line in _cpuinfo() if line.startswith(("flags", "Features")))
    return next(flags, platform.machine() + platform.processor())


def _cpuinfo() -> list[str]:
    """What Linux says of the first processor."""
    try:
        return Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return []
