"""The data of the page about each run: plain, decimated, in the units that the page shows."""

import math
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fasttrain.config import Config
from fasttrain.config_toml import flat, to_toml
from fasttrain.events import Event, EventKind, Severity
from fasttrain.tools.report.columns import bucket_starts, bucketed
from fasttrain.tools.report.record import CheckpointEntry, RunRecord, RunState

NUMBERS = 220_000  # in all curves of a page: about 1.5 MB
MOST, LEAST = 1500, 150  # points of a curve
HIDDEN = ("step", "time", "tokens", "valid_tokens", "data_wait", "nonfinite")  # no curves of their own
# A mean with its lowest and highest value
RANGED = ("loss", "grad_norm", "tokens_per_second", "mfu", "step_seconds", "unsaved_steps", "checkpoint_age")
PEAK = 3.0  # in any other curve, a highest value of so many means stands for its bucket
EVENTS, SAMPLES, GHOSTS, EVALUATIONS = 1000, 100, 40, 1000  # that a page has of a run, at most
TEXT, DOCUMENTS = 2000, 50  # characters of a text, and documents of an event
BESIDE = ("out", "resume")  # settings that say where a run is, not what


def page_content(records: Sequence[RunRecord], states: Sequence[RunState]) -> dict[str, Any]:
    """All runs, and the settings in which they differ."""
    curves = sum(len(_curves(record)) + 2 * len(set(_curves(record)) & set(RANGED)) + 3 for record in records)
    points = min(max(NUMBERS // max(curves, 1), LEAST), MOST)
    return dict(
        runs=[_run(record, state, points) for record, state in zip(records, states, strict=True)],
        differences=differences(records) if len(records) > 1 else [],
    )


def differences(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Settings that are not the same in all runs."""
    keys = dict.fromkeys(key for record in records for key in record.settings if key not in BESIDE)
    rows = [dict(key=key, values=[_shown(record.settings.get(key)) for record in records]) for key in keys]
    return [row for row in rows if len(set(row["values"])) > 1]


def figures(record: RunRecord) -> dict[str, Any]:
    """The run in a few numbers; None: not known."""
    columns = record.columns
    sets = record.validations  # the held-out documents, or the first set
    lines = sets.get("held-out") or next(iter(sets.values()), [])
    scored = [line for line in lines if line.get("loss") is not None and math.isfinite(line["loss"])]
    best = min(scored, key=lambda line: line["loss"], default=None)
    return dict(
        loss=_finite(columns["loss"], lambda values: values[-1]),
        validation=best and best["loss"],
        validation_step=best and best["step"],
        tokens=_finite(columns["tokens"], lambda values: values[-1]),
        seconds=float(record.clock.hours(np.array([record.last_written]))[0]) * 3600,
        tokens_per_second=_finite(columns["tokens_per_second"], np.median),
        mfu=_finite(columns["mfu"], np.median),
        memory=_finite(columns["memory"], np.max),
        events=sum(event.severity in (Severity.ERROR, Severity.WARNING) for event in record.events),
        rollbacks=sum(event.kind == EventKind.ROLLBACK for event in record.events),
    )


def _run(record: RunRecord, state: RunState, points: int) -> dict[str, Any]:
    columns, steps, known = record.columns, record.columns["step"], record.metadata
    planned = record.settings.get("batch.steps")
    weights = (Severity.ERROR, Severity.ACTION, Severity.WARNING)  # what deserves a close look, the gravest first
    notable = sorted((e for e in record.events if e.severity in weights), key=lambda e: weights.index(e.severity))
    places = [int(np.searchsorted(steps, event.step)) for event in notable]
    starts = bucket_starts(len(columns), points, [place for place in places if place < len(steps)])
    ends = np.append(starts[1:], len(columns)) - 1
    samples = [event for event in record.events if event.kind == EventKind.SAMPLE]
    others = [event for event in record.events if event.kind != EventKind.SAMPLE]
    return dict(
        name=record.name,
        path=str(record.path),
        state=state.name,
        reason=state.reason,
        step=int(steps[-1]),
        planned=planned,
        left=_seconds_left(record, planned) if state.name == "running" else None,
        began=float(columns["time"][0]),
        written=record.last_written,
        **{name: known.get(name) for name in ("parameters", "hardware", "world_size")},
        versions={name: str(known[name]) for name in ("fasttrain", "torch", "python") if name in known},
        figures=figures(record),
        x=_places(record, steps[ends], columns["time"][ends]),
        first=steps[starts].astype(np.int64) if len(starts) < len(columns) else None,
        series={name: _curve(columns[name], name, starts) for name in _curves(record)},
        taken_back=[_ghost(record, gone) for gone in columns.taken_back[-GHOSTS:] if len(gone["step"]) > 1],
        validations=_validations(record),
        events=[_event(record, event) for event in others[-EVENTS:]],
        older_events=max(len(others) - EVENTS, 0),
        samples=[_event(record, event) for event in samples[-SAMPLES:]],
        evaluations=_latest(record.evaluations)[-EVALUATIONS:],
        checkpoints=_checkpoints(record.checkpoints),
        settings=_sections(record.settings),
    )


def _curves(record: RunRecord) -> list[str]:
    return [name for name in record.columns.names if name not in HIDDEN]


def _places(record: RunRecord, steps: np.ndarray, times: np.ndarray) -> dict[str, np.ndarray]:
    """Where on each of the three axes."""
    known, tokens = record.columns["step"], record.columns["tokens"]
    return dict(
        step=steps.astype(np.int64),
        tokens=np.round(np.interp(steps, known, tokens, left=0)).astype(np.int64),
        hours=np.round(record.clock.hours(times), 6).tolist(),  # a list: with all of its digits
    )


def _curve(values: np.ndarray, name: str, starts: np.ndarray) -> dict[str, np.ndarray]:
    mean, low, high = bucketed(values, starts)
    if len(starts) == len(values):
        return dict(mean=mean)
    if name in RANGED:
        return dict(mean=mean, low=low, high=high)
    return dict(mean=np.where(high > PEAK * np.abs(mean), high, mean))


def _ghost(record: RunRecord, gone: dict[str, np.ndarray]) -> dict[str, Any]:
    """Steps that the run took back."""
    starts = bucket_starts(len(gone["step"]), 200)
    ends = np.append(starts[1:], len(gone["step"])) - 1
    x = _places(record, gone["step"][ends], gone["time"][ends]) | dict(tokens=gone["tokens"][ends])
    return dict(x=x, loss=bucketed(gone["loss"], starts).high)


def _validations(record: RunRecord) -> dict[str, Any]:
    return {
        name: dict(
            x=_places(record, _figure(lines, "step"), _figure(lines, "time")),
            **{key: _figure(lines, key) for key in ("loss", "perplexity", "bits_per_byte", "accuracy")},
        )
        for name, lines in record.validations.items()
    }


def _figure(lines: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([line.get(key) for line in lines], dtype=np.float64)  # None becomes nan


def _event(record: RunRecord, event: Event) -> dict[str, Any]:
    places = _places(record, np.array([event.step]), np.array([event.time]))
    x = {axis: float(value[0]) for axis, value in places.items()}
    if event.tokens is not None:
        x["tokens"] = float(event.tokens)
    content = event.line() | dict(
        severity=event.severity,
        x=x,
        text=_cut(event.text),
        evidence={str(key): _cut(_shown(value)) for key, value in event.evidence.items()},
        documents=[_cut(document, 300) for document in event.documents[:DOCUMENTS]],
        more_documents=max(len(event.documents) - DOCUMENTS, 0),
    )
    del content["tokens"]
    return content


def _latest(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last of those that ask the same of the same step."""
    asked = ("step", "set", "task", "metric", "filter", "fewshot", "samples", "tokens")
    found = {tuple(str(line.get(key)) for key in asked): line for line in evaluations}
    return sorted(found.values(), key=lambda line: line["step"])


def _checkpoints(checkpoints: list[CheckpointEntry]) -> list[dict[str, Any]]:
    standing = [saved for saved in checkpoints if saved.state == "committed"]
    scored = [saved for saved in standing if saved.loss is not None and math.isfinite(saved.loss)]
    marked = {"newest": standing[-1:], "best": sorted(scored, key=lambda saved: (saved.loss, -saved.step))[:1]}
    return [
        saved._asdict() | dict(path=str(saved.path), marks=[name for name, one in marked.items() if saved in one])
        for saved in checkpoints
    ]


def _sections(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings as config.toml has them, and which of them are not the defaults."""
    defaults = dict(flat(tomllib.loads(to_toml(Config()))))
    sections: dict[str, list[dict[str, Any]]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".") if "." not in key else key.partition(".")
        changed = key not in BESIDE and value != defaults.get(key)
        sections.setdefault(section or "run", []).append(dict(key=name, value=_shown(value), changed=changed))
    return [dict(name=name, settings=rows) for name, rows in sections.items()]


def _seconds_left(record: RunRecord, planned: int | None) -> float | None:
    times, steps = record.columns["time"][-200:], record.columns["step"][-200:]
    if planned is None or len(times) < 2:
        return None
    return float((planned - steps[-1]) * np.median(np.diff(times)))


def _shown(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return "" if value is None else str(value)


def _cut(text: str, length: int = TEXT) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _finite(values: np.ndarray, reduce: Callable[[np.ndarray], Any]) -> float | None:
    found = values[np.isfinite(values)]
    return float(reduce(found)) if len(found) else None
