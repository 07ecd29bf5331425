"""C++ for CPUs, where torch's own ops leave much of the processor's speed unused: attention, and softmax of rows.

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

_SOURCES = [Path(__file__).with_name(name) for name in ("simd.h", "attention.cpp", "softmax.cpp")]
# contract: fused multiply and add, which compilers other than GCC do not assume
_OPTIONS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-Wno-psabi"]


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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()
