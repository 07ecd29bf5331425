"""Runs whose loss spikes, and what they do about it."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import fasttrain.train.setup
from fasttrain.checkpoint.committed import Checkpoint, list_checkpoints
from fasttrain.checkpoint.metadata import NAME, read_metadata
from fasttrain.data.batches import Batch, Batches
from fasttrain.data.cursor import DataCursor, Skip
from fasttrain.data.segments import read_segments
from fasttrain.events import Anomaly, ExitCode
from fasttrain.metrics.jsonl import read_metrics
from fasttrain.train import main
from fasttrain.train.rollback import skipped_after
from fasttrain.train.state import Progress
from tests.fasttrain.checkpoint.test_metadata import signed_again
from tests.ranks import run_ranks

RUN = [
    *("--model.layers", "1", "--model.hidden", "32", "--model.heads", "2", "--model.kv_heads", "2"),
    *("--model.head_dim", "16", "--model.ffn", "32", "--data.sequence", "32", "--batch.sequences", "8"),
    *("--batch.micro", "4", "--batch.steps", "90", "--optim.warmup", "5", "--optim.lr", "2e-3"),
    *("--checkpoint.every", "20", "--checkpoint.keep_last", "9", "--validation.every", "0"),
    *("--validation.sequences", "8", "--validation.sample", "", "--log.tensorboard", "False", "--log.every", "50"),
    *("--monitor.first", "64"),
]


def poisoned(places: range):
    """Batches whose tokens are noise at some places of the data: a skip passes over them."""
    at = Batches.at

    def noisy(batches: Batches, step: int) -> Batch:
        batch = at(batches, step)
        if batches._first_sample(step) // batches._sequences in places:
            generator = torch.Generator().manual_seed(step)
            noise = torch.randint(4096, batch.targets.shape, generator=generator)
            return replace(batch, targets=noise)
        return batch

    return patch.object(Batches, "at", noisy)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def train(run: Path, *options: Any) -> int:
    return main([*RUN, "--out", str(run), *map(str, options)])


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("rolled back")
    with poisoned(range(70, 75)):
        assert train(run) == 0
    return run


def test_poisoned_batches_are_found_and_skipped(rolled_back):
    (spike,) = events(rolled_back, "spike")
    (back,) = events(rolled_back, "rollback")
    assert 72 <= spike["step"] <= 77
    assert "rolled back to" in back["text"]
    assert "step-00000060" in back["text"]
    assert "bad data: the batch of step" in back["text"]
    first, count = back["evidence"]["skipped"]
    assert first + count == spike["step"] + 1  # the step after it was under way when it was judged
    assert 66 <= first <= 70
    assert 10 < len(back["documents"]) <= 50
    assert [line["step"] for line in read_metrics(rolled_back)] == list(range(1, 91))
    assert read_segments(rolled_back)[-1].cursor.skips[0] == Skip(first, count)


def test_every_event_says_when_what_why_and_what_was_done(rolled_back):
    lines = list(map(json.loads, (rolled_back / "events.jsonl").read_text().splitlines()))
    assert {"start", "spike", "rollback", "finish"} <= {line["kind"] for line in lines}
    for line in lines:
        assert {"step", "time", "tokens", "kind", "text", "action", "evidence", "documents"} <= set(line)
        assert line["tokens"] == line["step"] * 8 * 32
    (spike,) = events(rolled_back, "spike")
    assert spike["action"] == "as monitor.spike says: rollback"
    assert spike["documents"]
    assert spike["evidence"]["value"] > spike["evidence"]["expected"]


def test_after_a_rollback_a_run_is_as_if_it_never_had_the_batches(tmp_path, rolled_back):
    skips = read_segments(rolled_back)[-1].cursor.skips
    with patch.object(fasttrain.train.setup, "Progress", partial(Progress, cursor=DataCursor(skips=skips))):
        assert train(tmp_path) == 0
    assert not events(tmp_path, "rollback")
    losses = [[line["loss"] for line in read_metrics(run)] for run in (tmp_path, rolled_back)]
    assert losses[0] == losses[1]


def test_a_process_that_starts_again_knows_of_the_skip(tmp_path, rolled_back):
    assert train(tmp_path, "--resume", f"{rolled_back}@60", "--batch.steps", 91) == 0
    assert read_segments(tmp_path)[-1].cursor.skips == read_segments(rolled_back)[-1].cursor.skips[:1]


@pytest.mark.parametrize("policy", ["warn", "skip", "stop"])
def test_other_policies(tmp_path, policy):
    with poisoned(range(70, 75)):
        code = train(tmp_path, "--monitor.spike", policy, *(("--checkpoint.every", 2) if policy != "stop" else ()))
    assert code == (ExitCode.STOPPED if policy == "stop" else 0)
    assert len(events(tmp_path, "spike")) == 1
    assert not events(tmp_path, "rollback")
    assert len(events(tmp_path, "skip")) == (policy == "skip")
    if policy != "stop":  # the checkpoint that was due when the alarm came is there, and the last one
        steps = [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints")]
        assert {74, 90} <= set(steps)
    if policy == "stop":
        assert list_checkpoints(tmp_path / "checkpoints")[-1].step == 60
        assert "stopped: the loss spiked at step" in events(tmp_path, "stop")[0]["text"]


def test_in_the_first_steps_of_a_run_nothing_is_a_spike(tmp_path):
    with poisoned(range(70, 75)):
        assert train(tmp_path, "--batch.steps", 80, "--monitor.first", 90) == 0
    assert not events(tmp_path, "spike")


def test_rollbacks_are_bounded(tmp_path):
    """Every batch from a place on is noise: there is no way around it."""
    with poisoned(range(70, 10_000)):
        assert train(tmp_path, "--monitor.rollbacks", 1) == ExitCode.STOPPED
    assert len(events(tmp_path, "rollback")) == 1
    assert "after 1 rollbacks" in events(tmp_path, "stop")[0]["text"]


def train_with_nan(run: Path, places: list[int], world: int) -> None:
    """The last rank's loss is NaN at some places of the data."""
    from fasttrain.model import Head

    forward, at = Head.forward, Batches.at

    def marked(batches: Batches, step: int) -> Batch:
        batch = at(batches, step)
        bad = batches._first_sample(step) // batches._sequences in places and batches._dp_rank == world - 1
        return replace(batch, targets=batch.targets.where(torch.tensor(not bad), 7))

    def nan(head: Head, normed: Any, targets: Any, tied: Any) -> Any:
        loss = forward(head, normed, targets, tied)
        return loss * math.nan if bool((targets == 7).all()) else loss

    with patch.object(Batches, "at", marked), patch.object(Head, "forward", nan):
        assert train(run, "--batch.steps", 30, "--checkpoint.every", 5) == 0


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_that_is_not_finite_on_one_rank_never_reaches_the_weights(tmp_path, world):
    run = tmp_path
    if world == 1:
        train_with_nan(run, [12], 1)
    else:
        run_ranks(train_with_nan, 2, run, [12], 2)
    (event,) = events(run, "not finite")
    assert event["step"] == 13
    assert "skipped this optimizer update" in event["text"]
    metrics = {line["step"]: line["loss"] for line in read_metrics(run)}
    assert math.isnan(metrics[13])
    assert all(math.isfinite(loss) for step, loss in metrics.items() if step != 13)


@pytest.mark.parametrize("world", [1, 2])
def test_three_in_a_row_are_rolled_back(tmp_path, world):
    if world == 1:
        train_with_nan(tmp_path, [12, 13, 14], 1)
    else:
        run_ranks(train_with_nan, 2, tmp_path, [12, 13, 14], 2)
    assert len(events(tmp_path, "not finite")) == 3
    (back,) = events(tmp_path, "rollback")
    assert "step-00000010" in back["text"]
    assert "bad data" in back["text"]
    assert back["evidence"]["skipped"] == [10, 5]
    assert all(math.isfinite(line["loss"]) for line in read_metrics(tmp_path))


def test_a_spike_before_the_first_checkpoint_goes_back_to_the_start(tmp_path):
    with poisoned(range(70, 75)):
        assert train(tmp_path, "--checkpoint.every", 0) == 0
    (back,) = events(tmp_path, "rollback")
    assert "rolled back to the initial weights" in back["text"]
    whole = {line["step"]: line["loss"] for line in read_metrics(tmp_path)}
    assert list(whole) == list(range(1, 91))


def test_a_run_whose_checkpoints_are_all_from_the_spike_stops_and_loses_nothing(tmp_path):
    few = ["--checkpoint.every", 2, "--checkpoint.keep_last", 1, "--checkpoint.keep_best", False]
    with poisoned(range(70, 76)):
        assert train(tmp_path, *few) == ExitCode.STOPPED
    assert "no valid checkpoint is from before that" in events(tmp_path, "stop")[0]["text"]
    assert list_checkpoints(tmp_path / "checkpoints")  # not set aside


def test_a_checkpoint_from_just_before_the_rise_is_better_than_none(tmp_path):
    few = ["--checkpoint.every", 70, "--checkpoint.keep_last", 1, "--checkpoint.keep_best", False]
    with poisoned(range(70, 75)):
        assert train(tmp_path, *few) == 0
    assert "rolled back to" in events(tmp_path, "rollback")[0]["text"]
    assert events(tmp_path, "rollback")[0]["evidence"]["skipped"][0] == 70


def test_a_run_that_began_at_another_runs_checkpoint_goes_back_there(tmp_path):
    assert train(tmp_path / "a", "--batch.steps", 66, "--checkpoint.every", 0) == 0
    with poisoned(range(70, 75)):
        assert train(tmp_path / "b", "--resume", tmp_path / "a", "--checkpoint.every", 0) == 0
    (back,) = events(tmp_path / "b", "rollback")
    assert f"rolled back to {tmp_path / 'a'}" in back["text"]
    assert [line["step"] for line in read_metrics(tmp_path / "b")] == list(range(67, 91))


def with_other_metadata(path: Path) -> None:
    metadata = Checkpoint.read(path).metadata
    signed_again(path, (path / NAME).read_bytes(), metadata=metadata | dict(monitor={}))


def with_another_step(path: Path) -> None:
    metadata = Checkpoint.read(path).metadata
    progress = metadata["progress"] | dict(step=7)
    signed_again(path, (path / NAME).read_bytes(), metadata=metadata | dict(progress=progress))


def with_another_name(path: Path) -> None:
    metadata = read_metadata(path, Checkpoint.read(path).files)
    names = metadata.state_dict_metadata
    names["model.other.weight"] = names.pop("model.embedding.weight")
    signed_again(path, pickle.dumps(metadata))


def with_moments_of_nothing(path: Path) -> None:
    metadata = read_metadata(path, Checkpoint.read(path).files)
    names = metadata.state_dict_metadata
    names["optimizer.other.weight.exp_avg"] = names.pop("optimizer.embedding.weight.exp_avg")
    signed_again(path, pickle.dumps(metadata))


CHANGES = {
    with_other_metadata: "is not of a run of fasttrain: metadata.monitor",
    with_another_step: "is not of a run of fasttrain: metadata.progress.step is 7, and step 60",
    with_another_name: "embedding.weight is absent there and (4096, 32) in the model; use the model section",
    with_moments_of_nothing: "holds optimizer.other.weight.exp_avg, and the model has no other.weight",
}


def changing(change: Callable[[Path], None], path: Path, *, place: int):
    """Change a checkpoint while a run is at a place of the data."""
    at = Batches.at

    def noticed(batches: Batches, step: int) -> Batch:
        if batches._first_sample(step) // batches._sequences == place and path not in done:
            done.append(path)
            change(path)
        return at(batches, step)

    done: list[Path] = []
    return patch.object(Batches, "at", noticed)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_checkpoint_that_a_run_would_not_resume_from_is_passed_over(tmp_path, change):
    """Its checksums are right: somebody has changed it who can compute them."""
    with poisoned(range(70, 75)), changing(change, tmp_path / "checkpoints" / "step-00000060", place=72):
        assert train(tmp_path, "--checkpoint.background", False) == 0
    (corrupt,) = events(tmp_path, "corrupt checkpoint")
    assert CHANGES[change] in corrupt["text"]
    (back,) = events(tmp_path, "rollback")
    assert "step-00000040" in back["text"]
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 91))


def test_another_runs_checkpoint_is_verified_before_a_run_goes_back_there(tmp_path):
    assert train(tmp_path / "a", "--batch.steps", 66, "--checkpoint.every", 0) == 0
    (origin,) = list_checkpoints(tmp_path / "a" / "checkpoints")
    with poisoned(range(70, 75)), changing(with_other_metadata, origin.path, place=72):
        options = ["--resume", tmp_path / "a", "--checkpoint.every", 0]
        assert train(tmp_path / "b", *options) == ExitCode.STOPPED
    (corrupt,) = events(tmp_path / "b", "corrupt checkpoint")
    assert "is not of a run of fasttrain" in corrupt["text"]
    assert "no valid checkpoint is from before that" in events(tmp_path / "b", "stop")[0]["text"]
    assert not events(tmp_path / "b", "rollback")


def test_the_skip_begins_before_the_rise_and_not_before_the_checkpoint():
    anomaly = Anomaly(kind="spike", steps=5, step=101)
    assert anomaly.first == 96
    assert skipped_after(anomaly, restored=80, completed=102) == range(94, 102)
    assert skipped_after(anomaly, restored=95, completed=102) == range(95, 102)


def test_a_first_loss_that_cannot_be_is_an_event(tmp_path):
    options = ["--batch.steps", 2, "--optim.warmup", 1, "--checkpoint.every", 0]
    assert train(tmp_path / "ordinary", *options) == 0
    assert not events(tmp_path / "ordinary", "first loss")
    assert train(tmp_path / "large", *options, "--model.init_std", 1.0) == 0
    assert "initial weights are too large" in events(tmp_path / "large", "first loss")[0]["text"]


def test_a_loss_outside_of_the_envelope_is_an_event(tmp_path):
    assert train(tmp_path, "--batch.steps", 30, "--monitor.envelope", 1, 1.0, 2.0, "1e9", 1.0, 2.0) == 0
    (event,) = events(tmp_path, "envelope")
    assert event["step"] == 20
    assert "above what is expected" in event["text"]
