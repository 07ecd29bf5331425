"""The kernels of Triton's tutorials, which no package contains: of a checkout (python -m tests.held_out --tutorials).

A tutorial measures on a GPU when it is imported. Its functions and configurations are imported without the rest.
"""

from __future__ import annotations

import ast
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from tests.held_out.cases import case, randn

KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
CONFIGURATIONS = ("configs", "NUM_STAGES_OPTIONS", "HAS_", "TORCH_HAS")  # names of assignments that functions need
_directory = tempfile.TemporaryDirectory()


def add_tutorials(checkout: Path) -> None:
    """Register the cases; `checkout` is python/tutorials of Triton's repository."""
    sys.path.insert(0, _directory.name)
    for path in sorted(checkout.glob("[01][0-9]-*.py")):
        _write(path, Path(_directory.name) / f"tutorial_{path.name[:2]}.py")
    _add_cases()


def _write(path: Path, to: Path) -> None:
    text = path.read_text()
    kept = []
    for node in ast.parse(text).body:
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        wanted = isinstance(node, KEPT) and not getattr(node, "name", "").startswith(("test", "bench"))
        chosen = isinstance(node, ast.If) and "NUM_STAGES_OPTIONS" in ast.unparse(node)
        if wanted or chosen or (name.startswith(CONFIGURATIONS) and "line_vals" not in ast.unparse(node)):
            decorators = getattr(node, "decorator_list", [])
            first = decorators[0].lineno if decorators else node.lineno
            kept += [*text.splitlines()[first - 1 : node.end_lineno], ""]
    to.write_text("\n".join(kept).replace("DEVICE", '"cpu"').replace("import tabulate", ""))


def tutorial(number: str, name: str, *rest: Any) -> Callable[..., Any]:
    """A function of a tutorial, or the apply of an autograd.Function."""

    def op(**inputs: Tensor) -> Any:
        function = getattr(importlib.import_module(f"tutorial_{number}"), name)
        return getattr(function, "apply", function)(*inputs.values(), *rest)

    return op


def _halves(*shapes: tuple[int, ...], grad: bool = False) -> list[Tensor]:
    return [torch.randn(shape).half().requires_grad_(grad) for shape in shapes]


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float()


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float().T


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, scale=0.5)


def _eighths(heads: int) -> dict[str, Tensor]:
    """v as the kernel takes it: its features far apart."""
    q, k, v = (torch.randn(1, heads, 256, 64) / 2 for _ in "qkv")
    v = v.transpose(2, 3).contiguous().transpose(2, 3)
    return {name: x.to(torch.float8_e5m2) for name, x in zip("qkv", (q, k, v), strict=True)}


def _eighths_forward(**inputs: Tensor) -> Tensor:
    return tutorial("06", "_attention", True, 0.5, False)(**inputs).float()


def _asin(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    importlib.import_module("tutorial_07").asin_kernel[(1,)](x, out, x.numel(), BLOCK_SIZE=128)
    return out


def _add_cases() -> None:
    names = lambda a, b: dict(zip("ab", _halves(a, b), strict=True))  # noqa: E731
    case("tutorial 03 matmul", tutorial("03", "matmul"), _product, lambda: names((100, 96), (96, 130)))
    case(
        "tutorial 05 layer_norm",
        lambda x, w, b: tutorial("05", "LayerNorm")(x=x, shape=(300,), w=w, b=b, eps=1e-5),
        lambda x, w, b: F.layer_norm(x, (300,), w, b, 1e-5),
        lambda: dict(x=randn(20, 300), w=randn(300), b=randn(300)),
    )
    for specialised in (False, True):
        case(
            f"tutorial 06 attention{', warp-specialised' if specialised else ''}",
            tutorial("06", "_attention", True, 0.5, specialised),
            _attention,
            lambda: dict(zip("qkv", _halves(*[(1, 2, 256, 64)] * 3, grad=True), strict=True)),
        )
    case("tutorial 06 attention, fp8", _eighths_forward, _attention, lambda: _eighths(1), tolerance=0.1)
    case(
        "tutorial 06 attention, fp8, two heads", _eighths_forward, _attention, lambda: _eighths(2), tolerance=0.1,
        wrong="the descriptor of v takes a head's first feature for the next head; its test allows an error of 3",
    )  # fmt: skip
    case("tutorial 07 libdevice", _asin, torch.asin, lambda: dict(x=torch.rand(100)))
    for name, *rest in (
        ("matmul_tma", False), ("matmul_tma", True), ("matmul_tma_persistent", False), ("matmul_tma_persistent", True),
        ("matmul_descriptor_persistent", False), ("matmul_descriptor_persistent", True),
    ):  # fmt: skip
        title = f"tutorial 09 {name}{', warp-specialised' if rest[0] else ''}"
        case(title, tutorial("09", name, *rest), _transposed_product, lambda: names((256, 192), (320, 192)))
    case(
        "tutorial 09 matmul_persistent",
        tutorial("09", "matmul_persistent"),
        _product,
        lambda: names((256, 96), (96, 300)),
    )
    vectors = lambda: dict(input=torch.rand(300), other=torch.rand(300))  # noqa: E731
    case("tutorial 11 dependent launch", tutorial("11", "add"), torch.add, vectors)


def as_if_on(target: str) -> None:
    """Tutorials ask torch for the device."""
    arch = int(target.removeprefix("sm_"))
    properties = type("Properties", (), {"multi_processor_count": 4})
    torch.cuda.get_device_capability = lambda *_: (arch // 10, arch % 10)
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
