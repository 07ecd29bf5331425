"""What the hardware can do and how much of it is in use: the denominators of a run's figures.

Model FLOPs utilisation is what a step has to compute, over what the device could have computed in that time:

    MFU = tokens per second of the run * flops_per_token / (number of ranks * peak_flops)

The peak of a known GPU (gpus.toml) is its vendor's figure for dense matrices, as published MFUs have it. Sparse
figures, which data sheets print first, are twice that and nothing that trains reaches them. Any other device is
measured.
"""

import importlib
import logging
import platform
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import torch

import fasttrain
from fasttrain.gpus import gpu_of_device
from fasttrain.metrics.step_timer import seconds_of
from fasttrain_kernels.ops.linear import matmul_out

_SECONDS = 0.3  # of measuring
# Rows of the measured matrices: doubled while a matmul takes less than so many seconds, or while that still helps and
# there is time. Small ones measure how threads wait for each other, on a busy machine for 30 ms and more; large ones
# would be the peak of a small run's resident memory.
_ENOUGH = 0.03
_SMALLEST, _LARGEST = 256, {"cpu": 2048, "mps": 2048, "cuda": 8192}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of matmuls on one device: its vendor's figure, or measured in a third of a second."""
    gpu = gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return measured_flops(device, dtype)
    if dtype in (torch.bfloat16, torch.float16):
        return gpu.half
    if dtype == torch.float32:
        # Not torch.get_float32_matmul_precision: it raises where the precision was set by this newer name.
        return gpu.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else gpu.fp32
    raise ValueError(f"peak_flops: there is no rate of {dtype}; use torch.bfloat16, torch.float16 or torch.float32")


def used_memory(device: torch.device) -> int:
    """Peak bytes of this process: allocated by torch on a GPU, resident on a CPU."""
    if device.type != "cuda":
        return resident_memory(b"VmHWM:")
    # Not max_memory_allocated: it flattens all of the allocator's figures first, 0.3 ms in each step.
    peak: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]
    return peak


def resident_memory(figure: bytes = b"VmRSS:") -> int:
    """Bytes of this process now, or a figure of /proc/self/status."""
    try:
        with open("/proc/self/status", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(figure))
    except (OSError, StopIteration):  # another system; on Linux this would count the process that started ours, too
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: torch.device) -> str:
    """Of the GPU, or of the processor as Linux knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError), open("/proc/cpuinfo") as file:  # OSError: another system
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def device_memory(device: torch.device) -> int:
    """Bytes that a GPU has; 0 on a CPU, which others use too."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of many matmuls, with this process's number of threads."""
    end = perf_counter() + _SECONDS
    generator = torch.Generator(device)  # of its own: how much is drawn here depends on the time that it takes
    rows, best = _SMALLEST, 0.0
    while True:
        a, b = (torch.randn(rows, rows, generator=generator, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        matmul = partial(matmul_out, a, b, out)
        seconds = min(seconds_of(matmul, device) for _ in range(2))  # the first of a size chooses its kernel
        helped = 2 * rows**3 / seconds > 1.5 * best
        best = max(best, 2 * rows**3 / seconds)
        if rows == _LARGEST[device.type] or not (helped or seconds < _ENOUGH) or perf_counter() > end:
            break
        rows *= 2
    while perf_counter() < end:
        best = max(best, 2 * rows**3 / seconds_of(matmul, device))
    if device.type == "cuda":  # leave no trace in used_memory
        del a, b, out, matmul
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


_INTERVAL = 1.0  # seconds: NVML averages over about as long, and some cards take milliseconds to answer

_logger = logging.getLogger(__name__)


class GpuSensors:
    """The sensors of one GPU, as far as it has some: `fasttrain doctor` says why there are none, and the remedy."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._sensors: list[Callable[[], dict[str, float]]] = []
        self._last: dict[str, float] = {}
        self._due = 0.0
        if device.type != "cuda":
            return
        with suppress(ImportError):
            self._nvml = importlib.import_module("pynvml")
        if self._nvml:
            # AttributeError: a GPU without uuid, not NVIDIA's. By its identity: CUDA_VISIBLE_DEVICES renumbers GPUs for
            # torch and not for NVML.
            with suppress(self._nvml.NVMLError, AttributeError):
                self._nvml.nvmlInit()
                uuid = torch.cuda.get_device_properties(device).uuid
                self._sensors = _sensors(self._nvml, self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))

    def read(self) -> dict[str, float]:
        """The readings of now, or of at most a second ago; {} without sensors."""
        if not self._sensors or monotonic() < self._due:
            return dict(self._last)
        self._last = {}
        for sensor in list(self._sensors):
            try:
                self._last |= sensor()
            except self._nvml.NVMLError_NotSupported:  # by this card: fans and power of laptops, for one
                self._sensors.remove(sensor)
            except self._nvml.NVMLError as error:
                _logger.warning("GPU sensors: %s; no more readings in this run, see nvidia-smi and dmesg", error)
                self._sensors, self._last = [], {}
                break
        self._due = monotonic() + _INTERVAL
        return dict(self._last)


def _sensors(nvml: Any, gpu: Any) -> list[Callable[[], dict[str, float]]]:
    """One function per question to NVML, so that a card may answer some of them only."""
    return [
        lambda: {"utilisation": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100},
        lambda: {"memory": float(nvml.nvmlDeviceGetMemoryInfo(gpu).used)},
        lambda: {"power": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000},
        lambda: {"temperature": float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))},
        lambda: {"sm_clock": float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))},
        lambda: {"memory_clock": float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM))},
        lambda: {f"throttled_{reason}": float(on) for reason, on in throttle_reasons(nvml, gpu).items()},
    ]


def throttle_reasons(nvml: Any, gpu: Any) -> dict[str, bool]:
    """Whether clocks are lowered now, by reason."""
    now = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    reasons = {
        "power": nvml.nvmlClocksThrottleReasonSwPowerCap,
        "heat": nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "hardware": nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    return {reason: bool(now & bits) for reason, bits in reasons.items()}


def versions() -> dict[str, str]:
    return dict(fasttrain=fasttrain.__version__, torch=str(torch.__version__), python=platform.python_version())
