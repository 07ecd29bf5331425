import mmap
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fasttrain.metrics import hardware
from fasttrain.metrics.hardware import peak_flops, used_memory
from fasttrain_kernels import linear

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def hasty():
    """Not here: what is measured is asked for."""


def direct_flops() -> float:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(15):
        begin = time.perf_counter()
        linear(a, b)
        best = min(best, time.perf_counter() - begin)
    return 2 * 1024**3 / best


def test_a_cpu_is_measured():
    for _ in range(5):  # others use the machine too: the two have to agree once
        begin = time.perf_counter()
        ratio = peak_flops(CPU, torch.float32) / direct_flops()
        assert time.perf_counter() - begin < 10
        if 0.5 < ratio < 2:
            return
    pytest.fail(f"peak_flops is {ratio:.2f} of a direct measurement")


def test_a_type_that_the_cpu_is_slow_at_does_not_take_long():
    begin = time.perf_counter()
    assert peak_flops(CPU, torch.bfloat16) > 1e6
    assert time.perf_counter() - begin < 10  # with 2048 rows from the start: 20 s and more


def test_measuring_draws_no_random_numbers_of_the_run():
    before = torch.get_rng_state()
    peak_flops(CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


NAMES = {  # as drivers spell them
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 990,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "AMD Instinct MI300X": 1307.4,
}


@pytest.mark.parametrize("name", NAMES)
def test_known_gpus_have_their_data_sheet_s_rate(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    for dtype in (torch.bfloat16, torch.float16):
        assert peak_flops(CUDA, dtype) == NAMES[name] * 1e12


@pytest.mark.parametrize(("precision", "teraflops"), [("ieee", 19.5), ("none", 19.5), ("tf32", 156)])
def test_float32_is_tf32_where_torch_is_told_so(precision, teraflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=precision))
    assert peak_flops(CUDA, torch.float32) == teraflops * 1e12


def test_a_type_without_a_rate_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    with pytest.raises(ValueError, match="no rate of torch.float64; use torch.bfloat16"):
        peak_flops(CUDA, torch.float64)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA R9000",
    ],
)
def test_other_gpus_are_measured(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(hardware, "measured_flops", lambda device, dtype: 123.0)
    assert peak_flops(CUDA, torch.bfloat16) == 123.0


def test_peak_memory_of_a_process_counts_what_was_freed():
    before = used_memory(CPU)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    size = before - resident + 50_000_000  # more than ever before
    with mmap.mmap(-1, size) as block:  # not malloc, which may have as much at hand
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
    assert before + 40_000_000 < used_memory(CPU) < before + 60_000_000


def test_the_memory_of_the_process_that_started_ours_does_not_count():
    code = "import torch; from fasttrain.metrics.hardware import used_memory; print(used_memory(torch.device('cpu')))"
    large = torch.ones(250_000_000)
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(child.stdout) < large.nbytes < used_memory(CPU)


@pytest.mark.gpu
def test_a_gpu_s_peak_and_memory():
    measured = hardware.measured_flops(CUDA, torch.bfloat16)
    assert used_memory(CUDA) < 50_000_000  # measuring leaves no trace
    assert measured < 1.1 * peak_flops(CUDA, torch.bfloat16)
