"""Cores, memory and limits, on machines that are made of files."""

import math
import os
import resource
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fasttrain.tools.doctor.hardware import cards, cpu_quota, limits, machine, memory_limit, usable_cores

MEMINFO = "MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\n"


@pytest.fixture
def root(tmp_path):
    def make(**files):
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def test_a_container_with_2_of_64_cores_says_2(root, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    place = root(**{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"})
    assert usable_cores(place) == (2, "a quota of 2, by a cgroup")
    processor, threads, memory = machine(place)
    assert processor.value.endswith("2 of 64 cores (a quota of 2, by a cgroup)")
    assert processor.figure == 2
    assert (threads.level, threads.value) == ("warning", "64 threads for 2 cores")
    assert threads.remedy.startswith("export OMP_NUM_THREADS=2")
    assert memory.value == "64.0 GiB, 32.0 GiB of it available"


def test_affinity_counts_too(root, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert usable_cores(root()) == (3, "bound to them")
    half = root(**{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert usable_cores(half)[0] == 1  # there is at least one


@pytest.mark.parametrize(("files", "quota"), [
    ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
    ({"sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),  # a parent's
    ({"sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "400000\n", "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n"}, 4),
    ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
    ({}, math.inf),
])  # fmt: skip
def test_quotas_of_both_versions_of_cgroups(files, quota, root):
    assert cpu_quota(root(**{"proc/self/cgroup": "4:cpu,cpuacct:/a/b\n0::/a/b\n", **files})) == quota


def test_memory_is_what_the_cgroup_allows(root):
    place = root(**{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{8 * 2**30}\n"})
    assert memory_limit(place) == 8 * 2**30
    memory = list(machine(place))[-1]
    assert memory.value == "8.0 GiB, 8.0 GiB of it available (64.0 GiB are installed; a cgroup has the limit)"
    assert memory.figure == 8 * 2**30
    assert memory_limit(root(**{"sys/fs/cgroup/memory.max": "max\n"})) == math.inf


def test_small_limits_are_told_with_their_remedy(monkeypatch, tmp_path):
    values = {
        resource.RLIMIT_NOFILE: (256, 1024),
        resource.RLIMIT_MEMLOCK: (65536, 65536),
        resource.RLIMIT_FSIZE: (2**30, 2**30),
    }
    monkeypatch.setattr(resource, "getrlimit", values.__getitem__)
    monkeypatch.setattr(os, "statvfs", lambda _: type("Status", (), {"f_blocks": 16, "f_frsize": 2**22}))  # 64 MiB
    files, locked, size, shared = limits(gpus=8, shared=tmp_path)
    assert (files.level, files.remedy) == ("warning", "ulimit -n 4096 (the hard limit is 1,024)")
    assert locked.remedy.startswith("ulimit -l unlimited")
    assert size.remedy.startswith("ulimit -f unlimited")
    assert shared.remedy.startswith("docker run --shm-size=8g")
    assert [finding.level for finding in limits(gpus=1, shared=tmp_path)] == ["warning", "ok", "warning", "ok"]


def test_no_limits_are_fine(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    findings = list(limits(gpus=8))[:3]
    assert [(finding.value, finding.level) for finding in findings] == [("unlimited", "ok")] * 3


GIB = 2**30


class NVMLError(Exception):
    pass


def answer(value):
    return lambda *arguments: value


@pytest.fixture
def nvml(monkeypatch):
    """Two H100, healthy."""
    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC, nvml.NVML_FEATURE_ENABLED = 1, 0, 1
    nvml.NVML_NVLINK_MAX_LINKS = 18
    names = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    for name, bit in zip(names, (0x4, 0x8, 0x20, 0x40, 0x80), strict=True):
        setattr(nvml, f"nvmlClocksThrottleReason{name}", bit)
    nvml.nvmlInit = answer(None)
    nvml.nvmlDeviceGetCount = answer(2)
    nvml.nvmlSystemGetDriverVersion = answer(b"580.65.06")  # bytes, as old versions have it
    nvml.nvmlSystemGetCudaDriverVersion = answer(13000)
    nvml.nvmlDeviceGetHandleByIndex = answer("handle")
    nvml.nvmlDeviceGetName = answer("NVIDIA H100 80GB HBM3")
    nvml.nvmlDeviceGetMemoryInfo = answer(SimpleNamespace(total=80 * GIB, used=0.4 * GIB))
    nvml.nvmlDeviceGetPowerManagementLimit = answer(700_000)
    nvml.nvmlDeviceGetPowerManagementDefaultLimit = answer(700_000)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = answer(0x1)  # idle
    nvml.nvmlDeviceGetTotalEccErrors = answer(0)
    nvml.nvmlDeviceGetNvLinkState = answer(1)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "is_available", answer(True))
    monkeypatch.setattr(torch.cuda, "device_count", answer(2))
    monkeypatch.setattr(torch.cuda, "get_device_name", answer("NVIDIA H100 80GB HBM3"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml


def found(**options):
    return {finding.name: finding for finding in cards(**options)}


def test_two_healthy_gpus(nvml):
    findings = found()
    assert findings["GPUs"].figure == 2
    assert findings["driver"].value == "580.65.06, CUDA up to 13.0"
    assert findings["GPU 0"].value == "NVIDIA H100 80GB HBM3, 80.0 GiB, 990 TFLOP/s in bf16, 700 W, 18 NVLinks"
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert list(findings) == ["GPUs", "driver", "GPU 0", "GPU 1"]


def test_what_is_wrong_with_a_card_is_told(nvml):
    nvml.nvmlDeviceGetMemoryInfo = answer(SimpleNamespace(total=80 * GIB, used=31 * GIB))
    nvml.nvmlDeviceGetPowerManagementLimit = answer(400_000)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = answer(0x4 | 0x40)
    nvml.nvmlDeviceGetTotalEccErrors = answer(3)
    findings = found()
    assert findings["GPU 1 memory"].value == "31.0 GiB are in use already"
    assert (findings["GPU 1 power"].value, findings["GPU 1 power"].remedy) == (
        "limited to 400 of 700 W",
        "nvidia-smi -i 1 -pl 700",
    )
    assert findings["GPU 1 clocks"].value == "lowered now: power, heat"
    assert findings["GPU 1 ECC"].level == "broken"
    assert findings["GPU 1 ECC"].value == "3 uncorrected memory errors since the driver was loaded"


def test_a_card_that_says_little(nvml):
    def unsupported(*_):
        raise NVMLError("Not Supported")

    nvml.nvmlDeviceGetName = answer("NVIDIA GeForce RTX 4050 Laptop GPU")
    for name in ("PowerManagementLimit", "PowerManagementDefaultLimit", "TotalEccErrors", "NvLinkState", "MemoryInfo"):
        setattr(nvml, f"nvmlDeviceGet{name}", unsupported)
    assert found()["GPU 0"].value == (
        "NVIDIA GeForce RTX 4050 Laptop GPU, not in gpus.toml, so that its rate is measured, no NVLink"
    )


def test_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "is_available", answer(False))
    (only,) = cards(driver=tmp_path / "none")
    assert (only.value, only.level) == ("none: runs are on the CPU", "ok")


def test_nvml_without_a_driver_is_no_gpu_either(nvml, monkeypatch, tmp_path):
    def missing():
        raise NVMLError("NVML Shared Library Not Found")

    nvml.nvmlInit = missing
    monkeypatch.setattr(torch.cuda, "is_available", answer(False))
    (only,) = cards(driver=tmp_path / "none")
    assert only.level == "ok"
    (tmp_path / "version").write_text("NVRM version: 580")
    (only,) = cards(driver=tmp_path / "version")  # the module is loaded, and its library does not answer
    assert (only.level, only.value) == ("broken", "NVML: NVML Shared Library Not Found")


def test_gpus_without_nvml(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    findings = found()
    assert findings["NVML"].level == "missing"
    assert findings["NVML"].remedy.startswith("pip install 'fasttrain[nvml]'")
    assert findings["GPU 1"].value == "NVIDIA H100 80GB HBM3"


def test_gpus_that_torch_does_not_see(nvml, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", answer(False))
    monkeypatch.setattr(torch.version, "cuda", None)
    finding = found()["visible GPUs"]
    assert (finding.level, finding.value) == ("broken", "torch sees 0 of 2")
    assert "is built without CUDA: install its CUDA build" in finding.remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert found()["visible GPUs"].remedy.startswith("torch is built for CUDA 13.0: update the driver")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found()["visible GPUs"].remedy == "unset CUDA_VISIBLE_DEVICES, which hides all of them"


def test_a_part_of_the_gpus(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(torch.cuda, "device_count", answer(1))
    assert found()["visible GPUs"].level == "ok"
    assert found()["visible GPUs"].value == "1 of 2, by CUDA_VISIBLE_DEVICES=1"


def test_the_real_library_has_all_that_is_asked_for(nvml, monkeypatch):
    """Of names only: calling them needs a GPU."""
    monkeypatch.delitem(sys.modules, "pynvml")
    real = pytest.importorskip("pynvml")
    assert not [name for name in vars(nvml) if name.lower().startswith("nvml") and not hasattr(real, name)]
