"""What each attention backend can do, on which GPUs, and which one `auto` takes. No torch: fasttrain plan asks as well.

A cell that is not ours names its source:

    [t]  torch 2.13: aten's flash_attn/flash_api.cpp, sdp_utils.cpp and attention_backward.cu
    [2]  flash-attention 2.8.3: csrc/flash_attn/flash_api.cpp, README
    [3]  flash-attention's hopper/flash_api.cpp; issue #2244: dq differs between runs of the deterministic mode
    [4]  flash-attn-4 4.0.0b36: flash_attn/cute/interface.py

Refusals name fields of the request in braces, filled in when they are printed: under torch.compile values may be
symbols, which have no text.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

# A generation is what kernels are written for. "gpu": any other.
NVIDIA = ("ampere", "ada", "hopper", "blackwell", "blackwell-geforce")
GPUS = (*NVIDIA, "cdna3", "gpu")
EVERYWHERE = (*GPUS, "cpu", "mps")
HALF = ("bfloat16", "float16")


def generation_of(architecture: str) -> str:
    """Of an architecture as `fasttrain plan` names it: smaller cards of two have the kernels of the larger ones."""
    name = architecture.replace("ampere-geforce", "ampere").replace("ada-geforce", "ada")
    return name if name in GPUS else "gpu"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The properties of a call that the choice of a backend depends on."""

    generation: str  # of EVERYWHERE
    dtype: str
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    documents: str = ""  # "cu_seqlens", or "bounds" alone
    softcap: float | None = None
    repeats: bool = True  # gradients are wanted, and every run is to get the same
    torch_repeats: bool = False  # torch.use_deterministic_algorithms(True)
    interpreted: bool = False  # inside fasttrain_kernels.testing.interpret()


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """A row of the table. `also` refuses what no column says."""

    package: str = ""  # that has it; empty: torch or this library
    generations: tuple[str, ...]
    repeats: tuple[str, ...]  # of these, where every run gets the same gradients
    dtypes: tuple[str, ...] = HALF
    head_dims: tuple[int, int] = (8, 256)  # multiples of the one, up to the other
    documents: tuple[str, ...] = ("", "cu_seqlens")
    window: bool = True
    softcap: bool = True
    grouped: bool = True
    also: Callable[[Request], str | None] = lambda request: None

    def refuse(self, request: Request) -> str | None:
        """A sentence, or None: it can, where its package is."""
        step, most = self.head_dims
        if request.generation not in self.generations:
            return f"device {{generation}}: it runs on {', '.join(self.generations)}"
        if request.dtype not in self.dtypes:
            return f"dtype {{dtype}}: it takes {' and '.join(self.dtypes)}"
        if request.head_dim > most:
            return f"head dimension {{head_dim}}: it takes up to {most}"
        if request.head_dim % step:
            return f"head dimension {{head_dim}}: it takes multiples of {step}"
        if request.documents not in self.documents:
            return "documents without cu_seqlens" if "cu_seqlens" in self.documents else "documents"
        if request.window is not None and not self.window:
            return "window={window}"
        if request.softcap is not None and not self.softcap:
            return "softcap={softcap}"
        if request.num_heads != request.num_kv_heads and not self.grouped:
            return "grouped heads"
        if request.repeats and request.generation not in self.repeats:
            return "its gradients differ between runs; deterministic=False allows that"
        return self.also(request)


def installed(package: str) -> bool:
    """Whether a package of vendors' kernels is there. flash_attn is a namespace where flash-attn-4 is alone."""
    return _is_installed(package)


@functools.cache  # looking for files takes 50 us
def _is_installed(package: str) -> bool:
    if package == "flash-attn":
        spec = importlib.util.find_spec("flash_attn")
        return spec is not None and spec.origin is not None
    if package == "flash-attn-3":
        return importlib.util.find_spec("flash_attn_interface") is not None
    try:  # by its name: flash-attn has brought an older flash_attn.cute
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# All that torch.compiler.assume_constant_result does, but the decorator imports torch._dynamo, which takes seconds.
installed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _no_keys(request: Request) -> str | None:
    return "no keys" if request.num_keys == 0 else None


def _fa4(request: Request) -> str | None:
    if request.generation == "blackwell" and request.head_dim > 128:
        if request.head_dim != 256:
            return "head dimension {head_dim}: on Blackwell it takes up to 128, and 256"
        if request.softcap is not None:
            return "softcap={softcap} with a head dimension of 256"
    return _no_keys(request)


def _torch_aligned(request: Request) -> str | None:
    if request.num_keys == 0:
        return "no keys"
    if request.causal and request.num_queries != 1 and request.num_queries != request.num_keys:
        return "causal with {num_queries} queries and {num_keys} keys: it aligns them at the first key"
    return None


def _sdpa(request: Request) -> str | None:
    if (refusal := _torch_aligned(request)) is not None or request.generation not in GPUS:
        return refusal
    if request.num_heads != request.num_kv_heads and request.dtype not in HALF:
        return "grouped heads in {dtype}: torch has no fused kernel and would hold all scores"
    if request.repeats and not request.torch_repeats:
        return "its gradients differ between runs but under torch.use_deterministic_algorithms(True)"
    return None


def _triton(request: Request) -> str | None:
    if request.generation not in GPUS and not request.interpreted:
        return "device {generation}: it runs on GPUs, and on CPU tensors inside fasttrain_kernels.testing.interpret()"
    return None


def _blocked(request: Request) -> str | None:
    return "inside interpret() the op runs its Triton kernels" if request.interpreted else None


def _cpp(request: Request) -> str | None:
    if request.interpreted:
        return _blocked(request)
    if request.num_queries == 1:
        return "a single query: there is no work to share"
    from fasttrain_kernels import cpp  # needs torch

    return cpp.missing().replace("{", "{{").replace("}", "}}") or None  # a compiler's message may quote code


_ALL = ("bfloat16", "float16", "float32", "float64")
_ANY = ("", "cu_seqlens", "bounds")
_NO_LIMIT = (1, 2**31)

TABLE: dict[str, Capabilities] = {
    # [4] line 130: 8 to 256 on Hopper; 135: Blackwell; 2288: no backward before Hopper; 2352: deterministic is refused
    # on sm_120, where all other cards' backward orders its sums by semaphores (2691)
    "fa4": Capabilities(
        package="flash-attn-4",
        generations=("hopper", "blackwell", "blackwell-geforce"),
        repeats=("hopper", "blackwell"),
        also=_fa4,
    ),
    # [3] Other cards than Hopper's are possible, and not what its packages are built for.
    "fa3": Capabilities(package="flash-attn-3", generations=("hopper",), repeats=(), also=_no_keys),
    # [2] line 393: Ampere or newer; 416: head dimensions; 926: deterministic sums dq from one buffer per split
    "fa2": Capabilities(package="flash-attn", generations=(*NVIDIA, "cdna3"), repeats=NVIDIA, also=_no_keys),
    # [t] FlashAttention 2 as above, compiled without softcap. ROCm's own takes no deterministic flag.
    "varlen": Capabilities(generations=(*NVIDIA, "cdna3"), repeats=NVIDIA, softcap=False, also=_no_keys),
    # [t] check_cudnn_deterministic: never; check_cudnn_hardware_support: Ampere or newer
    "cudnn": Capabilities(
        generations=NVIDIA,
        repeats=(),
        head_dims=(8, 128),
        documents=("",),
        window=False,
        softcap=False,
        also=_torch_aligned,
    ),
    # [t] whatever torch picks: of its kernels, flash's and the memory-efficient one's backward add in any order
    "sdpa": Capabilities(
        generations=EVERYWHERE,
        repeats=EVERYWHERE,
        dtypes=_ALL,
        head_dims=_NO_LIMIT,
        documents=("",),
        window=False,
        softcap=False,
        also=_sdpa,
    ),
    "triton": Capabilities(
        generations=EVERYWHERE, repeats=EVERYWHERE, dtypes=_ALL, head_dims=(1, 256), documents=_ANY, also=_triton
    ),
    "cpp": Capabilities(
        generations=("cpu",),
        repeats=("cpu",),
        dtypes=("float32",),
        head_dims=_NO_LIMIT,
        documents=_ANY,
        softcap=False,
        also=_cpp,
    ),
    "blocked": Capabilities(
        generations=("cpu", "mps"),
        repeats=("cpu", "mps"),
        dtypes=_ALL,
        head_dims=_NO_LIMIT,
        documents=_ANY,
        also=_blocked,
    ),
}

# Published backward passes, TFLOP/s (docs/kernels/attention.md): on Hopper and Blackwell FA4 is the fastest that
# repeats; on GeForce Blackwell it is slower than FA2.
PREFERENCE: dict[str, tuple[str, ...]] = {
    "ampere": ("varlen", "fa2", "sdpa", "triton"),
    "ada": ("varlen", "fa2", "sdpa", "triton"),
    "hopper": ("fa4", "fa3", "fa2", "varlen", "sdpa", "triton"),
    "blackwell": ("fa4", "cudnn", "fa2", "varlen", "sdpa", "triton"),
    "blackwell-geforce": ("fa2", "varlen", "sdpa", "triton"),
    "cdna3": ("varlen", "triton", "sdpa"),
    "gpu": ("sdpa", "triton"),
    "cpu": ("cpp", "sdpa", "triton", "blocked"),
    "mps": ("sdpa", "blocked"),
}


def able(request: Request) -> list[str]:
    """Those that auto takes for this, the first that is installed."""
    return [name for name in PREFERENCE[request.generation] if TABLE[name].refuse(request) is None]


def explain(request: Request) -> dict[str, str]:
    """Every backend, auto's order of preference first, with "ok" or what it cannot do."""
    order = dict.fromkeys((*PREFERENCE[request.generation], *TABLE))
    return {name: (_refuse(name, request) or "ok").format(**vars(request)) for name in order}


def _refuse(name: str, request: Request) -> str | None:
    row = TABLE[name]
    if (refusal := row.refuse(request)) is not None or not row.package or installed(row.package):
        return refusal
    return f"the package {row.package} is not installed"


def choose(request: Request, backend: str) -> str:
    """The backend that runs; an error if it cannot."""
    if backend != "auto" and backend not in TABLE:
        raise ValueError(f'attention: backend "{backend}" is unknown; choose from auto, {", ".join(TABLE)}')
    # Inside interpret(), our own kernels are to run.
    order = ("triton", *TABLE) if request.interpreted else PREFERENCE[request.generation]
    for name in order if backend == "auto" else (backend,):
        if _refuse(name, request) is None:
            return name
    answers = explain(request)
    if backend != "auto":
        others = ", ".join(name for name in PREFERENCE[request.generation] if answers[name] == "ok")
        raise ValueError(
            f'attention: backend "{backend}" cannot do this ({answers[backend]}); backends that can: {others or "none"}'
        )
    refusals = "; ".join(f"{name}: {why}" for name, why in answers.items())
    raise ValueError(f"attention: no backend can do this: {refusals}")
