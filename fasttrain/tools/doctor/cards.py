"""GPUs, as NVML and torch know them. NVML counts all of the machine; torch those of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fasttrain.gpus import gpu_of_device
from fasttrain.tools.doctor.finding import Finding, Level, gib

SECTION = "hardware"
DRIVER = Path("/proc/driver/nvidia/version")  # there with the kernel's module
FOREIGN = 2**30  # bytes of a GPU in use before a run, from which on it is worth telling


def cards(driver: Path = DRIVER) -> Iterator[Finding]:
    """Every GPU, and whether torch can use it."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nvml = _nvml()
    if nvml is None:
        if not seen and not driver.exists():
            yield Finding(section=SECTION, name="GPUs", value="none: runs are on the CPU", figure=0)
            return
        yield Finding(
            section=SECTION, name="NVML", value="nvidia-ml-py is not installed", level="missing",
            remedy="pip install 'fasttrain[nvml]': driver, clocks, power and errors, here and in a run's metrics",
        )  # fmt: skip
        for index in range(seen):
            yield Finding(section=SECTION, name=f"GPU {index}", value=torch.cuda.get_device_name(index))
        yield from _usable(seen, max(seen, int(driver.exists())))
        return
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        if driver.exists() or seen:
            yield Finding(
                section=SECTION, name="driver", value=f"NVML: {error}", level="broken",
                remedy="nvidia-smi, as any user, must list the GPUs; reboot after an update of the driver",
            )  # fmt: skip
        else:
            yield Finding(section=SECTION, name="GPUs", value="none: runs are on the CPU", figure=0)
        return
    yield Finding(section=SECTION, name="GPUs", value=str(count), figure=count)
    cuda = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    supports = f", CUDA up to {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
    yield Finding(
        section=SECTION, name="driver", value=f"{_text(_ask(nvml, nvml.nvmlSystemGetDriverVersion))}{supports}"
    )
    for index in range(count):
        yield from _card(nvml, index)
    yield from _usable(seen, count)


def _usable(seen: int, installed: int) -> Iterator[Finding]:
    if seen == installed or not installed:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and seen:
        yield Finding(
            section=SECTION, name="visible GPUs", value=f"{seen} of {installed}, by CUDA_VISIBLE_DEVICES={visible}"
        )
        return
    if visible is not None:
        remedy = "unset CUDA_VISIBLE_DEVICES, which hides all of them"
    elif torch.version.cuda is None and torch.version.hip is None:
        remedy = f"torch {torch.__version__} is built without CUDA: install its CUDA build, as pytorch.org says"
    else:
        remedy = (
            f"torch is built for CUDA {torch.version.cuda}: update the driver, or install a build for an older CUDA"
        )
    yield Finding(
        section=SECTION, name="visible GPUs", value=f"torch sees {seen} of {installed}", level="broken", remedy=remedy
    )


def _card(nvml: Any, index: int) -> Iterator[Finding]:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any) -> Any:
        return _ask(nvml, getattr(nvml, function), gpu, *arguments)

    def finding(name: str, value: str, remedy: str, *, broken: bool = False) -> Finding:
        level: Level = "broken" if broken else "warning"
        return Finding(section=SECTION, name=f"GPU {index} {name}", value=value, level=level, remedy=remedy)

    name, memory = _text(ask("nvmlDeviceGetName")), ask("nvmlDeviceGetMemoryInfo")
    known = gpu_of_device(name)
    rate = f"{known.half / 1e12:,.0f} TFLOP/s in bf16" if known else "not in gpus.toml, so that its rate is measured"
    limit, usual = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    parts = [
        name,
        gib(memory.total) if memory else "",
        rate,
        f"{limit / 1000:.0f} W" if limit else "",
        _links(nvml, ask),
    ]
    yield Finding(section=SECTION, name=f"GPU {index}", value=", ".join(filter(None, parts)))
    if memory and memory.used > FOREIGN:
        yield finding("memory", f"{gib(memory.used)} are in use already", "nvidia-smi shows by which process")
    if limit and usual and limit < usual:
        yield finding(
            "power",
            f"limited to {limit / 1000:.0f} of {usual / 1000:.0f} W",
            f"nvidia-smi -i {index} -pl {usual // 1000}",
        )
    if reasons := _throttled(nvml, ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0):
        yield finding(
            "clocks", f"lowered now: {reasons}", "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; look at cooling"
        )
    errors = ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    if errors:
        yield finding(
            "ECC", f"{errors} uncorrected memory errors since the driver was loaded",
            f"nvidia-smi -i {index} -r (or reboot); if they return, the card has to be replaced", broken=True,
        )  # fmt: skip


def _links(nvml: Any, ask: Callable[..., Any]) -> str:
    states = [ask("nvmlDeviceGetNvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    active = sum(state == nvml.NVML_FEATURE_ENABLED for state in states)
    return f"{active} NVLinks" if active else "no NVLink"


def _throttled(nvml: Any, reasons: int) -> str:
    kinds = {
        "power cap": nvml.nvmlClocksThrottleReasonSwPowerCap,
        "heat": nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "hardware brake": nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    return ", ".join(kind for kind, bits in kinds.items() if reasons & bits)


def _ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """None: this card, or this driver, does not say."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
