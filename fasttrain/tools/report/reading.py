"""All that a run's directory says of it: figures, validations, incidents, checkpoints, settings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fasttrain import config
from fasttrain.checkpoint import Checkpoint, committed_paths
from fasttrain.data.manifest import NAME as DATASET
from fasttrain.events import STARTS, Event
from fasttrain.metrics import read_evaluations, read_events, read_validations
from fasttrain.model import num_parameters
from fasttrain.rundir import RunDir
from fasttrain.tools.report.clock import Clock
from fasttrain.tools.report.columns import Columns, columns_of


class CheckpointEntry(NamedTuple):
    """A checkpoint on the disk."""

    path: Path
    step: int
    time: float
    bytes: int | None  # None: it cannot be read
    loss: float | None
    state: str  # "published": compared with what was meant when it was written; "sound": now too; "aside"; "damaged"
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Of a run, as it stands."""

    path: Path
    name: str
    columns: Columns
    validations: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    incidents: list[Event]
    checkpoints: list[CheckpointEntry]
    settings: dict[str, Any]  # key with dots and value, as in config.toml; empty: there is none
    clock: Clock
    facts: dict[str, Any]  # parameters, hardware, ranks: as far as they are known

    @property
    def last_written(self) -> float:
        """When it wrote its last line."""
        return max([float(self.columns["time"][-1]), *(incident.time for incident in self.incidents)])


def read_records(runs: Sequence[Path], *, verify: bool = False) -> list[Record]:
    """verify: read every file of every checkpoint."""
    runs = list(dict.fromkeys(Path(run) for run in runs))
    return [_read(run, name, verify=verify) for run, name in zip(runs, _names(runs), strict=True)]


def catch_up(runs: Sequence[Path], *, patience: float) -> bool:
    """Read of each run what is new, for about so many seconds; whether that was all."""
    done = [columns_of(_metrics(Path(run))).refresh(patience=patience) for run in runs]
    return all(done)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with dots."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _read(run: Path, name: str, *, verify: bool) -> Record:
    columns = columns_of(_metrics(run))
    columns.refresh()
    if not len(columns):
        raise ValueError(f"{RunDir(run).metrics} has no step yet; wait for the first one")
    incidents = [Event.of(line) for line in read_events(run)]
    settings = _settings(run)
    written = [columns["time"], *(gone["time"] for gone in columns.taken_back), [i.time for i in incidents]]
    moments = np.concatenate([np.asarray(times, dtype=np.float64) for times in written])
    starts = np.array(sorted(incident.time for incident in incidents if incident.kind in STARTS))
    return Record(
        path=run, name=name, columns=columns, incidents=incidents, settings=flat(settings),
        validations=read_validations(run),
        evaluations=read_evaluations(run),
        checkpoints=_checkpoints(RunDir(run).checkpoints, verify=verify),
        clock=Clock(starts, np.sort(moments[np.isfinite(moments)])),
        facts=_facts(run, settings, incidents),
    )  # fmt: skip


def _metrics(run: Path) -> Path:
    path = RunDir(run).metrics
    if not run.is_dir():
        raise FileNotFoundError(f"{run} {'is not a directory' if run.exists() else 'does not exist'}; name a run")
    if not path.exists():
        traces = (RunDir(run).config, RunDir(run).segments)
        if any(trace.exists() for trace in traces):
            raise ValueError(f"{run} has no {path.name} yet; wait for the first step")
        raise ValueError(f"{run} is not the directory of a run: it has no {path.name}")
    return path


def _names(runs: list[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell the runs apart."""
    paths = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def _settings(run: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((run / "config.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _checkpoints(directory: Path, *, verify: bool) -> list[CheckpointEntry]:
    aside = sorted(directory.glob("aside-step-*")) if directory.is_dir() else []
    found = [_saved(path, verify=verify) for path in (*committed_paths(directory), *aside)]
    return sorted(found, key=lambda saved: saved.step)


def _saved(path: Path, *, verify: bool) -> CheckpointEntry:
    is_aside = path.name.startswith("aside-")
    step, time = int(path.name.removeprefix("aside-").split("-")[1]), 0.0
    try:
        time = os.stat(path).st_mtime
        checkpoint = Checkpoint.read(path)
        if verify:
            checkpoint.verify()
    except Exception as error:  # whatever the disk does, it is this checkpoint that has it
        trouble = str(error).removeprefix("checkpoint: ").removesuffix("; resume from an earlier one")
        return CheckpointEntry(path, step, time, None, None, "damaged", trouble)
    state = "aside" if is_aside else "sound" if verify else "published"
    return CheckpointEntry(path, checkpoint.step, time, checkpoint.bytes, checkpoint.loss, state)


def _facts(run: Path, settings: dict[str, Any], incidents: list[Event]) -> dict[str, Any]:
    """What its last beginning says; what it leaves out, as far as files tell."""
    facts: dict[str, Any] = {}
    for incident in incidents:
        if incident.kind in STARTS:
            facts |= incident.evidence
    try:
        segment = json.loads(RunDir(run).segments.read_text().splitlines()[-1])
        facts.setdefault("world_size", segment["dp_size"])
    except (OSError, ValueError, LookupError):
        segment = {}
    if "parameters" not in facts:
        # Settings of another version, or data that is gone: then they are not known.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            facts["parameters"] = _parameters(settings["model"], segment)
    return facts


def _parameters(model: dict[str, Any], segment: dict[str, Any]) -> int:
    known = {field.name for field in dataclasses.fields(config.ModelConfig)}
    vocab = model["vocab"]
    if vocab == "None":  # of the data, as train.py rounds it up
        data = segment["data"]
        path = data["path"] or next(iter(data["mixture"].values()))["path"]
        vocab = -(-json.loads((Path(path) / DATASET).read_text())["vocab"] // 64) * 64
    settings = config.ModelConfig(**{key: value for key, value in model.items() if key in known} | dict(vocab=vocab))
    return num_parameters(settings, vocab).total
