"""The kernel benchmarks: checks, timing and reports. The GPU's clock and memory are faked here."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.kernels import check, limits, timing
from bench.kernels.baselines import OURS, implementations
from bench.kernels.comparison import BOTH, FORWARD, KernelCase, cases, inputs_of
from bench.kernels.limits import Limits
from bench.kernels.ops import OPS
from bench.memory import peak_on_cpu, peak_on_gpu
from fasttrain.gpus import find_gpu
from fasttrain_kernels.testing.interpreter import interpret
from fasttrain_kernels.testing.specs import OpWork

ROOT = Path(__file__).parents[2]
TINY = {
    "rms_norm": dict(M=8, C=64),
    "add_rms_norm": dict(M=8, C=64),
    "qk_norm_rope": dict(M=16, T=8, H=4, K=2, D=32),
    "attention": dict(M=32, T=16, H=4, K=2, D=16),
    "linear": dict(M=300, C=500, F=230),
    "linear_cross_entropy": dict(M=16, C=32, V=48),
    "swiglu": dict(M=8, F=64),
}


def tiny(op: str) -> KernelCase:
    return KernelCase(op=op, size=tuple((TINY.get(op) or OPS[op].small).items()), dtype=torch.float32, device="cpu")


def checked(op: str, function, *, ours: bool) -> str:
    inputs = inputs_of(tiny(op))
    upstream = check.upstream_of(check.call(OPS[op].eager, inputs))
    truth = check.truth(OPS[op].reference, inputs, upstream, torch.float64)
    eager = check.results(OPS[op].eager, inputs, upstream)
    return check.failures(check.results(function, inputs, upstream), eager, truth, ours=ours)


@pytest.mark.parametrize("op", OPS)
def test_implementations_on_a_cpu_pass_their_checks(op):
    for name, implementation in implementations(op, "cpu").items():
        if not implementation.missing("cpu", torch.float32) and "compiled" not in name:
            assert checked(op, implementation.make(), ours=name == OURS) == "", name


@pytest.mark.parametrize("op", [op for op in OPS if "Liger" in implementations(op, "cuda")])
def test_liger_is_called_as_it_wants_to_be(op):
    pytest.importorskip("liger_kernel")
    with interpret():
        assert checked(op, implementations(op, "cuda")["Liger"].make(), ours=False) == ""


def test_cut_cross_entropy_is_called_as_it_wants_to_be():
    """Its kernels take locks, which only a GPU has: the arguments are all that is seen here."""
    cut = pytest.importorskip("cut_cross_entropy")
    inspect.signature(cut.linear_cross_entropy).bind("hidden", "weight", "target")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ours", [True, False])
def test_a_wrong_implementation_is_found(op, ours):
    def nearly(**inputs):
        outputs = check.call(OPS[op].eager, inputs)
        return tuple(output * 1.001 for output in outputs)

    def lost(**inputs):
        return tuple(output * float("nan") for output in check.call(OPS[op].eager, inputs))

    assert "FAILED" in checked(op, nearly, ours=ours)
    assert "FAILED" in checked(op, lost, ours=ours)


def test_who_cannot_take_part_says_why():
    cut, liger = (implementations("linear_cross_entropy", "cuda")[name] for name in ("cut-cross-entropy", "Liger"))
    assert liger.missing("cpu", torch.float32) == "liger_kernel needs a GPU"
    absent = dataclasses.replace(liger, package="no_such_package")
    assert "no_such_package is not installed: pip install" in absent.missing("cuda", torch.float32)
    cut = dataclasses.replace(cut, package="torch")  # as if it were installed
    assert cut.missing("cuda", torch.float32) == "torch takes 16-bit inputs only"
    assert cut.missing("cuda", torch.bfloat16) == ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_grid_has_every_op_at_several_sizes(device):
    grid = cases(device)
    for op in OPS:
        count = len([case for case in grid if case.op == op])
        assert count >= 2 or (op == "linear" and device == "cuda" and count == 0)  # torch's there
    assert len({case.name for case in grid}) == len(grid)
    assert {case.dtype for case in grid} == ({torch.float32} if device == "cpu" else {torch.float32, torch.bfloat16})


def test_work_by_hand():
    case = KernelCase(op="swiglu", size=(("M", 10), ("F", 7)), dtype=torch.bfloat16, device="cpu")
    assert case.work(FORWARD).bytes == 2 * 3 * 70
    assert case.work(BOTH).bytes == 2 * (3 + 5) * 70
    case = KernelCase(op="linear_cross_entropy", size=(("M", 3), ("C", 5), ("V", 7)), dtype=torch.float32, device="cpu")
    assert case.work(BOTH) == OpWork(4 * 3 * (15 + 35), 6 * 3 * 5 * 7)
    # Attention's FLOPs by counting the pairs that a causal mask leaves
    case = KernelCase(
        op="attention", size=(("M", 8), ("T", 4), ("H", 2), ("K", 1), ("D", 3)), dtype=torch.float32, device="cpu"
    )
    pairs = 2 * sum(range(1, 5)) * 2  # sequences, keys of each query, heads
    assert case.work(FORWARD).flops == 2 * 2 * pairs * 3
    assert case.work(BOTH).flops == 3 * case.work(FORWARD).flops


def test_limits_bind():
    most = Limits(bandwidth=100.0, flops=1000.0)
    assert (most.seconds(OpWork(200, 10)), most.bound(OpWork(200, 10))) == (2.0, "memory")
    assert (most.seconds(OpWork(10, 3000)), most.bound(OpWork(10, 3000))) == (3.0, "compute")


def test_a_known_gpu_has_the_limits_of_its_vendor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    gpu = find_gpu("h100-sxm")
    assert limits.limits.__wrapped__("cuda", torch.bfloat16) == Limits(gpu.bandwidth, gpu.half)


def test_the_bandwidth_of_a_copy(monkeypatch):
    monkeypatch.setattr(limits, "measure", lambda runs, device: runs["copy"]() is None or {"copy": [2.0, 1.0, 3.0]})
    assert limits.copy_bandwidth("cpu") == 2 * limits.COPY_BYTES["cpu"]


def test_the_rate_of_matmuls(monkeypatch):
    monkeypatch.setattr(limits, "measure", lambda runs, device: {"matmul": [0.5, 0.25]})
    assert limits.matmul_rate() == 2 * limits.ROWS**3 / 0.25


def test_cpu_times_are_of_one_call_and_in_turn():
    called = []

    def spin(name: str, seconds: float) -> None:
        called.append(name)
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    found = timing.measure_on_cpu({"a": lambda: spin("a", 0.030), "b": lambda: spin("b", 0.005)}, rounds=3)
    assert all(0.030 <= s < 0.036 for s in found["a"])
    assert all(0.005 <= s < 0.006 for s in found["b"])  # four calls to a measurement
    assert called == ["a", "b", "a", *"bbbb", *"bbbb", "a", "a", *"bbbb"]


def test_long_calls_have_fewer_rounds(monkeypatch):
    monkeypatch.setattr(timing, "_cpu_seconds", lambda run, calls: 2.0 * calls)
    assert timing.measure_on_cpu({"a": lambda: None}, rounds=7) == {"a": [2.0] * timing.LONG_ROUNDS}


@pytest.mark.parametrize(("l2", "size"), [(50 << 20, 100 << 20), (0, 256 << 20)])
def test_the_cache_that_is_cleared(l2, size):
    assert timing.flush_bytes(l2) == size


def test_gpu_times_are_between_events_after_a_cleared_cache(monkeypatch):
    """Fake events count what happened: not a GPU, but the order and the arithmetic."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")
            self.at = len(log)

        def elapsed_time(self, other: Event) -> float:  # milliseconds
            assert log[-1] == "waited"
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("waited"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(L2_cache_size=64))
    zero = torch.Tensor.zero_

    def cleared(tensor):
        log.append(f"cleared {tensor.nbytes}")
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", cleared)
    runs = {"a": lambda: log.append("a"), "b": lambda: log.extend("bb")}
    found = timing.measure_on_gpu(runs, rounds=2, device="cpu")
    one, two = ["cleared 128", "event", "a", "event"], ["cleared 128", "event", "b", "b", "event"]
    assert log == [*one, *two, *two, *one, "waited"]
    assert found == {"a": [0.002, 0.002], "b": [0.003, 0.003]}


def test_gpu_memory_is_what_a_second_run_adds(monkeypatch):
    now = {"held": 1000, "peak": 0, "runs": 0}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now["held"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: now["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: now.update(peak=now["held"]))

    def run() -> None:
        now["runs"] += 1
        now["peak"] = max(now["peak"], now["held"] + (9999 if now["runs"] == 1 else 512))

    assert peak_on_gpu(run) == 512


def test_cpu_memory_is_exact():
    def run() -> None:
        a = torch.empty(1000, dtype=torch.int8)
        del a
        b, c = torch.empty(600, dtype=torch.int8), torch.empty(700, dtype=torch.int8)
        del b, c

    assert peak_on_cpu(run) == 1300


def test_replayed_seconds_are_what_pytest_benchmark_sees():
    clock = timing.Replay()
    clock.load([0.5, 0.25])
    begin, end = clock(), clock()
    assert end - begin == 0.5
    begin, end = clock(), clock()
    assert end - begin == 0.25


PLUGIN = """
import dataclasses, os
from pathlib import Path
import torch
import torch.nn.functional as F
from bench import tracking
from bench.kernels import baselines, ops

tracking.HISTORY = Path(os.environ["HISTORY"])
ops.OPS["swiglu"] = dataclasses.replace(ops.OPS["swiglu"], cpu=[dict(M=8, F=64)], streaming=False)
broken = baselines.OpImplementation(make=lambda: lambda gate, up: F.silu(gate) * up * 1.01)
baselines._OTHERS["swiglu"]["broken"] = broken
torch.compile = lambda function, **options: function  # seconds that nobody needs here
"""


def test_a_broken_implementation_is_not_timed(tmp_path):
    (tmp_path / "broken.py").write_text(PLUGIN)
    search = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "kernels")))
    options = ["-k", "swiglu", "--save", "-rs", f"--benchmark-json={tmp_path / 'times.json'}"]
    plugins = ["-p", "broken", "-p", "no:xdist", "-p", "no:cacheprovider"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of these tests
    environment = outside | {"PYTHONPATH": search, "HISTORY": str(tmp_path / "history"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "bench/kernels/test_kernels.py", *plugins, *options],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert (
        done.stdout.count("AssertionError: broken failed its check, and was not timed: output 0: error") == 2
    )  # passes
    assert "liger_kernel needs a GPU" in done.stdout
    (path,) = (tmp_path / "history").iterdir()
    stored = [row["name"] for row in json.loads(path.read_text())["rows"]]
    for passes in (FORWARD, BOTH):
        assert f"swiglu M8 F64 fp32 {passes}/fasttrain/of eager" in stored
    assert not [name for name in stored if "broken" in name]
    timed = json.loads((tmp_path / "times.json").read_text())["benchmarks"]
    assert {one["group"] for one in timed} == {"swiglu M8 F64 fp32, forward", "swiglu M8 F64 fp32, forward+backward"}
    assert len(timed) == 6
    assert not [one for one in timed if "broken" in one["name"]]
    for one in timed:
        assert one["stats"]["rounds"] == timing.ROUNDS["cpu"]
        assert one["extra_info"]["time"] == pytest.approx(one["stats"]["median"])
