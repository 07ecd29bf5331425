"""How runs end whose loss is not finite, or which have nothing left to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fasttrain.events import ExitCode
from fasttrain.train import main
from tests.runs import command, events, train

LR = "optim.lr is 1000, and more than 0.05 is unusual; begin with 0.0003"


@pytest.mark.parametrize("spike", ["warn", "stop"])
def test_a_run_that_ends_without_a_finite_loss_has_not_finished_and_names_the_setting(
    tmp_path: Path, spike: str
) -> None:
    options = ["--optim.kind", "adamw", "--optim.lr", 1000, "--batch.steps", 30]
    options += ["--monitor.spike", spike, "--checkpoint.every", 0]
    assert main(command(tmp_path / "run", *options)) == ExitCode.STOPPED
    assert events(tmp_path / "run", "finish") == []
    (end,) = events(tmp_path / "run", "stop")
    assert LR in end["text"]
    assert "nan" in end["text"]
    assert [event["text"] for event in events(tmp_path / "run", "plan")] == [LR]  # before the first step


def test_a_setting_that_nobody_uses_is_named_at_the_start(tmp_path: Path) -> None:
    train(tmp_path / "run", "--optim.weight_decay", 100)
    (event,) = events(tmp_path / "run", "plan")
    assert event["text"] == "optim.weight_decay is 100, and more than 1 is unusual; begin with 0.1"


def test_a_finished_run_with_fewer_steps_has_as_many_as_it_had(tmp_path: Path) -> None:
    train(tmp_path / "run")
    train(tmp_path / "run", "--batch.steps", 3)
    first, second = events(tmp_path / "run", "finish")
    assert first["text"] == second["text"]
    assert second["text"].startswith("finished: 6 steps, 1,536 tokens")


def test_a_run_on_characters_of_code_has_no_alarm(tmp_path: Path) -> None:
    text = b"".join(path.read_bytes() for path in sorted(Path(pytest.__file__).parents[1].glob("_pytest/*.py")))
    text = text.decode("utf-8").encode("ascii", "replace")
    np.frombuffer(text, np.uint8).astype("<u2").tofile(tmp_path / "train.bin")
    options = ["--data.path", tmp_path / "train.bin", "--data.vocab", 128, "--model.hidden", 128, "--model.ffn", 384]
    train(tmp_path / "run", *options, "--data.sequence", 256, "--model.head_dim", 32, "--model.layers", 4)
    assert events(tmp_path / "run", "first loss") == []
