"""Versions, the compiler, optional packages, and the variables that NCCL, CUDA and torch listen to."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

import fasttrain
from fasttrain import config
from fasttrain.distributed.runtime import cpp_compiler, missing_compiler
from fasttrain.tools.doctor import Level, MachineFinding

EXTRAS = {  # extra of pyproject.toml: a package of it, and what it is for
    "tensorboard": ("tensorboard", "curves of runs (log.tensorboard)"),
    "wandb": ("wandb", "curves on Weights & Biases (log.wandb)"),
    "data": ("pyarrow", "fasttrain data prepare: Parquet and .zst"),
    "plot": ("matplotlib", "pictures: fasttrain report --png, data lint --plot"),
    "transformers": ("transformers", "the kernels in Transformers models"),
    "testing": ("ml-dtypes", "Triton kernels without a GPU: make self-check"),
}
PREFIXES = ("NCCL_", "TORCH", "CUDA_", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "GLOO_", "HIP_", "ROCR_")
ON = ("1", "true", "on", "yes")
# Variables that slow down a run or change what it does: value (None: any), what that means
SUSPICIOUS: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "CUDA_LAUNCH_BLOCKING": (ON, "the host waits for every kernel"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("1",), "computing and communication of FSDP cannot overlap freely"),
    "NCCL_P2P_DISABLE": (ON, "GPUs of a node talk through host memory, not NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (ON, "GPUs of a node talk over the network where they have no peer access"),
    "NCCL_IB_DISABLE": (ON, "nodes talk over TCP, not InfiniBand or RoCE"),
    "NCCL_DEBUG": (("info", "trace"), "NCCL narrates every communicator"),
    "NCCL_ALGO": (None, "NCCL does not choose its algorithm itself"),
    "NCCL_PROTO": (None, "NCCL does not choose its protocol itself"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (ON, "every allocation waits for the GPU"),
    "TORCH_COMPILE_DISABLE": (ON, "blocks are not compiled, whatever parallel.compile says"),
    "TORCHDYNAMO_DISABLE": (ON, "blocks are not compiled, whatever parallel.compile says"),
    "TORCH_DISTRIBUTED_DEBUG": (("detail",), "every collective is checked, which takes time"),
    "TORCH_NCCL_BLOCKING_WAIT": (ON, "the host waits for every collective"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (ON, "every start compiles anew"),
    "TRITON_INTERPRET": (ON, "Triton kernels run in its interpreter, thousands of times slower"),
}


def versions(settings: config.Config, *, on_gpu: bool) -> Iterator[MachineFinding]:
    """Versions of what a run is made of, the compiler, and optional packages."""
    yield MachineFinding("fasttrain", f"{fasttrain.__version__}, Python {platform.python_version()}")
    cuda, rocm, nccl = torch.version.cuda, torch.version.hip, ""
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU"
    if cuda and torch.distributed.is_nccl_available():
        nccl = ", NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    yield MachineFinding("torch", f"{torch.__version__}, built for {build}{nccl}")
    kernels = "pip install 'triton>=3.7': kernels of GPUs need it"
    yield _package("triton", "triton", "broken" if on_gpu else "missing", kernels)
    yield _compiler(settings, on_gpu=on_gpu)
    for extra, (package, purpose) in EXTRAS.items():
        needed = extra == "wandb" and bool(settings.log.wandb)
        level: Level = "broken" if needed else "missing"
        yield _package(extra, package, level, f"pip install 'fasttrain[{extra}]': {purpose}")


def variables(environment: Mapping[str, str], interfaces: Path = Path("/sys/class/net")) -> Iterator[MachineFinding]:
    """All that are set, and what the unusual ones do."""
    found = {name: value for name, value in sorted(environment.items()) if name.startswith(PREFIXES)}
    for name, value in found.items():
        if meaning := _meaning(name, value, interfaces):
            yield MachineFinding(name, value or '""', "warning", f"unset {name}, unless you mean it: {meaning}")
        else:
            yield MachineFinding(name, value or '""')
    if not found:
        yield MachineFinding("variables", f"none of {', '.join(f'{p}*' for p in PREFIXES)} is set")


def _meaning(name: str, value: str, interfaces: Path) -> str:
    if name == "CUDA_VISIBLE_DEVICES" and value in ("", "-1"):
        return "it hides every GPU"
    if name == "NCCL_SOCKET_IFNAME" and value and not value.startswith("^") and interfaces.exists():
        wanted = [each.removeprefix("=") for each in value.split(",")]
        there = [path.name for path in interfaces.iterdir()]
        if not any(each.startswith(prefix) for prefix in wanted for each in there):
            return f"there is no network interface {value}; there are {', '.join(sorted(there))}"
    values, meaning = SUSPICIOUS.get(name, ((), ""))
    return meaning if values is None or value.lower() in values else ""


def _compiler(settings: config.Config, *, on_gpu: bool) -> MachineFinding:
    """g++ for a CPU's blocks; a C compiler for Triton's launchers on a GPU."""
    wanted = settings.parallel.compile
    level: Level = "broken" if on_gpu or wanted == "on" else "missing"
    if on_gpu:
        found = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), "")
        missing = "" if found else "there is no C compiler"
        remedy = "apt-get install gcc (or set CC): Triton compiles a launcher for every kernel"
    else:
        found, missing = cpp_compiler(), missing_compiler()
        why = "parallel.compile is on, and needs it" if wanted == "on" else "blocks are compiled for long runs"
        remedy = f"apt-get install g++ python3-dev: {why}"
    if missing:
        return MachineFinding("compiler", missing, level, remedy)
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    return MachineFinding("compiler", said.splitlines()[0] if said else found)


def _package(name: str, package: str, level: Level, remedy: str) -> MachineFinding:
    if version := _version(package):
        return MachineFinding(name, version if name == package else f"{package} {version}")
    return MachineFinding(name, f"{package} is not installed", level, remedy)


def _version(package: str) -> str:
    """Empty: it is not installed."""
    try:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            return ""
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
    except (ImportError, ValueError):  # ValueError: it is None in sys.modules
        return ""
