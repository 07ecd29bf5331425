import inspect
import json
import math
import re
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fasttrain.config import Config, LogConfig
from fasttrain.config_toml import to_toml
from fasttrain.events import Event
from fasttrain.metrics import logger as record
from fasttrain.metrics.jsonl import JsonLines, read_metrics, read_validations
from fasttrain.metrics.logger import SinkOptions, Sinks
from fasttrain.metrics.tensorboard import TensorBoard
from fasttrain.metrics.weights_and_biases import WeightsAndBiases
from fasttrain.rundir import RunDir

QUIET = LogConfig(tensorboard=False)
TOML = to_toml(Config())
VALUES = {"loss": 3.5, "time/data": 0.25, "gpu/power": 300.0}


class recorder(Sinks):
    """Sinks of a run, closed as a run closes them."""

    def __init__(self, run, log=QUIET, *, resume_step=0, is_main=True):
        options = SinkOptions(run=RunDir(run), log=log, config_toml=TOML, resume_step=resume_step)
        super().__init__(options, is_main=is_main)
        self.step, self.validation, self.event = (partial(self.each, name) for name in ("step", "validation", "event"))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.close(0 if kind is None else 1)


def record_a_run(record):
    record.step(1, VALUES)
    record.validation(1, "held-out", {"loss": 4.0, "perplexity": 54.6})
    record.event(Event(step=1, tokens=10, kind="spike", text="loss 9 after 3", evidence={"window": [1, 2]}))


def test_json_lines_are_always_written(tmp_path):
    with recorder(tmp_path) as record:
        record_a_run(record)
        assert read_metrics(tmp_path)[0]["loss"] == 3.5  # while the run continues
    assert read_validations(tmp_path)[0]["perplexity"] == 54.6
    assert json.loads((tmp_path / "events.jsonl").read_text())["evidence"] == {"window": [1, 2]}
    assert not (tmp_path / "tensorboard").exists()
    assert not (tmp_path / "wandb.json").exists()


def test_other_ranks_write_nothing(tmp_path):
    with recorder(tmp_path / "run", LogConfig(wandb="project"), is_main=False) as record:
        record_a_run(record)
    assert not (tmp_path / "run").exists()


# TensorBoard


@pytest.fixture
def board(monkeypatch):
    """Stands for tensorboard and torch's writer: writers, and what they were told."""
    writers = []

    class SummaryWriter:
        def __init__(self, **arguments):
            self.arguments, self.closed = arguments, False
            self.scalars: list[Any] = []
            self.texts: list[Any] = []
            self.file_writer = SimpleNamespace(add_summary=self.add_summary)
            writers.append(self)

        def add_summary(self, summary, step, when):
            assert 0 <= time.time() - when < 60
            self.scalars.append((step, summary))

        def add_text(self, tag, text, step):
            self.texts.append((step, tag, text))

        def flush(self):
            pass

        def close(self):
            self.closed = True

    def summary(value):
        return {item.tag: item.simple_value for item in value}

    summary.Value = SimpleNamespace  # type: ignore[attr-defined]
    torch_side: Any = ModuleType("torch.utils.tensorboard")
    proto: Any = ModuleType("tensorboard.compat.proto.summary_pb2")
    torch_side.SummaryWriter, proto.Summary = SummaryWriter, summary
    for name in ("tensorboard", "tensorboard.compat", "tensorboard.compat.proto"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (torch_side, proto):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return writers


def test_tensorboard_gets_groups_of_tags(board, tmp_path):
    with recorder(tmp_path, LogConfig()) as record:
        record_a_run(record)
    (writer,) = board
    assert writer.arguments["log_dir"] == str(tmp_path / "tensorboard")
    assert writer.scalars == [
        (1, {"train/loss": 3.5, "time/data": 0.25, "gpu/power": 300.0}),
        (1, {"validation/held-out/loss": 4.0, "validation/held-out/perplexity": 54.6}),
        (1, {"events/spike": 1.0}),  # a mark
    ]
    assert writer.texts == [
        (1, "config", f"```toml\n{TOML}\n```"),
        (1, "events/spike", 'loss 9 after 3\n\n- action: "none"\n- window: [1, 2]'),
    ]
    assert writer.closed


def test_tensorboard_gets_the_steps_of_a_second_together(board, tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("fasttrain.metrics.tensorboard.time.time", lambda: now[0])
    sink = TensorBoard(RunDir(tmp_path), config_toml="", resume_step=0)
    monkeypatch.setattr(
        board[0].file_writer, "add_summary", lambda _, step, when: board[0].scalars.append((step, when))
    )
    for step, now[0] in ((1, 1000.0), (2, 1000.5), (3, 1000.9)):
        sink.step(step, {"loss": 1.0})
    assert board[0].scalars == []
    now[0] = 1001.0
    sink.step(4, {"loss": 1.0})
    assert board[0].scalars == [(1, 1000.0), (2, 1000.5), (3, 1000.9), (4, 1001.0)]
    sink.step(5, {"loss": 1.0})
    now[0] = 900.0  # the clock was set back
    sink.step(6, {"loss": 1.0})
    assert board[0].scalars[4:] == [(5, 1001.0), (6, 900.0)]
    sink.step(7, {"loss": 1.0})
    sink.close(0)
    assert board[0].scalars[6:] == [(7, 900.0)]


def test_tensorboard_forgets_what_a_resumed_run_took_back(board, tmp_path):
    recorder(tmp_path, LogConfig(), resume_step=100).close()
    assert board[0].arguments["purge_step"] == 101


def test_a_missing_tensorboard_is_a_warning_with_its_remedy(monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with recorder(tmp_path, LogConfig()) as record:
        record_a_run(record)
    assert len(read_metrics(tmp_path)) == 1
    assert [line.getMessage() for line in caplog.records] == [
        "metrics: no TensorBoard events, tensorboard is not installed; pip install 'fasttrain[tensorboard]', or set "
        "log.tensorboard to false"
    ]


def test_a_run_does_not_die_of_its_onlookers(board, tmp_path, caplog):
    with recorder(tmp_path, LogConfig()) as record:
        record.step(1, VALUES)
        board[0].file_writer.add_summary = lambda *_: 1 / 0
        for step in (2, 3):
            record.step(step, VALUES)
    assert len(read_metrics(tmp_path)) == 3
    assert [line.getMessage() for line in caplog.records] == [
        "metrics: continues without TensorBoard, which failed: ZeroDivisionError: division by zero"
    ]


def test_real_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with recorder(tmp_path, LogConfig()) as record:
        for step in range(1, 6):
            record.step(step, {**VALUES, "loss": float(step)})
        record.step(6, {**VALUES, "loss": math.nan})
    with recorder(tmp_path, LogConfig(), resume_step=3) as record:
        record.step(4, {**VALUES, "loss": 40.0})
        record.event(Event(step=4, tokens=40, kind="spike", text="loss 40 after 3", evidence={"window": [4]}))
        record.validation(4, "held-out", {"loss": 4.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert [event.value for event in events.Scalars("gpu/power")] == [300.0] * 4
    assert events.Scalars("validation/held-out/loss")[0].value == 4.5
    text = events.Tensors("events/spike/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == 'loss 40 after 3\n\n- action: "none"\n- window: [4]'
    assert [(mark.step, mark.value) for mark in events.Scalars("events/spike")] == [(4, 1.0)]


# Weights & Biases


@pytest.fixture
def wandb(monkeypatch):
    """Stands for W&B: its runs, and what they were told."""
    module: Any = ModuleType("wandb")
    module.runs = []

    class Run:
        def __init__(self, **arguments):
            self.arguments, self.logged, self.metrics, self.alerts, self.exit_code = arguments, [], [], [], None
            self.id = arguments["id"] or f"new{len(module.runs)}"
            module.runs.append(self)

        def log(self, values):
            self.logged.append(values)

        def define_metric(self, name, **options):
            self.metrics.append((name, options))

        def alert(self, title, text):
            self.alerts.append((title, text))

        def finish(self, exit_code):
            self.exit_code = exit_code

    module.init = Run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


WANDB = LogConfig(tensorboard=False, wandb="project")


def test_wandb_gets_everything_over_the_step(wandb, tmp_path):
    run = tmp_path / "tiny"
    with recorder(run, WANDB) as record:
        record_a_run(record)
    (logged,) = wandb.runs
    assert logged.arguments == {
        "project": "project",
        "name": "tiny",
        "dir": str(run),
        "id": None,
        "resume": "allow",
        "config": logged.arguments["config"],
        "allow_val_change": True,
    }
    assert logged.arguments["config"]["optim"]["lr"] == Config().optim.lr
    assert logged.metrics == [("step", {"hidden": True}), ("*", {"step_metric": "step"})]
    assert logged.logged == [
        {"step": 1, **VALUES},
        {"step": 1, "validation/held-out/loss": 4.0, "validation/held-out/perplexity": 54.6},
    ]
    assert logged.alerts == [("spike at step 1", "loss 9 after 3")]
    assert logged.exit_code == 0


def test_a_resumed_run_continues_its_wandb_run(wandb, tmp_path):
    recorder(tmp_path, WANDB).close()
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"project": "project", "id": "new0"}
    recorder(tmp_path, WANDB, resume_step=10).close()
    assert wandb.runs[1].arguments["id"] == "new0"
    recorder(tmp_path, LogConfig(tensorboard=False, wandb="other"), resume_step=10).close()
    assert wandb.runs[2].arguments["id"] is None


def test_wandb_shows_a_failed_run_as_failed(wandb, tmp_path):
    with pytest.raises(RuntimeError), recorder(tmp_path, WANDB):
        raise RuntimeError
    assert wandb.runs[0].exit_code == 1


def test_wandb_that_cannot_start_is_an_error_with_its_remedy(wandb, tmp_path):
    def refuse(**_):
        raise RuntimeError("No API key configured")

    wandb.init = refuse
    with pytest.raises(
        ValueError,
        match="log.wandb is 'project', and could not start W&B: No API key configured; wandb login",
    ):
        recorder(tmp_path, WANDB)


@pytest.fixture
def no_network(monkeypatch):
    """In the place of W&B and of every proxy: a list of what asks it. With WANDB_MODE=online, 72 requests."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                asked.append(connection.recv(200))
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("WANDB_BASE_URL", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, address)
        monkeypatch.delenv("NO_PROXY", raising=False)
        yield asked
        server.shutdown(socket.SHUT_RDWR)


def test_the_real_wandb_offline(no_network, monkeypatch, tmp_path):
    """All of it is in the run's directory, for `wandb sync`, and nothing asks a network."""
    wandb = pytest.importorskip("wandb", reason="needs fasttrain[wandb]")
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    DataStore = pytest.importorskip("wandb.sdk.internal.datastore", reason="its newest reads files elsewhere").DataStore

    monkeypatch.setenv("WANDB_CONSOLE", "off")
    run = tmp_path / "tiny"
    with recorder(run, WANDB) as record:
        record_a_run(record)
        record.step(2, VALUES | {"loss": math.nan})
    wandb.teardown()
    assert no_network == []
    stored = json.loads((run / "wandb.json").read_text())
    (path,) = (run / "wandb").glob(f"offline-run-*-{stored['id']}/*.wandb")
    file = DataStore()
    file.open_for_scan(str(path))
    history: list[Any] = []
    settings: dict[str, Any] = {}
    name, code = "", None
    while (data := file.scan_data()) is not None:
        line = Record()
        line.ParseFromString(bytes(data))
        kind = line.WhichOneof("record_type")
        if kind == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in line.history.item}
            history.append({key: value for key, value in items.items() if not key.startswith("_")})
        elif kind == "run":
            name = line.run.display_name
            settings |= {item.key: json.loads(item.value_json) for item in line.run.config.update}
        elif kind == "exit":
            code = line.exit.exit_code
    assert name == "tiny"
    assert settings["optim"]["lr"] == Config().optim.lr
    assert history[0] == {"step": 1, **VALUES}
    assert history[1] == {"step": 1, "validation/held-out/loss": 4.0, "validation/held-out/perplexity": 54.6}
    assert history[2]["step"] == 2
    assert code == 0


def test_wandb_without_its_package_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ImportError, match=r"log.wandb is 'project', and wandb is not installed: pip install 'fasttrain\["
    ):
        recorder(tmp_path, WANDB)


def test_nothing_optional_is_imported_unasked(tmp_path, monkeypatch):
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    recorder(tmp_path).close()


# Another one


def test_the_example_in_the_docs(tmp_path, monkeypatch):
    """A class and a line, as docs/metrics.md has them."""
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "SINKS.append" in block)
    monkeypatch.setattr(record, "SINKS", list(record.SINKS))
    exec(example, {"__name__": "example"})
    with recorder(tmp_path) as recording:
        record_a_run(recording)
    assert (tmp_path / "loss.csv").read_text() == "1,3.5\n1,held-out=4.0\n"
    assert len(read_metrics(tmp_path)) == 1  # beside the others


def test_every_sink_has_the_methods_of_the_interface():
    asked = {name for name in vars(record.Sink) if not name.startswith("_")}
    assert asked == {"step", "validation", "event", "close"}
    for sink in (JsonLines, TensorBoard, WeightsAndBiases):
        for name in asked:
            ours, theirs = inspect.signature(getattr(record.Sink, name)), inspect.signature(getattr(sink, name))
            assert list(ours.parameters) == list(theirs.parameters)


def test_a_sink_that_does_not_open_for_this_run_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "SINKS", [*record.SINKS, lambda opening: None])
    with recorder(tmp_path) as recording:
        record_a_run(recording)
    assert len(read_metrics(tmp_path)) == 1
