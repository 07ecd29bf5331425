import time
from typing import Any

import pytest
import torch

from fasttrain.metrics import step_timer
from fasttrain.metrics.step_timer import StepTimer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_timer, "perf_counter", clock)
    return clock


def mark(timer, clock, name, seconds):
    clock.now += seconds
    timer.mark(name)


def test_parts_of_the_same_name_add_up(clock):
    timer = StepTimer(CPU)
    for seconds in (1.0, 2.0):  # two micro-batches
        mark(timer, clock, "data", seconds)
        mark(timer, clock, "forward_backward", 10 * seconds)
    mark(timer, clock, "optimizer", 0.5)
    assert timer.end_step().seconds() == {"data": 3.0, "forward_backward": 30.0, "optimizer": 0.5}


def test_laps_leave_out_no_time_and_count_none_twice(clock):
    timer = StepTimer(CPU)
    mark(timer, clock, "data", 1.0)
    first = timer.end_step()
    clock.now += 4.0  # after the last mark: part of what comes next
    mark(timer, clock, "data", 1.0)
    second = timer.end_step()
    assert first.seconds() == first.seconds() == {"data": 1.0}  # whenever it is asked
    assert second.seconds() == {"data": 5.0}
    assert timer.end_step().seconds() == {}


def test_a_part_takes_as_long_as_it_takes():
    timer = StepTimer(CPU)
    time.sleep(0.02)
    timer.mark("sleep")
    timer.mark("nothing")
    parts = timer.end_step().seconds()
    assert 0.02 <= parts["sleep"] < 2
    assert 0 <= parts["nothing"] < parts["sleep"]


class Stream:
    """A GPU that is behind: events get their time when the stream has got there."""

    def __init__(self) -> None:
        self.now, self.waits, self.captures = 0.0, 0, False
        self.pending: list[Any] = []

    def run(self, milliseconds):
        self.pending.append(milliseconds)

    def finish(self):
        for work in self.pending:
            if isinstance(work, float):
                self.now += work
            else:
                work.at = self.now
        self.pending = []


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, on):
            on.pending.append(self)

        def synchronize(self):
            stream.waits += 1
            stream.finish()

        def elapsed_time(self, end):
            return end.at - self.at  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.captures)
    return stream


def test_on_a_gpu_only_asking_waits(stream):
    timer = StepTimer(CUDA)
    steps = []
    for _ in range(2):
        stream.run(3.0)
        timer.mark("data")
        stream.run(40.0)
        timer.mark("forward_backward")
        steps.append(timer.end_step())
    assert stream.waits == 0
    assert [phases.seconds() for phases in steps] == [{"data": 0.003, "forward_backward": 0.04}] * 2
    assert stream.waits == 2


def test_captured_work_has_no_phases(stream):
    timer = StepTimer(CUDA)
    stream.captures = True
    timer.mark("forward")
    stream.captures = False
    stream.run(3.0)
    timer.mark("step")
    assert timer.end_step().seconds() == {"step": 0.003}


@pytest.mark.gpu
def test_a_gpu_is_timed_by_itself():
    timer = StepTimer(CUDA)
    torch.cuda._sleep(50_000_000)  # cycles: about 30 ms
    timer.mark("sleep")
    phases = timer.end_step()
    assert 0.005 < phases.seconds()["sleep"] < 1
