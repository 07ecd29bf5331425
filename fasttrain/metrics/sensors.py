"""What a GPU says about itself, through NVML: the library behind nvidia-smi.

A slow step has causes that no stopwatch sees: a hot room, a power cap, another process on the card. NVML is optional,
and no reading of it is worth a run: without it there are no sensors, and a GPU that is lost in mid-run ends its
readings with one warning.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

_INTERVAL = 1.0  # seconds: NVML averages over about as long, and some cards take milliseconds to answer

_logger = logging.getLogger(__name__)


class GpuSensors:
    """The sensors of one GPU. `hint` says why there are none and what to do about it; empty where there are."""

    def __init__(self, device: torch.device) -> None:
        self.hint = ""
        self._nvml: Any = None
        self._sensors: list[Callable[[], dict[str, float]]] = []
        self._last: dict[str, float] = {}
        self._due = 0.0
        if device.type != "cuda":
            self.hint = f"GPU sensors: none, the run is on {device.type}"
            return
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            self.hint = "GPU sensors: none, nvidia-ml-py is not installed; pip install 'fasttrain[nvml]'"
            return
        try:
            self._nvml.nvmlInit()
            # By its identity: CUDA_VISIBLE_DEVICES renumbers GPUs for torch and not for NVML.
            uuid = torch.cuda.get_device_properties(device).uuid
            self._sensors = _sensors(self._nvml, self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except (self._nvml.NVMLError, AttributeError) as error:  # AttributeError: a GPU without uuid, not NVIDIA's
            self.hint = f"GPU sensors: none, NVML does not know {device}: {error}; does nvidia-smi list it?"

    def read(self) -> dict[str, float]:
        """The readings of now, or of at most a second ago; {} without sensors."""
        if self._sensors and monotonic() >= self._due:
            self._last = self._read()
            self._due = monotonic() + _INTERVAL
        return dict(self._last)

    def _read(self) -> dict[str, float]:
        readings: dict[str, float] = {}
        for sensor in list(self._sensors):
            try:
                readings |= sensor()
            except self._nvml.NVMLError_NotSupported:  # by this card: fans and power of laptops, for one
                self._sensors.remove(sensor)
            except self._nvml.NVMLError as error:
                _logger.warning("GPU sensors: %s; no more readings in this run, see nvidia-smi and dmesg", error)
                self._sensors.clear()
                return {}
        return readings


def _sensors(nvml: Any, gpu: Any) -> list[Callable[[], dict[str, float]]]:
    """One function per question to NVML, so that a card may answer some of them only."""

    def throttled() -> dict[str, float]:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        heat = nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        brake = nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        return {
            "throttled_power": float(bool(reasons & nvml.nvmlClocksThrottleReasonSwPowerCap)),
            "throttled_heat": float(bool(reasons & heat)),
            "throttled_hardware": float(bool(reasons & brake)),
        }

    return [
        lambda: {"utilisation": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100},
        lambda: {"memory": float(nvml.nvmlDeviceGetMemoryInfo(gpu).used)},
        lambda: {"power": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000},
        lambda: {"temperature": float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))},
        lambda: {"sm_clock": float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))},
        lambda: {"memory_clock": float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM))},
        throttled,
    ]
