import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fasttrain.metrics import hardware as sensors
from fasttrain.metrics.hardware import GpuSensors

CUDA = torch.device("cuda")


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


def answer(value):
    return lambda *arguments: value


@pytest.fixture
def nvml(monkeypatch):
    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError, nvml.NVMLError_NotSupported = NVMLError, NVMLError_NotSupported
    nvml.NVML_TEMPERATURE_GPU, nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM = 0, 1, 2
    names = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    for name, bit in zip(names, (0x4, 0x8, 0x20, 0x40, 0x80), strict=True):
        setattr(nvml, f"nvmlClocksThrottleReason{name}", bit)
    nvml.nvmlInit = answer(None)
    nvml.nvmlDeviceGetHandleByUUID = {"GPU-5a17": "handle"}.__getitem__
    nvml.nvmlDeviceGetUtilizationRates = answer(SimpleNamespace(gpu=97))
    nvml.nvmlDeviceGetMemoryInfo = answer(SimpleNamespace(used=2**30))
    nvml.nvmlDeviceGetPowerUsage = answer(345_600)
    nvml.nvmlDeviceGetTemperature = answer(71)
    nvml.nvmlDeviceGetClockInfo = lambda gpu, kind: {1: 1410, 2: 1593}[kind]
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = answer(0x4 | 0x40 | 0x1)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="5a17"))
    return nvml


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(sensors, "monotonic", lambda: clock.now)
    return clock


def test_readings_in_plain_units(nvml):
    gpu = GpuSensors(CUDA)
    assert gpu.read() == {
        "utilisation": 0.97,
        "memory": 2**30,
        "power": 345.6,
        "temperature": 71,
        "sm_clock": 1410,
        "memory_clock": 1593,
        "throttled_power": 1,
        "throttled_heat": 1,
        "throttled_hardware": 0,
    }


def test_nvml_is_asked_once_a_second(nvml, clock):
    gpu = GpuSensors(CUDA)
    gpu.read()
    nvml.nvmlDeviceGetTemperature = answer(80)
    clock.now += 0.9
    assert gpu.read()["temperature"] == 71
    clock.now += 0.2
    assert gpu.read()["temperature"] == 80


def test_a_card_may_lack_sensors(nvml, clock):
    def unsupported(gpu):
        raise NVMLError_NotSupported("Not Supported")

    nvml.nvmlDeviceGetPowerUsage = unsupported
    gpu = GpuSensors(CUDA)
    for _ in range(2):
        readings = gpu.read()
        assert "power" not in readings
        assert readings["temperature"] == 71
        clock.now += 2


def test_a_lost_gpu_gives_one_warning_and_no_more_readings(nvml, clock, caplog):
    def lost(*_):
        raise NVMLError("GPU is lost")

    gpu = GpuSensors(CUDA)
    assert gpu.read()
    nvml.nvmlDeviceGetTemperature = lost
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += 2
            assert gpu.read() == {}
    assert [record.getMessage() for record in caplog.records] == [
        "GPU sensors: GPU is lost; no more readings in this run, see nvidia-smi and dmesg"
    ]


def test_without_a_gpu():
    gpu = GpuSensors(torch.device("cpu"))
    assert gpu.read() == {}


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu = GpuSensors(CUDA)
    assert gpu.read() == {}


def test_without_a_driver(nvml):
    def missing():
        raise NVMLError("NVML Shared Library Not Found")

    nvml.nvmlInit = missing
    gpu = GpuSensors(CUDA)
    assert gpu.read() == {}


def test_a_gpu_of_another_maker(nvml, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert GpuSensors(CUDA).read() == {}


def test_the_real_library_has_all_that_is_asked_for():
    """Of names only: calling them needs a GPU."""
    nvml = pytest.importorskip("pynvml")
    asked = set()
    for function in (*sensors._sensors.__code__.co_consts, sensors.throttle_reasons.__code__):
        asked |= set(getattr(function, "co_names", ()))
    names = {name for name in asked if name.lower().startswith("nvml")}
    assert len(names) > 10
    assert not [name for name in names if not hasattr(nvml, name)]


@pytest.mark.gpu
def test_a_real_gpu():
    pytest.importorskip("pynvml")
    gpu = GpuSensors(CUDA)
    assert 0 <= gpu.read()["utilisation"] <= 1
