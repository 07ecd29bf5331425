"""How good a run is, on any data and by benchmark tasks, as lines of RUN/evaluations.jsonl. docs/eval.md.

{"step": 60, "time": ..., "set": "wiki", "loss": 4.1, "perplexity": ..., "bits_per_byte": ..., "accuracy": ...,
 "tokens": ..., "suspicion": ""}
{"step": 60, "time": ..., "task": "hellaswag", "metric": "acc", "filter": "none", "value": 0.3, "stderr": 0.01,
 "samples": 10042, "fewshot": 0}

Sets are scored as a run validates itself, on as much of each as is asked for. Tasks are those of
lm-evaluation-harness (harness.py).
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fasttrain.distributed.runtime import Runtime
from fasttrain.metrics.jsonl import LineFile
from fasttrain.rundir import RunDir
from fasttrain.tools.trained_model import TrainedModel
from fasttrain.tools.validation import HELD_OUT, Score, mean_score, validation_sets

WHOLE = 10**9  # sequences; no set has more


def score_sets(
    loaded: TrainedModel,
    runtime: Runtime,
    *,
    more: Mapping[str, Path],  # sets by name, beside those of the run
    sequences: int = WHOLE,  # of each set, at most
    batch: int | None = None,  # sequences at a time; None: as in the run
) -> Iterator[tuple[str, Score]]:
    """Score the held-out documents of the run's data, its validation.sets, and more; of a mixture, the mean too."""
    settings = loaded.settings
    validation = replace(settings.validation, sequences=sequences, sets=settings.validation.sets | dict(more))
    sizes = settings.batch if batch is None else replace(settings.batch, micro=batch, sequences=batch)
    sets = validation_sets(loaded.data, replace(settings, validation=validation, batch=sizes), runtime)
    if not sets:
        raise ValueError(
            f"{loaded.data.first.path} holds no documents out, and the run has no validation.sets; name a set: "
            "--set NAME=PATH"
        )
    scores = {}
    for name, samples in sets.items():
        scores[name] = samples.score(loaded.model)
        yield name, scores[name]
    if mean := mean_score(scores, loaded.data.weights):
        yield HELD_OUT, mean


def set_line(step: int, name: str, score: Score, vocab: int) -> dict[str, Any]:
    """The line of one set."""
    figures = ("loss", "perplexity", "bits_per_byte", "accuracy", "tokens")
    line = dict(step=step, time=time.time(), set=name) | {figure: getattr(score, figure) for figure in figures}
    return line | dict(suspicion=score.suspicion(vocab))


def task_lines(step: int, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for every task and metric that lm-evaluation-harness reports."""
    lines = []
    for task, figures in results["results"].items():
        for key, value in figures.items():
            metric, _, filter = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float) or not filter:
                continue
            stderr = figures.get(f"{metric}_stderr,{filter}")
            stderr = stderr if isinstance(stderr, float) else None  # "N/A"
            asked = dict(step=step, time=time.time(), task=task, metric=metric, filter=filter)
            samples, fewshot = results["n-samples"].get(task, {}).get("effective"), results["n-shot"].get(task)
            lines.append(asked | dict(value=value, stderr=stderr, samples=samples, fewshot=fewshot))
    return lines


def record(run: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Add them to the run."""
    with contextlib.closing(LineFile(RunDir(run).evaluations)) as file:
        for line in lines:
            file.append(line)
