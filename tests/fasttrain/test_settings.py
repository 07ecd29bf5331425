"""Every setting acts: with another value, something that can be observed is different.

Most settings show in what a run leaves behind. What does not change a result, as where weights are gathered, is seen
at the place where it takes effect.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import fasttrain.checkpoint.saver
import fasttrain.data.lint.checks
import fasttrain.distributed.parallelize
import fasttrain.model
import fasttrain.train.loop
import fasttrain_kernels
from fasttrain.checkpoint.committed import find, list_checkpoints
from fasttrain.config import Config
from fasttrain.data.datasets import open_dataset
from fasttrain.hf.export import describe, export
from fasttrain.metrics.jsonl import read_events, read_metrics, read_validations
from fasttrain.train import main
from fasttrain.train.state import TrainState
from tests.datasets import DatasetWriter

BASE: dict[str, Any] = {
    "model.layers": 2, "model.hidden": 16, "model.heads": 2, "model.kv_heads": 2, "model.head_dim": 8, "model.ffn": 16,
    "data.sequence": 16, "batch.sequences": 4, "batch.micro": 4, "batch.steps": 6, "optim.warmup": 1,
    "validation.every": 2, "validation.sequences": 3, "validation.sample_tokens": 2, "checkpoint.every": 2,
    "log.tensorboard": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Other:
    """Another value of a setting, beside `others` that it needs to act."""

    value: Any
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


MUON = {"optim.kind": "muon"}
SHARDED = {"parallel.precision": "bf16"}  # one rank is sharded for its casts
DIVERGING = {"optim.lr": 1.0, "optim.clip": 0.0, "optim.schedule": "constant"}  # the best checkpoint is an early one
LOSING = {"optim.lr": 1e-30, "batch.steps": 8, "validation.every": 1}

VALUES: dict[str, Any] = {
    "seed": 1,
    "model.layers": 1,
    "model.hidden": 32,
    "model.heads": 4,
    "model.kv_heads": 1,
    "model.head_dim": 4,
    "model.ffn": 32,
    "model.vocab": 5000,
    "model.qk_norm": False,
    "model.rope_theta": 100.0,
    "model.norm_eps": 0.1,
    "model.tied_head": False,
    "model.dropout": 0.3,
    "model.attention_dropout": Other(0.3, {"data.document_mask": False}),
    "model.attention_backend": "blocked",
    "model.deterministic": False,
    "model.init_std": 0.05,
    "data.sequence": 8,
    "data.document_mask": False,
    "data.seed": 1,
    "data.prefetch": 1,
    "batch.steps": 4,
    "batch.sequences": 8,
    "batch.micro": 2,
    "optim.kind": "muon",
    "optim.lr": 1e-2,
    "optim.betas": (0.5, 0.6),
    "optim.eps": 1e-2,
    "optim.weight_decay": 0.9,
    "optim.clip": 0.01,
    "optim.muon_lr": Other(0.1, MUON),
    "optim.muon_momentum": Other(0.5, MUON),
    "optim.muon_adjust": Other("match_rms_adamw", MUON),
    "optim.z_loss": 0.1,
    "optim.schedule": "constant",
    "optim.warmup": 3,
    "optim.final": 0.9,
    "optim.decay_fraction": Other(0.5, {"optim.schedule": "wsd"}),
    "parallel.device": "cuda",
    "parallel.precision": "bf16",
    "parallel.dp_replicate": 2,
    "parallel.reshard_after_forward": Other(False, SHARDED),
    "parallel.grad_reduce": Other("every", SHARDED | {"batch.micro": 2}),
    "parallel.compile": "on",
    "parallel.recompute": "full",
    "parallel.cuda_graph": True,  # an error without a GPU; what it does with one: test_cuda_graph.py
    "parallel.timeout": 77,
    "checkpoint.every": 3,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": Other(False, {"checkpoint.keep_last": 1} | DIVERGING),
    "checkpoint.keep_every": Other(2, {"checkpoint.keep_last": 1, "checkpoint.keep_best": False}),
    "checkpoint.background": False,
    "validation.every": 3,
    "validation.sequences": 2,
    "validation.patience": Other(2, LOSING),
    "validation.sample": "class ",
    "validation.sample_tokens": 5,
    "log.every": 2,
    "log.tensorboard": True,
    "log.report": False,
    "log.wandb": "a-project",
    "log.profile": 1,
}
ELSEWHERE = {  # tests of their own below, and in test_recovery.py, test_saving.py and test_slowdowns.py
    "out", "resume", "from_hf", "data.path", "data.mixture", "data.tokenizer", "data.vocab", "data.separator",
    "data.lint", "validation.sets",
    "checkpoint.retries", "checkpoint.on_save_failure",
    "monitor.spike", "monitor.rollbacks", "monitor.first", "monitor.envelope", "monitor.slowdown",
}  # fmt: skip


def arguments(settings: dict[str, Any]) -> list[str]:
    return [
        text
        for key, value in settings.items()
        for text in (f"--{key}", *map(str, value if isinstance(value, tuple | list) else [value]))
    ]


def observed(out: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """All that is observable of a run."""
    seen = _Spies()
    with seen:
        try:
            ended: Any = main(arguments(settings | {"out": out}))
        except SystemExit as exit:
            ended = exit.code
    printed = capsys.readouterr()
    figures = ("loss", "grad_norm", "lr", "tokens", "valid_tokens")
    validations = [{key: v for key, v in line.items() if key != "time"} for line in read_validations(out)]
    return {
        "ended": ended,
        "error": printed.err.replace(str(out), "OUT"),
        "lines": [line.split("  lr")[0] for line in printed.out.splitlines() if re.match(r"step +\d+/", line)],
        "samples": [line["text"] for line in read_events(out) if line["kind"] == "sample"],
        "metrics": [[line[key] for key in figures] for line in read_metrics(out)],
        "validations": validations,
        "checkpoints": [(c.step, c.bytes, len(c.metadata)) for c in list_checkpoints(out / "checkpoints")],
        "files": sorted(path.name for path in out.iterdir()) if out.exists() else [],
        "seen": seen.facts,
    }


class _Spies(ExitStack):
    """Where settings act that leave no trace in a run's results."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[str, Any] = {"read": set(), "norms": 0, "compiled": 0}

    def __enter__(self) -> _Spies:
        read, first_step = TrainState.micro_batches, fasttrain.train.loop.train_step  # type: ignore[attr-defined]
        norm = fasttrain_kernels.add_rms_norm
        write, shard = fasttrain.checkpoint.saver.write, fasttrain.distributed.parallelize.fully_shard  # type: ignore[attr-defined, attr-defined]
        start = torch.distributed.init_process_group
        facts = self.facts

        def noted_read(run: TrainState, step: int) -> Any:
            facts["read"].add(step)
            return read(run, step)

        def noted_step(*args: Any, **options: Any) -> Any:
            if "ahead" not in facts:
                time.sleep(0.2)  # reading ahead comes to rest
                facts["ahead"] = len(facts["read"])
            return first_step(*args, **options)

        def noted_norm(*args: Any, **options: Any) -> Any:
            facts["norms"] += 1
            return norm(*args, **options)

        def noted_write(*args: Any) -> Any:
            facts["written in"] = threading.current_thread() is threading.main_thread()
            return write(*args)

        def noted_compile(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
            facts["compiled"] += 1  # that it works is another test's subject
            return function

        def noted_shard(module: Any, **options: Any) -> Any:
            facts.setdefault("reshard", set()).add(options["reshard_after_forward"])
            sharded = shard(module, **options)
            for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
                self._note_calls(sharded, name)
            return sharded

        def noted_start(*args: Any, **options: Any) -> Any:
            facts["timeout"] = options["timeout"]
            return start(*args, **options)

        for target, name, noted in (
            (TrainState, "micro_batches", noted_read),
            (fasttrain.train.loop, "train_step", noted_step),
            (fasttrain_kernels, "add_rms_norm", noted_norm),
            (fasttrain.checkpoint.saver, "write", noted_write),
            (torch, "compile", noted_compile),
            (fasttrain.distributed.parallelize, "fully_shard", noted_shard),
            (torch.distributed, "init_process_group", noted_start),
        ):
            self.enter_context(patch.object(target, name, noted))
        return self

    def _note_calls(self, module: Any, name: str) -> None:
        method = getattr(module, name)

        def noted(value: bool) -> None:
            self.facts.setdefault(name, []).append(value)
            method(value)

        setattr(module, name, noted)


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    """Observations of runs that several settings are compared with."""
    return {}


def settings_of(section: Any = Config, prefix: str = "") -> list[str]:
    names = []
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.default_factory):
            names += settings_of(field.default_factory, f"{prefix}{field.name}.")
        else:
            names.append(f"{prefix}{field.name}")
    return names


def test_every_setting_is_tried():
    assert set(VALUES) | ELSEWHERE == set(settings_of())


@pytest.mark.parametrize("key", VALUES)
def test_a_setting_acts(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], known: dict[str, Any]) -> None:
    other = VALUES[key] if isinstance(VALUES[key], Other) else Other(VALUES[key])
    before = BASE | other.others
    if str(other.others) not in known:
        known[str(other.others)] = observed(tmp_path / "before", before, capsys)
    assert observed(tmp_path / "after", before | {key: other.value}, capsys) != known[str(other.others)]


def test_the_same_settings_give_the_same_observation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the test above would prove nothing."""
    first, second = (observed(tmp_path / name, BASE, capsys) for name in "ab")
    assert first == second
    assert first["ended"] == 0


def test_data_and_validation_sets_are_those_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    default = open_dataset()
    with DatasetWriter(
        tmp_path / "other",
        tokenizer=(default.path / "tokenizer.json").read_text(),
        vocab=default.vocab,
        separator=default.separator,
        source="a test",
    ) as writer:
        for split in ("train", "validation"):
            writer.add(split, torch.arange(1, 1000).numpy(), num_bytes=3000)
    plain = observed(tmp_path / "plain", BASE, capsys)
    other = observed(tmp_path / "data", BASE | {"data.path": tmp_path / "other"}, capsys)
    assert other["metrics"] != plain["metrics"]
    named = observed(tmp_path / "sets", BASE | {"validation.sets": ("counting", tmp_path / "other")}, capsys)
    assert named["metrics"] == plain["metrics"]
    assert [line["set"] for line in named["validations"]] == ["held-out", "counting"] * 3
    assert named["validations"][1]["loss"] == pytest.approx(8.3, abs=0.3)
    assert named["validations"][1]["loss"] != named["validations"][0]["loss"]


def test_a_run_starts_with_the_weights_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What they are, and that the model comes with them, is tested in test_pretrained.py."""
    plain = observed(tmp_path / "plain", BASE, capsys)
    export(describe(find(tmp_path / "plain")), tmp_path / "exported")
    started = observed(tmp_path / "started", BASE | {"from_hf": tmp_path / "exported"}, capsys)
    assert started["ended"] == 0
    assert started["metrics"][0][0] < plain["metrics"][0][0] - 0.1  # the same batch, after six steps


def test_files_of_another_program_train_as_the_same_tokens_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is said of them acts: another separator makes other documents; without tokenizer there is no text."""
    default = open_dataset()
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        stream = default.split(split)
        (tmp_path / name).write_bytes(stream.windows(np.array([0]), len(stream)).tobytes())
    prepared = observed(tmp_path / "prepared", BASE, capsys)
    bare = BASE | {"data.path": tmp_path}
    said = bare | {"data.separator": default.separator, "data.tokenizer": default.path / "tokenizer.json"}
    foreign = observed(tmp_path / "foreign", said, capsys)
    assert foreign["metrics"] == prepared["metrics"]
    assert foreign["samples"] == prepared["samples"]
    for line, other in zip(foreign["validations"], prepared["validations"], strict=True):
        assert line["loss"] == other["loss"]
        assert line["bits_per_byte"] == pytest.approx(other["bits_per_byte"], rel=0.01)  # by a sample
    commonest = int(np.bincount(np.fromfile(tmp_path / "train.bin", "<u2")).argmax())
    cut = bare | {"data.separator": commonest, "data.lint": "off"}
    assert observed(tmp_path / "cut", cut, capsys)["metrics"] != prepared["metrics"]
    unsaid = observed(tmp_path / "unsaid", bare, capsys)
    assert not unsaid["samples"]
    assert "bits_per_byte" not in unsaid["validations"][0]
    larger = observed(tmp_path / "larger", bare | {"data.vocab": 5000}, capsys)
    assert larger["checkpoints"] != unsaid["checkpoints"]


@pytest.mark.parametrize(("key", "value"), [("data.vocab", 5000), ("data.separator", 3), ("data.tokenizer", "x.json")])
def test_a_prepared_dataset_needs_no_description(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = observed(tmp_path / "run", BASE | {key: value}, capsys)
    assert seen["ended"] == 2
    assert "is a prepared dataset and does; remove them" in seen["error"]


def test_a_mixture_has_the_datasets_the_weights_and_the_limits_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = open_dataset()
    for name, ids in (("low", np.arange(1, 2000)), ("high", np.arange(2000, 4000))):
        with DatasetWriter(
            tmp_path / name, tokenizer=(default.path / "tokenizer.json").read_text(), vocab=default.vocab,
            separator=default.separator, source="a test",
        ) as writer:  # fmt: skip
            for split in ("train", "validation"):
                writer.add(split, ids, num_bytes=3 * len(ids))
    mixed = BASE | {"data.mixture.low.path": tmp_path / "low", "data.mixture.high.path": tmp_path / "high"}
    runs = {
        "mixed": {},
        "weight": {"data.mixture.low.weight": 3},
        "epochs": {"data.mixture.low.epochs": 0.05},
        "path": {"data.mixture.high.path": tmp_path / "low"},
    }
    seen = {name: observed(tmp_path / f"run {name}", mixed | changed, capsys) for name, changed in runs.items()}  # type: ignore[operator]
    assert all(run["ended"] == 0 for run in seen.values())
    assert len({str(run["metrics"]) for run in seen.values()}) == len(runs)
    lines = seen["weight"]["validations"][:3]
    assert [line["set"] for line in lines] == ["low", "high", "held-out"]
    low, high, mean = (line["loss"] for line in lines)
    assert mean == pytest.approx(0.75 * low + 0.25 * high)
    short = {"data.mixture.low.epochs": 0.05, "data.mixture.high.epochs": 0.05}
    assert (
        "every component has reached its epochs at step 3 of 6; raise the epochs of one, or lower batch.steps"
        in (observed(tmp_path / "short", mixed | short, capsys)["error"])
    )


def test_lint_looks_at_the_data_unless_it_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it finds, and what stop does then, is tested in data/lint/test_checks.py."""
    for how, times in (("stop", 1), ("warn", 1), ("off", 0)):
        with patch("fasttrain.data.lint.checks.lint", wraps=fasttrain.data.lint.checks.lint) as looked:
            assert observed(tmp_path / how, BASE | {"data.lint": how}, capsys)["ended"] == 0
        assert looked.call_count == times
