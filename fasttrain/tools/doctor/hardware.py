"""Processors, memory, limits and GPUs, as this process has them: a container with 2 of 64 cores has 2.

Limits are in cgroups, of version 2 or 1, and those of parents count too; in the affinity of the process; and in ulimit.
`root` is where /proc and /sys are. NVML counts all GPUs of the machine; torch those of CUDA_VISIBLE_DEVICES.
"""

import importlib
import math
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fasttrain.gpus import gpu_of_device
from fasttrain.metrics.hardware import device_name, throttle_reasons
from fasttrain.tools.doctor import Level, MachineFinding
from fasttrain.units import memory_size

ROOT = Path("/")
FILES = 4096  # open files: ranks, shards of data, sockets
SHARED = 2**30  # bytes of /dev/shm: NCCL's buffers between the GPUs of a node
DRIVER = Path("/proc/driver/nvidia/version")  # there with the kernel's module
IN_USE = 2**30  # bytes of a GPU in use before a run, from which on it is worth telling


def usable_cores(root: Path = ROOT) -> tuple[int, str]:
    """How many this process has, and why not all; empty: all."""
    bound, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    usable = min(bound, max(int(min(quota, bound)), 1))
    why = f"a quota of {quota:g}, by a cgroup" if quota < bound else "bound to them"
    return usable, "" if usable == os.cpu_count() else why


def machine(root: Path = ROOT) -> Iterator[MachineFinding]:
    """Processors and memory."""
    (cores, why), threads = usable_cores(root), torch.get_num_threads()
    share = f"{cores} of {os.cpu_count()} cores ({why})" if why else f"{cores} cores"
    name = device_name(torch.device("cpu"))
    yield MachineFinding("processor", f"{name}, {share}", figure=cores, unit="cores")
    if threads > cores:
        remedy = f"export OMP_NUM_THREADS={cores}: more threads than cores wait for each other"
        yield MachineFinding("threads", f"{threads} threads for {cores} cores", "warning", remedy)
    found = dict(re.findall(r"(\w+): +(\d+) kB", _read(root / "proc/meminfo")))
    installed, available = (float(found.get(name, math.nan)) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit(root)
    total = min(installed, limit)
    text = f"{memory_size(total)}, {memory_size(min(available, limit))} of it available"
    if limit < installed:
        text += f" ({memory_size(installed)} are installed; a cgroup has the limit)"
    yield MachineFinding("memory", text, figure=total, unit="bytes")


def limits(*, gpus: int, shared: Path = Path("/dev/shm")) -> Iterator[MachineFinding]:
    """Limits that the system sets this process."""

    def finding(name: str, limit: int, least: int, remedy: str, text: Callable[[float], str]) -> MachineFinding:
        if limit == resource.RLIM_INFINITY:
            return MachineFinding(name, "unlimited")
        fine = limit >= least
        return MachineFinding(name, text(limit), "ok" if fine else "warning", "" if fine else remedy, float(limit))

    buffers = SHARED if gpus > 1 else 0
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = "unlimited" if most == resource.RLIM_INFINITY else f"{most:,}"
    yield finding("open files", files, FILES, f"ulimit -n {FILES} (the hard limit is {hard})", "{:,}".format)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    remedy = "ulimit -l unlimited: InfiniBand and pinned memory need it"
    yield finding("locked memory", locked, buffers, remedy, memory_size)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    remedy = "ulimit -f unlimited: a checkpoint beyond it cannot be written"
    yield finding("file size", size, 2**40, remedy, memory_size)
    if shared.exists():
        status = os.statvfs(shared)
        remedy = "docker run --shm-size=8g, or --ipc=host: NCCL keeps buffers there"
        yield finding(str(shared), status.f_blocks * status.f_frsize, buffers, remedy, memory_size)


def cpu_quota(root: Path = ROOT) -> float:
    """Cores that cgroups allow; inf: no limit."""
    quotas = [math.inf]
    for directory in _cgroups(root, "cpu"):
        older = _read(directory / "cpu.cfs_quota_us") + " " + _read(directory / "cpu.cfs_period_us")
        pairs = (_read(directory / "cpu.max").split(), older.split())
        # neither "max" nor -1
        quotas += [int(pair[0]) / int(pair[1]) for pair in pairs if len(pair) == 2 and "".join(pair).isdecimal()]
    return min(quotas)


def memory_limit(root: Path = ROOT) -> float:
    """Bytes that cgroups allow; inf: no limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [_read(directory / name).strip() for directory in _cgroups(root, "memory") for name in names]
    return min((float(text) for text in texts if text.isdecimal()), default=math.inf)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's cgroup and of its parents. Within a container, its own may be mounted as /."""
    base = root / "sys/fs/cgroup"
    mounts = [base, base / controller, base / "cpu,cpuacct"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        for mount in mounts:
            inner = mount / path.lstrip("/")
            yield from (each for each in (inner, *inner.parents) if each == mount or mount in each.parents)
    yield from mounts


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def cards(driver: Path = DRIVER) -> Iterator[MachineFinding]:
    """Every GPU, and whether torch can use it."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    none = MachineFinding("GPUs", "none: runs are on the CPU", figure=0)
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        if not seen and not driver.exists():
            yield none
            return
        remedy = "pip install 'fasttrain[nvml]': driver, clocks, power and errors, here and in a run's metrics"
        yield MachineFinding("NVML", "nvidia-ml-py is not installed", "missing", remedy)
        for index in range(seen):
            yield MachineFinding(f"GPU {index}", torch.cuda.get_device_name(index))
        yield from _usable(seen, max(seen, int(driver.exists())))
        return
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        remedy = "nvidia-smi, as any user, must list the GPUs; reboot after an update of the driver"
        yield MachineFinding("driver", f"NVML: {error}", "broken", remedy) if driver.exists() or seen else none
        return
    yield MachineFinding("GPUs", str(count), figure=count)
    cuda = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    supports = f", CUDA up to {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
    yield MachineFinding("driver", f"{_text(_ask(nvml, nvml.nvmlSystemGetDriverVersion))}{supports}")
    for index in range(count):
        yield from _card(nvml, index)
    yield from _usable(seen, count)


def _usable(seen: int, installed: int) -> Iterator[MachineFinding]:
    if seen == installed or not installed:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and seen:
        yield MachineFinding("visible GPUs", f"{seen} of {installed}, by CUDA_VISIBLE_DEVICES={visible}")
        return
    if visible is not None:
        remedy = "unset CUDA_VISIBLE_DEVICES, which hides all of them"
    elif torch.version.cuda is None and torch.version.hip is None:
        remedy = f"torch {torch.__version__} is built without CUDA: install its CUDA build, as pytorch.org says"
    else:
        remedy = f"torch is built for CUDA {torch.version.cuda}: update the driver, or install torch for an older CUDA"
    yield MachineFinding("visible GPUs", f"torch sees {seen} of {installed}", "broken", remedy)


def _card(nvml: Any, index: int) -> Iterator[MachineFinding]:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any) -> Any:
        return _ask(nvml, getattr(nvml, function), gpu, *arguments)

    def finding(name: str, value: str, remedy: str, level: Level = "warning") -> MachineFinding:
        return MachineFinding(f"GPU {index} {name}", value, level, remedy)

    name, memory = _text(ask("nvmlDeviceGetName")), ask("nvmlDeviceGetMemoryInfo")
    known = gpu_of_device(name)
    rate = f"{known.half / 1e12:,.0f} TFLOP/s in bf16" if known else "not in gpus.toml, so that its rate is measured"
    limit, usual = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    active = links.count(nvml.NVML_FEATURE_ENABLED)
    size, power = memory_size(memory.total) if memory else "", f"{limit / 1000:.0f} W" if limit else ""
    parts = [name, size, rate, power, f"{active} NVLinks" if active else "no NVLink"]
    yield MachineFinding(f"GPU {index}", ", ".join(filter(None, parts)))
    if memory and memory.used > IN_USE:
        yield finding("memory", f"{memory_size(memory.used)} are in use already", "nvidia-smi shows by which process")
    if limit and usual and limit < usual:
        value = f"limited to {limit / 1000:.0f} of {usual / 1000:.0f} W"
        yield finding("power", value, f"nvidia-smi -i {index} -pl {usual // 1000}")
    if reasons := [reason for reason, on in (_ask(nvml, throttle_reasons, nvml, gpu) or {}).items() if on]:
        remedy = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; look at cooling"
        yield finding("clocks", f"lowered now: {', '.join(reasons)}", remedy)
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    if errors := ask("nvmlDeviceGetTotalEccErrors", *kinds):
        value = f"{errors} uncorrected memory errors since the driver was loaded"
        remedy = f"nvidia-smi -i {index} -r (or reboot); if they return, the card has to be replaced"
        yield finding("ECC", value, remedy, "broken")


def _ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """None: this card, or this driver, does not say."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
