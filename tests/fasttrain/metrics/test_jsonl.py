import json
import math
import multiprocessing
import os
import signal
import time

import pytest

from fasttrain.events import Event
from fasttrain.metrics.jsonl import JsonLines, LineFile, last_step, read_metrics, read_validations
from fasttrain.rundir import RunDir


@pytest.fixture
def run(tmp_path):
    return tmp_path / "runs" / "x"


def steps(run):
    return [line["step"] for line in read_metrics(run)]


def write(run, numbers, **values):
    lines = JsonLines(RunDir(run))
    for number in numbers:
        lines.step(number, values)
    lines.close(0)


def test_what_is_written_is_read(run):
    values = {"loss": 0.1 + 0.2, "tokens": 2**60, "time/data": 1e-9}
    before = time.time()
    write(run, [1, 2], **values)
    first, second = read_metrics(run)
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    assert first == {"step": 1, **values}  # to the last bit
    assert second == {"step": 2, **values}


def test_a_run_without_a_file_has_no_steps(tmp_path):
    assert read_metrics(tmp_path) == []
    assert read_validations(tmp_path) == []


def test_lines_are_json_where_values_are_not_finite(run):
    write(run, [1], loss=math.nan, grad_norm=math.inf, lr=1e-3)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    stored = json.loads((run / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert stored["loss"] is stored["grad_norm"] is None
    assert stored["nonfinite"] == ["loss", "grad_norm"]
    (line,) = read_metrics(run)
    assert math.isnan(line["loss"])
    assert math.isnan(line["grad_norm"])
    assert line["lr"] == 1e-3


def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(run):
    write(run, [1, 2, 3], loss=1.0)
    file = run / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert steps(run) == [1, 2]
    write(run, [3, 4], loss=1.0)
    assert steps(run) == [1, 2, 3, 4]
    file.write_bytes(file.read_bytes() + '{"text": "é'.encode()[:-1])  # within a character
    assert steps(run) == [1, 2, 3, 4]


def test_a_line_that_lacks_only_its_newline_is_kept(run):
    write(run, [1, 2], loss=1.0)
    file = run / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    write(run, [3], loss=1.0)
    assert steps(run) == [1, 2, 3]


def test_a_resumed_run_replaces_the_steps_that_it_took_back(run):
    write(run, range(1, 8), loss=1.0)
    write(run, [4, 5], loss=2.0)
    assert [(line["step"], line["loss"]) for line in read_metrics(run)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 9  # the file keeps what happened


def test_validations_are_per_set(run):
    lines = JsonLines(RunDir(run))
    for step, name, loss in [(100, "a", 1.0), (100, "b", 2.0), (200, "a", 3.0), (100, "a", 4.0), (100, "b", 5.0)]:
        lines.validation(step, name, {"loss": loss})
    assert [(line["step"], line["set"], line["loss"]) for line in read_validations(run)] == [
        (100, "a", 4.0),
        (100, "b", 5.0),
    ]
    assert read_metrics(run) == []


def test_events_keep_their_evidence(run):
    lines = JsonLines(RunDir(run))
    evidence = {"losses": [3.2, math.nan]}
    text = "loss 9.1 after 3.2"
    lines.event(Event(step=7, time=1e9, tokens=700, kind="spike", text=text, evidence=evidence, documents=["a.py"]))
    line = json.loads((run / "events.jsonl").read_text())
    assert line.pop("time") == 1e9
    assert line == {
        "step": 7,
        "tokens": 700,
        "kind": "spike",
        "text": text,
        "action": "",
        "evidence": {"losses": [3.2, None]},
        "documents": ["a.py"],
        "nonfinite": line["nonfinite"],
    }


def test_the_last_step_is_found_without_reading_all(run):
    assert last_step(run) == 0
    lines = JsonLines(RunDir(run))
    for step in range(1, 5000):
        lines.step(step, {"loss": 1.0, "more": 2.0, "and": 3.0})
    assert last_step(run) == 4999
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 5000, "ti')
    assert last_step(run) == 4999


def test_what_is_not_json_is_a_mistake_of_the_caller(run):
    with pytest.raises(TypeError, match="not JSON serializable"):
        JsonLines(RunDir(run)).step(1, {"loss": object()})  # type: ignore[dict-item]


def test_a_full_disk_costs_lines_and_not_the_run(run, caplog):
    run.mkdir(parents=True)
    os.symlink("/dev/full", run / "metrics.jsonl")
    write(run, [1, 2, 3], loss=1.0)
    assert len(caplog.records) == 1
    assert "No space left on device; lines are lost until it can" in caplog.text


def test_a_line_that_the_disk_took_half_of(tmp_path):
    class Disk:
        """Has room for ten bytes, then for none, then for all."""

        def __init__(self):
            self.data, self.room = b"", [10, 0, 1000]

        def write(self, data):
            room = self.room.pop(0)
            if not room:
                raise OSError(28, "No space left on device")
            self.data += data[:room]
            return min(room, len(data))

    lines = LineFile(tmp_path / "metrics.jsonl")
    lines._file = disk = Disk()  # type: ignore[assignment]
    for step in (1, 2, 3):
        lines.append({"step": step, "loss": 1.0})
    (tmp_path / "metrics.jsonl").write_bytes(disk.data)
    assert steps(tmp_path) == [3]


def write_until_killed(run, going):
    lines = JsonLines(RunDir(run))
    for step in range(1, 10**9):
        lines.step(step, {"loss": step / 7, "padding/" + "x" * 300: 0.0})
        if step == 200:
            going.set()


def test_a_killed_writer_leaves_whole_lines(run):
    context = multiprocessing.get_context("fork")
    for attempt in (1, 2, 3):  # each continues in the file that the one before it left
        going = context.Event()
        writer = context.Process(target=write_until_killed, args=(run, going))
        writer.start()
        assert going.wait(20)
        time.sleep(0.01 * attempt)
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        data = (run / "metrics.jsonl").read_bytes()
        *whole, torn = data.split(b"\n")
        broken = [line for line in whole if not line.endswith(b"}")]  # ended by the next writer
        assert len(broken) < attempt
        assert len([json.loads(line) for line in whole if line.endswith(b"}")]) >= 200 * attempt
        assert len(torn) < 500
        numbers = steps(run)
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= 200
