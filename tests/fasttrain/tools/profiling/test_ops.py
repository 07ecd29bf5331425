"""Own times of ops, from traces whose answer is known."""

from typing import Any

import pytest

from fasttrain.tools.profiling import OpTime, gpu_busy, gpu_times, host_times, op_lines, split_line


def approx(seconds: float) -> Any:
    return pytest.approx(seconds)


def event(name, ts, dur, *, cat="cpu_op", tid=1, number=None):
    return dict(name=name, ts=ts, dur=dur, cat=cat, tid=tid, args={} if number is None else {"External id": number})


STEP = [event(f"ProfilerStep#{i}", i * 100, 100, cat="user_annotation") for i in (0, 1)]
LINEAR = [event("aten::linear", 10, 50), event("aten::mm", 20, 30), event("aten::add", 50, 10)]  # add ends linear
THREAD = [event("aten::mm", 30, 40, tid=2)]  # at the same time, elsewhere


def test_own_time_is_without_the_ops_within_and_by_thread():
    times = {op.name: op for op in host_times([*STEP, *LINEAR, *THREAD])}
    assert times["aten::linear"] == OpTime("aten::linear", approx(10e-6), 1)
    assert times["aten::mm"] == OpTime("aten::mm", approx(70e-6), 2)
    assert times["aten::add"].seconds == pytest.approx(10e-6)
    assert times["ProfilerStep#"].seconds == pytest.approx(150e-6)
    assert sum(op.seconds for op in times.values()) == pytest.approx(240e-6)  # both steps, and the other thread


def test_what_is_no_op_does_not_count():
    others: list[Any] = [dict(name="[memory]", ts=1, tid=1, cat="cpu_instant_event"), dict(name="process_name", ph="M")]
    assert host_times([*STEP, *LINEAR, *others]) == host_times([*STEP, *LINEAR])


def test_the_table_has_ten_ops_and_everything_else():
    many = [event(f"aten::op{i:02}", 10 * i, 10 - i * 0.5) for i in range(14)]
    lines = op_lines([event("ProfilerStep#7", 0, 200, cat="user_annotation"), *many], steps=1, on_gpu=False)
    assert lines[0] == "the most expensive ops of a step, by their own time:"
    assert [line.split()[1] for line in lines[1:11]] == [f"aten::op{i:02}" for i in range(10)]
    assert lines[1].split() == ["5.0%", "aten::op00", "0.01", "ms", "1", "call"]  # 10 of 200 microseconds
    assert lines[11].split()[:4] == ["8.5%", "4", "other", "ops"]  # 5 + 4.5 + 4 + 3.5
    assert lines[12].strip().startswith("52.8%  no op: Python, waiting")
    assert len(lines) == 13


def test_kernels_belong_to_the_op_that_launched_them():
    host = [event("aten::mm", 0, 5, number=7), event("ProfilerStep#1", 0, 100, cat="user_annotation", number=3)]
    kernels = [
        event("ampere_gemm_1", 10, 30, cat="kernel", number=7),
        event("ampere_gemm_2", 30, 20, cat="kernel", number=7),  # overlaps for 10
        event("_swiglu_fwd_kernel", 90, 10, cat="kernel", number=3),  # launched outside of ops
        event("Memcpy HtoD", 100, 10, cat="gpu_memcpy", number=99),
    ]
    times = gpu_times([*host, *kernels])
    assert times == [
        OpTime("aten::mm", approx(50e-6), 2),
        OpTime("_swiglu_fwd_kernel", approx(10e-6), 1),
        OpTime("Memcpy HtoD", approx(10e-6), 1),
    ]
    assert gpu_busy(kernels) == pytest.approx(0.6)  # 10 to 50 and 90 to 110, of 10 to 110
    lines = op_lines([*host, *kernels], steps=1, on_gpu=True)
    assert lines[1].split()[:2] == ["71.4%", "aten::mm"]
    assert lines[-1].strip() == "the GPU is busy 60.0% of the time"


def test_an_empty_trace():
    assert op_lines([], steps=1, on_gpu=False) == ["the profiler saw no op"]
    assert gpu_busy([]) == 0


def test_the_parts_of_a_step():
    line = split_line([{"forward": 0.25, "backward": 0.5}, {"forward": 0.25, "backward": 0.75, "validation": 0.25}])
    assert line == "a step takes 1,000.0 ms: forward 25.0%  backward 62.5%  validation 12.5%"
