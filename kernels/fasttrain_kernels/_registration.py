"""One registered torch op per public function, and one per gradient.

An op has a Triton launcher (CUDA tensors), a CPU form, a fake (shapes, for torch.compile and meta tensors) and a gradient.
Which of the first two runs is decided at the call, by the device of the tensors. Autograd is registered on the op itself,
so that torch.compile(fullgraph=True), opcheck and eager code all see the same op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fasttrain", "DEF")
_SIMULATED_SMS = 132  # an H100: the grid that kernels choose when they run, or are compiled, without a GPU
_kernels_on_cpu = False


@contextlib.contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Ops launch their Triton kernels for CPU tensors too; somebody else (fasttrain_kernels.testing) executes the launches."""
    global _kernels_on_cpu
    before, _kernels_on_cpu = _kernels_on_cpu, True
    try:
        yield
    finally:
        _kernels_on_cpu = before


def runs_triton(tensor: Tensor) -> bool:
    """Whether an op on this tensor launches Triton kernels."""
    return tensor.is_cuda or _kernels_on_cpu


def multiprocessor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; persistent kernels size their grid by it."""
    if device.type != "cuda":
        return _SIMULATED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def register(
    schema: str,  # "swiglu(Tensor gate, Tensor up) -> Tensor"
    *,
    triton: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Register torch.ops.fasttrain.<name> and return it. Without `backward`, differentiating it is an error."""
    name = schema.split("(")[0]
    qualified = f"fasttrain::{name}"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def on_cuda(*args: Any) -> Any:
        # A kernel is launched on the current device, which need not be the tensors' one.
        with torch.cuda.device(next(a.device for a in args if isinstance(a, Tensor))):
            return triton(*args)

    def on_cpu(*args: Any) -> Any:
        return triton(*args) if _kernels_on_cpu else cpu(*args)

    _LIBRARY.impl(name, on_cuda, "CUDA")
    _LIBRARY.impl(name, on_cpu, "CPU")
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    torch.library.register_autograd(
        qualified, backward or _refuse_gradient(name), setup_context=setup_context, lib=_LIBRARY
    )
    return getattr(torch.ops.fasttrain, name).default


def _refuse_gradient(name: str) -> Callable[..., Any]:
    # Torch's default for an op without a gradient is a warning and a wrong result.
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{name}: the gradient of this op is not implemented; for double backward use the plain "
            f"{name.removesuffix('_backward')}_reference"
        )

    return backward
