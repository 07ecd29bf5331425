"""One registered torch op per public function, and one per gradient.

An op has a Triton launcher for CUDA tensors, an implementation for CPU (and MPS) tensors, a fake (shapes only, for
torch.compile) and a gradient. The device of the tensors decides at the call which of the first two runs. Autograd is
registered on the op itself, so that torch.compile(fullgraph=True), opcheck and eager code all see the same op.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from fasttrain_kernels._recorded import on_device, recorded


def _digest(package: Path) -> str:
    """Hash all sources that can change a result. The tools for tests, and what calls the public functions, cannot."""
    sources = [f for f in package.rglob("*") if f.suffix in (".py", ".cpp", ".h")]
    callers = {package / "testing", package / "modules.py", package / "huggingface.py", package / "__init__.py"}
    ops = sorted(f for f in sources if not callers & {f, *f.parents})
    return hashlib.sha256(b"".join(f.read_bytes() for f in ops)).hexdigest()[:8]


_LIBRARY = torch.library.Library("fasttrain", "DEF")
# torch.compile's on-disk caches know an op by its name alone: after an upgrade, a graph with the old gradient formula
# would run without a word. So the version is in the name: torch.ops.fasttrain.swiglu.v<digest of the ops' sources>.
_VERSION = _digest(Path(__file__).parent)
_kernels_on_cpu = False
# The GPU that kernels choose tiles and grids for when they are interpreted, or compiled, without one. Shared memory:
# bytes per block on sm_86, sm_89 and sm_120, the smallest; multiprocessors: an H100's.
_simulated = {"shared_memory": 101_376, "warp_size": 32, "multiprocessors": 132, "compute_capability": 86}


@contextlib.contextmanager
def kernels_on_cpu(
    *,
    shared_memory: int | None = None,
    warp_size: int | None = None,
    multiprocessors: int | None = None,
    compute_capability: int | None = None,  # 90 is sm_90; 0: AMD
) -> Iterator[None]:
    """Launch Triton kernels for CPU tensors too; fasttrain_kernels.testing interprets or compiles them.

    Properties that are not given stay as they are outside.
    """
    global _kernels_on_cpu, _simulated
    before = _kernels_on_cpu, _simulated
    given = dict(
        shared_memory=shared_memory,
        warp_size=warp_size,
        multiprocessors=multiprocessors,
        compute_capability=compute_capability,
    )
    _kernels_on_cpu, _simulated = True, _simulated | {k: v for k, v in given.items() if v is not None}
    try:
        yield
    finally:
        _kernels_on_cpu, _simulated = before


def is_simulated() -> bool:
    """Whether kernels are interpreted, or compiled and not run."""
    return _kernels_on_cpu


def runs_triton(tensor: Tensor) -> bool:
    """Whether an op on this tensor launches Triton kernels."""
    return tensor.is_cuda or _kernels_on_cpu


def fused_by_compiler(tensor: Tensor) -> bool:
    """Whether torch.compile is tracing for a CPU. Streaming ops then return their reference.

    Inductor fuses that with its neighbours, but not an op: with ops, a small decoder's step takes about 5% more time
    (bench/test_model.py, "opaque ops").
    """
    return torch.compiler.is_compiling() and not runs_triton(tensor)


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)  # which asks for them anew, 4 us at every launch


def multiprocessor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; persistent kernels size their grid by it."""
    if device.type != "cuda":
        return _simulated["multiprocessors"]
    return _properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; launch tables choose their tiles by it."""
    if device.type != "cuda":
        return _simulated["shared_memory"]
    properties = _properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def compute_capability(device: torch.device) -> int:
    """90 is sm_90; 0: AMD. For the few choices that shared memory does not decide."""
    if device.type != "cuda":
        return _simulated["compute_capability"]
    properties = _properties(device)
    return 0 if torch.version.hip else 10 * properties.major + properties.minor


def warps(threads: int, device: torch.device) -> int:
    """Warps that make up so many threads. A warp has 32 lanes on NVIDIA and 64 on AMD's CDNA."""
    size = _properties(device).warp_size if device.type == "cuda" else _simulated["warp_size"]
    return max(1, threads // size)


def register(
    schema: str,  # "swiglu(Tensor gate, Tensor up) -> Tensor"
    *,
    triton: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    inlined: bool = False,
    repeatable: bool = True,
) -> OpOverload[..., Any]:
    """Register torch.ops.fasttrain.<name>.v<digest> and return it. Without `backward`, differentiating it raises.

    inlined: a graph compiled for a GPU has the launches, not the op.
    repeatable: all that `triton` does are allocations and launches of ours, which are repeated from a recording.
    """
    name = schema.split("(")[0]
    versioned = f"{name}.v{_VERSION}"
    _LIBRARY.define(schema.replace(name, versioned, 1), tags=(torch.Tag.pt2_compliant_tag,))

    def on_cpu(*args: Any) -> Any:
        return triton(*args) if _kernels_on_cpu else cpu(*args)

    by_device = {"cuda": recorded(triton) if repeatable else on_device(triton), "cpu": on_cpu}
    for kind, run in by_device.items():
        _LIBRARY.impl(versioned, run, kind.upper())
    _LIBRARY.impl(versioned, cpu, "MPS")  # torch ops alone: what is in C++ looks at the device
    torch.library.register_fake(f"fasttrain::{versioned}", fake, lib=_LIBRARY)
    torch.library.register_autograd(
        f"fasttrain::{versioned}", backward or _refuse_gradient(name), setup_context=setup_context, lib=_LIBRARY
    )
    if inlined:
        _inline(versioned, triton)
    op = getattr(getattr(torch.ops.fasttrain, name), f"v{_VERSION}")
    _DIRECT[op] = {kind: (run, _applied(name, run, backward, setup_context)) for kind, run in by_device.items()}
    return op


_traced = False


@contextlib.contextmanager
def _shown_to_compiler() -> Iterator[None]:
    global _traced
    _traced = True
    try:
        yield
    finally:
        _traced = False


def is_traced() -> bool:
    """Whether torch.compile is to see launches, and not to make them."""
    return _traced


class _EmptyLike(TorchFunctionMode):
    """Traces allocations as a method of a tensor that no pass of torch turns into a call without one.

    A graph that comes from torch's cache is traced once more, and a call that takes no tensor is made there: the GPU
    would hold a block's activations for nothing, as long as the graph lives.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty:
            size = args
        elif function is Tensor.new_empty:
            size = args[1:]
        else:
            return function(*args, **kwargs)
        size = tuple(size[0]) if size and isinstance(size[0], Sequence) else tuple(size)
        kwargs.setdefault("dtype", torch.get_default_dtype() if function is torch.empty else args[0].dtype)
        strides = torch._prims_common.make_contiguous_strides_for(size)
        # Each of the one before it: equal calls would be one tensor, and copies of it.
        self._tensor = self._tensor.new_empty_strided(size, strides, **kwargs)
        return self._tensor


def _inline(versioned: str, launcher: Callable[..., Any]) -> None:
    """Show torch.compile what an op does for CUDA tensors: allocations and launches, which Inductor then generates.

    A graph calls an op through the dispatcher and Python, which takes the host ten times what a generated launch takes.
    """

    def trace(mode: FunctionalTensorMode, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        on_gpu = next((a for a in args if isinstance(a, Tensor) and a.is_cuda), None)
        if on_gpu is None:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode, _shown_to_compiler(), _EmptyLike(on_gpu):
            return launcher(*args)

    torch.library.register_torch_dispatch(f"fasttrain::{versioned}", FunctionalTensorMode, trace, lib=_LIBRARY)


_PLAIN = {type(None), bool, int, float, list, tuple}
_DIRECT: dict[OpOverload[..., Any], dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {}


def call(op: OpOverload[..., Any], *args: Any) -> Any:
    """op(*args), past the dispatcher where nobody else is to see the op: in eager mode.

    The dispatcher and torch.library's autograd take the host 25 us forward and 50 backward, a launch 2.
    """
    if torch.compiler.is_compiling() or _is_seen():
        return op(*args)
    enabled, differentiated, device = torch.is_grad_enabled(), False, ""
    for a in args:
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            its = "cuda" if a.is_cuda else "cpu" if a.is_cpu else "other"
            if its != (device := device or its) or its == "other":
                return op(*args)
            if enabled and a.requires_grad:
                differentiated = True
        elif kind not in _PLAIN:  # a DTensor, say, or numpy's numbers, which the dispatcher converts
            return op(*args)
    run, apply = _DIRECT[op][device]
    return apply(*args) if differentiated else run(*args)


def _is_seen() -> bool:
    """Whether a mode, a transform or a profiler looks at ops."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
    )


def _applied(
    name: str,
    launcher: Callable[..., Any],
    backward: Callable[..., Any] | None,
    setup_context: Callable[..., None] | None,
) -> Callable[..., Any]:
    """The op with its gradient, as torch.library makes it of them."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = launcher(*args)
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    methods = dict(forward=staticmethod(forward), backward=staticmethod(backward or _refuse_gradient(name)))
    function: Any = type(name, (torch.autograd.Function,), methods)
    # Past Function.apply, which asks about functorch: `call` has asked.
    return super(torch.autograd.Function, function).apply


def _refuse_gradient(name: str) -> Callable[..., Any]:
    # Torch's default for an op without a gradient is a warning and a wrong result.
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{name}: the gradient of this op is not implemented; for double backward use the plain "
            f"{name.removesuffix('_backward').removesuffix('_cpp')}_reference"
        )

    return backward
