"""What an evaluation found, as lines of RUN/evaluations.jsonl.

{"step": 60, "time": ..., "set": "wiki", "loss": 4.1, "perplexity": ..., "bits_per_byte": ..., "accuracy": ...,
 "tokens": ..., "suspicion": ""}
{"step": 60, "time": ..., "task": "hellaswag", "metric": "acc", "filter": "none", "value": 0.3, "stderr": 0.01,
 "samples": 10042, "fewshot": 0}
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttrain.metrics.jsonl import LineFile
from fasttrain.rundir import RunDir
from fasttrain.tools.validation import Score


def set_line(step: int, name: str, score: Score, vocab: int) -> dict[str, Any]:
    """Of one set."""
    return dict(
        step=step,
        time=time.time(),
        set=name,
        loss=score.loss,
        perplexity=score.perplexity,
        bits_per_byte=score.bits_per_byte,
        accuracy=score.accuracy,
        tokens=score.tokens,
        suspicion=score.suspicion(vocab),
    )


def task_lines(step: int, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of every task and metric that lm-evaluation-harness reports."""
    lines = []
    for task, figures in results["results"].items():
        for key, value in figures.items():
            metric, _, filter = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float) or not filter:
                continue
            stderr = figures.get(f"{metric}_stderr,{filter}")
            lines.append(
                dict(
                    step=step,
                    time=time.time(),
                    task=task,
                    metric=metric,
                    filter=filter,
                    value=value,
                    stderr=stderr if isinstance(stderr, float) else None,  # "N/A"
                    samples=results["n-samples"].get(task, {}).get("effective"),
                    fewshot=results["n-shot"].get(task),
                )
            )
    return lines


def record(run: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Add them to the run."""
    with contextlib.closing(LineFile(RunDir(run).evaluations)) as file:
        for line in lines:
            file.append(line)
