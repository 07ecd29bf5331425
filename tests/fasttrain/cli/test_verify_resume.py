"""fasttrain verify-resume: passes what resumes bit-for-bit, names what does not, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fasttrain import cli
from fasttrain.checkpoint.committed import Checkpoint
from fasttrain.cli.parse import load
from fasttrain.config import Config
from fasttrain.recipes import RECIPES
from fasttrain.tools import run_process
from fasttrain.tools.run_process import _is_running
from fasttrain.tools.verify_resume import _killed, _moved, plan_trial, shortened

SMALL = [
    *("--model.layers", "2", "--model.hidden", "32", "--model.heads", "4", "--model.kv_heads", "2"),
    *("--model.head_dim", "8", "--model.ffn", "48", "--data.sequence", "32", "--batch.sequences", "8"),
    *("--batch.micro", "8"),
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def call(*words: object) -> int:
    """The exit code, however the command ends."""
    try:
        return cli.main(["verify-resume", *SMALL, *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.slow
def test_a_run_with_dropout_passes_also_on_two_ranks(tmp_path, capsys):
    keep = tmp_path / "kept"
    assert call("--steps", 8, "--model.dropout", 0.2, "--other-ranks", 2, "--keep", keep, "--json") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found == json.loads((keep / "verify_resume.json").read_text())
    killed, moved = found["results"]
    assert killed["result"] == "bitwise"
    assert 4 <= killed["evidence"]["resumed_from"] < 8
    assert killed["evidence"]["checkpoints"] == list(range(1, 9))
    assert moved["result"] in ("bitwise", "within rounding")
    assert moved["evidence"]["resumed_from"] == 4
    assert moved["evidence"]["against"] == "calm"  # ranks draw their own dropout
    assert moved["evidence"]["greatest"]["loss"]["relative"] <= 1e-5
    assert (found["steps"], found["kill_at"], found["ranks"]) == (8, 4, 1)
    assert set(found["versions"]) == {"fasttrain", "torch", "python"}
    assert found["hardware"]["precision"] == "fp32"
    assert "batch.steps 1000 -> 8" in printed.err.replace("\n", " ")
    assert "killed: until it is killed after step 4, on 1 rank" in printed.err


@pytest.mark.slow
def test_a_resume_that_forgets_a_moment_is_found_out(tmp_path, capsys):
    trainer = (str(Path(__file__).parents[1] / "tools" / "broken_resume.py"),)
    with patch.object(run_process, "TRAINER", trainer):
        assert call("--optim.kind", "adamw", "--steps", 8, "--other-ranks", 0, "--keep", tmp_path / "kept") == 1
    evidence = json.loads((tmp_path / "kept" / "verify_resume.json").read_text())["results"][0]["evidence"]
    assert evidence["first_step"] == evidence["tensors_after"] == evidence["resumed_from"] + 1
    assert [found["tensor"] for found in evidence["tensors"]] == [
        "optimizer.blocks.1.qkv.weight.exp_avg",
        "model.blocks.1.qkv.weight",
    ]
    assert evidence["figure"]["step"] == evidence["first_step"] + 1  # the loss shows it a step later
    printed = " ".join(capsys.readouterr().out.split())
    assert "failed: 8 steps" in printed
    assert f"the first difference is at step {evidence['first_step']}" in printed
    assert "2 tensors differ: optimizer.blocks.1.qkv.weight.exp_avg[" in printed
    assert "not tried" in printed


# Processes


def trainer(tmp_path: Path, code: str) -> Any:
    script = tmp_path / "trainer.py"
    script.write_text(code)
    return patch.object(run_process, "TRAINER", (str(script),))


def test_the_last_words_of_a_run_that_fails_are_shown(tmp_path, capsys):
    with trainer(tmp_path, "print('the disk is on fire'); raise SystemExit(7)"):
        assert call("--steps", 4) == 1
    error = capsys.readouterr().err
    assert "the run 'whole' ended with exit code 7; its last lines:\nthe disk is on fire" in error


def test_a_mistake_that_a_run_finds_is_a_mistake(tmp_path, capsys):
    with trainer(tmp_path, "print('fasttrain.train: error: data.path: nothing there'); raise SystemExit(2)"):
        assert call("--steps", 4) == 2
    assert "fasttrain verify-resume: error: data.path: nothing there" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_runs_and_what_they_have_started(tmp_path, number):
    code = f"""
import os, pathlib, subprocess, sys, time
if len(sys.argv) > 2:
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
path = pathlib.Path({str(tmp_path)!r}, f"{{os.getpid()}}.part")
path.touch()
path.rename(path.with_suffix(".pid"))
time.sleep(60)
"""

    def interrupt() -> None:
        while len(list(tmp_path.glob("*.pid"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with trainer(tmp_path, code):
        assert call("--steps", 4) == 128 + number
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert not any(map(_is_running, pids))


def test_a_run_that_ends_too_soon_cannot_be_killed(tmp_path):
    class Quick(run_process.Runs):
        def _run(self, name: str, *_: Any, **__: Any) -> None:
            (tmp_path / name).mkdir()

        def checkpoints(self, name: str) -> dict[int, Any]:
            return {2: None, 4: None}

    with pytest.raises(ValueError, match="ended before it could be killed, 3 times; raise --steps"):
        Quick(tmp_path, print).kill("killed", small("--batch.steps", 4), 1, 2)


# What is tried


def small(*words: object) -> Config:
    return load([*SMALL, "--optim.warmup", "1", *map(str, words)], RECIPES)


def test_only_what_has_to_be_short_is_shortened():
    settings = small(
        "--optim.schedule", "wsd", "--optim.decay_fraction", 0.9, "--model.dropout", 0.1, "--log.wandb", "p"
    )
    trial = plan_trial(settings, steps=6, kill_at=3)
    assert {change.key for change in trial.changed} == {
        "batch.steps", "optim.warmup", "checkpoint.every", "checkpoint.keep_last", "validation.every",
        "validation.sequences", "validation.sample", "log.tensorboard", "log.wandb",
    }  # fmt: skip
    assert (trial.kill_at, trial.ranks, trial.other_ranks) == (3, 1, 2)
    for name, recipe in RECIPES.items():  # their warm-ups fit
        assert shortened(recipe(), steps=2, save_every=1).optim.warmup == 0, name


def test_the_digest_is_of_the_settings_and_not_of_their_place():
    digests = [plan_trial(small(*words), steps=4, kill_at=2).digest for words in ([], ["--out", "x"], ["--seed", 1])]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("gpus", "words", "expected"),
    [
        (0, [], (1, 2)),
        (0, ["--batch.sequences", 3, "--batch.micro", 3], (1, 3)),
        (0, ["--batch.sequences", 1, "--batch.micro", 1], (1, 0)),
        (0, ["--parallel.dp_replicate", 2, "--batch.micro", 2], (2, 4)),
        (8, ["--batch.micro", 1], (8, 4)),
        (8, ["--batch.micro", 4], (2, 1)),
        (8, ["--batch.micro", 4, "--parallel.device", "cpu"], (1, 2)),
        (1, [], (1, 0)),
    ],
)
def test_numbers_of_ranks_that_are_possible(gpus, words, expected):
    with patch("torch.cuda.device_count", lambda: gpus), patch("torch.cuda.is_available", lambda: gpus > 0):
        trial = plan_trial(small(*words), steps=4, kill_at=2)
    assert (trial.ranks, trial.other_ranks) == expected


def test_another_number_of_ranks_gets_micro_batches_that_fit():
    trial = plan_trial(small("--batch.sequences", 12, "--batch.micro", 6), steps=4, kill_at=2, other_ranks=3)
    assert trial.moved(Path("c")).batch.micro == 2
    assert trial.moved(Path("c")).resume == "c"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", 1], "--steps: '1' must be a whole number from 2 to 1_000_000"),
        (["--steps", 4, "--kill-at", 4], "--kill-at 4 must be a step that is saved"),
        (["--steps", 8, "--kill-at", 4, "--save-every", 3], "a multiple of --save-every (3)"),
        (["--ranks", 2], "--ranks 2: batch.sequences (8) must be a multiple of 16, 2 ranks times batch.micro (8)"),
        (
            ["--parallel.dp_replicate", 2, "--ranks", 1],
            "--ranks 1: parallel.dp_replicate (2) must divide the number of ranks, 1",
        ),
        (["--other-ranks", 1], "--other-ranks 1 is the number of ranks itself"),
        (["--other-ranks", 3], "--other-ranks 3: batch.sequences (8) must be a multiple of 3, 3 ranks times"),
        (["--resume", "runs/base"], "--resume runs/base: the runs that are compared begin at step 0"),
        (["--keep", "fasttrain"], "--keep fasttrain must be a new or an empty directory"),
        (["--optim.rate", 1], "--optim.rate is unknown"),
        (["--step", 4], "--step"),  # no abbreviations
    ],
)
def test_mistakes_are_named_before_anything_runs(words, message, capsys):
    with patch.object(run_process.Runs, "_run", lambda *_: pytest.fail("it ran")):
        assert call(*words) == 2
    assert message in capsys.readouterr().err


def test_torchrun_is_a_mistake(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert call() == 2
    assert "call it without torchrun" in capsys.readouterr().err


# Results


class Recorded:
    """Runs that have been done: figures by name and step, and the steps that they resumed from."""

    def __init__(self, steps: dict[str, dict[int, dict[str, float]]], resumed_from: int) -> None:
        self._steps, self._resumed_from = steps, resumed_from
        self.on_progress = lambda *_: None

    def steps(self, name: str) -> dict[int, dict[str, float]]:
        return self._steps[name]

    def resumed_from(self, name: str) -> int:
        return self._resumed_from

    def checkpoints(self, name: str) -> dict[int, Checkpoint]:
        return {step: Checkpoint(path=Path(name), step=step, loss=None, optimizer="", scaler={}, metadata={}, files=())
                for step in self._steps[name]}  # fmt: skip

    def finish(self, *_: Any) -> None: ...

    kill = finish


def lines(**changed: float) -> dict[int, dict[str, float]]:
    """Four steps; loss3=2.5 changes one."""
    found = {step: {"loss": 3.0 / step, "grad_norm": 1.0, "valid_tokens": 256} for step in (1, 2, 3, 4)}
    for name, value in changed.items():
        found[int(name[-1])][name[:-1]] = value
    return found


@pytest.fixture
def no_files(monkeypatch):
    monkeypatch.setattr("fasttrain.tools.verify_resume.differences", lambda *_: [])
    monkeypatch.setattr("fasttrain.tools.verify_resume.names", lambda *_: ["model.a"])


@pytest.mark.parametrize(
    ("changed", "resumed_from", "result", "text"),
    [
        ({}, 2, "bitwise", "resumed from step 2, 2 steps repeated"),
        ({"loss3": float("nan")}, 2, "differs", "the first difference is at step 3; loss of step 3 is 1.0 and nan"),
        ({"grad_norm2": 1.1}, 2, "differs", "at step 2, before the kill: with these settings this machine does not"),
        ({}, 0, "differs", "resumed from step 0, 4 steps repeated, though step 2 was saved"),
    ],
)
@pytest.mark.usefixtures("no_files")
def test_results_about_a_killed_run(changed, resumed_from, result, text):
    recorded: Any = Recorded({"whole": lines(), "killed": lines(**changed)}, resumed_from)
    compared = _killed(plan_trial(small(), steps=4, kill_at=2), recorded)
    assert compared.result == result
    assert text in compared.text


@pytest.mark.parametrize(
    ("changed", "precision", "result", "text"),
    [
        ({}, "fp32", "bitwise", "resumed from step 2 with batch.micro 4"),
        ({"loss4": 0.750001}, "fp32", "within rounding", "loss 1.3e-06 at step 4, grad_norm 0.0e+00"),
        ({"loss4": 0.7501}, "fp32", "differs", "loss 1.3e-04 at step 4"),
        ({"loss4": 0.7501}, "bf16", "within rounding", "(0.001 is allowed for the loss)"),
        ({"loss4": float("nan")}, "bf16", "differs", "loss inf at step 4"),
        ({"valid_tokens3": 255}, "fp32", "differs", "its batches are others from step 3 on"),
    ],
)
@pytest.mark.usefixtures("no_files")
def test_results_about_another_number_of_ranks(changed, precision, result, text):
    recorded: Any = Recorded({"whole": lines(), "moved": lines(**changed)}, 2)
    compared = _moved(plan_trial(small("--parallel.precision", precision), steps=4, kill_at=2), recorded)
    assert compared.result == result
    assert text in compared.text
