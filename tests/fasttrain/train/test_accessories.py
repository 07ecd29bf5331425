"""What a run can do without: each of them fails, and the run has the same losses and says so once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fasttrain.data.locate
import fasttrain.metrics.logger
import fasttrain.tools.profiling
import fasttrain.tools.report.page
import fasttrain.train.validate
from fasttrain.metrics.jsonl import read_metrics
from fasttrain.metrics.tensorboard import TensorBoard
from fasttrain.train import main
from tests.runs import command, curve, events, train

Patch = pytest.MonkeyPatch


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("an accident")


class Broken:
    """A W&B run, or any sink, that fails once it is used."""

    id = "x"
    define_metric = finish = lambda *_, **__: None
    log = alert = broken


class BrokenAtItsEnd(Broken):
    log = alert = lambda *_, **__: None
    finish = broken


def wandb(monkeypatch: Patch, run: type[Broken]) -> None:
    module: Any = ModuleType("wandb")
    module.init = lambda **_: run()
    monkeypatch.setitem(sys.modules, "wandb", module)


def own_sink(monkeypatch: Patch) -> None:
    def of_a_script(options: Any) -> Any:
        return broken()

    monkeypatch.setattr(fasttrain.metrics.logger, "SINKS", [*fasttrain.metrics.logger.SINKS, of_a_script])


CASES: dict[str, tuple[str, list[Any], Callable[[Patch], None]]] = {
    "sample": ("sample", [], lambda patch: patch.setattr(fasttrain.train.validate, "continue_text", broken)),
    "report": ("report", [], lambda patch: patch.setattr(fasttrain.tools.report.page, "page", broken)),
    "TensorBoard opens": (
        "tensorboard",
        ["--log.tensorboard", True],
        lambda patch: patch.setattr(TensorBoard, "__init__", broken),
    ),
    "TensorBoard": (
        "TensorBoard",
        ["--log.tensorboard", True],
        lambda patch: patch.setattr(TensorBoard, "_add", broken),
    ),
    "W&B": ("WeightsAndBiases", ["--log.wandb", "p"], lambda patch: wandb(patch, Broken)),
    "W&B ends": ("WeightsAndBiases", ["--log.wandb", "p"], lambda patch: wandb(patch, BrokenAtItsEnd)),
    "a sink of a script": ("of_a_script", [], own_sink),
    "profiler": (
        "profiler",
        ["--log.profile", 1, "--batch.steps", 12],
        lambda patch: patch.setattr(fasttrain.tools.profiling.Profiler, "begin_step", broken),
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return curve(train(tmp_path_factory.mktemp("accessories") / "whole", "--batch.steps", 12))


@pytest.mark.parametrize("case", CASES)
def test_an_accessory_that_fails_is_named_once_and_the_run_finishes_as_it_would(
    tmp_path: Path, monkeypatch: Patch, whole: list[float], case: str
) -> None:
    name, options, inject = CASES[case]
    inject(monkeypatch)
    assert main(command(tmp_path / "run", "--batch.steps", 12, *options)) == 0
    assert curve(read_metrics(tmp_path / "run")) == whole
    (event,) = events(tmp_path / "run", "accessory")
    assert event["text"] == f"{name} failed, and the run continues without it: ZeroDivisionError: an accident"
    assert len(events(tmp_path / "run", "finish")) == 1


def test_the_terminal(tmp_path: Path, monkeypatch: Patch, whole: list[float], caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(fasttrain.metrics.display.Display, "_figures", lambda *_: {"loss": "\ud800"})
    monkeypatch.setattr("builtins.print", broken)
    assert main(command(tmp_path / "run", "--batch.steps", 12)) == 0
    assert curve(read_metrics(tmp_path / "run")) == whole
    assert [line.getMessage() for line in caplog.records if "display" in line.getMessage()] == [
        "display: cannot write: an accident; lines are lost until it can"
    ]


def test_documents_that_cannot_be_located_do_not_end_a_run(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fasttrain.data.locate, "segment_at", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    assert fasttrain.data.locate.documents_of(tmp_path, range(3)) == ["unknown: gone"]
