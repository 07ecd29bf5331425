"""Loss on sets of documents: as a run validates itself, on as much of each set as is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fasttrain.distributed.runtime import Runtime
from fasttrain.tools.trained_model import TrainedModel
from fasttrain.tools.validation import HELD_OUT, Score, mean_score, validation_sets

WHOLE = sys.maxsize


def score_sets(
    loaded: TrainedModel,
    runtime: Runtime,
    *,
    more: Mapping[str, Path],  # sets by name, beside those of the run
    sequences: int = WHOLE,  # of each set, at most
    batch: int | None = None,  # sequences at a time; None: as in the run
) -> Iterator[tuple[str, Score]]:
    """Of the held-out documents of the run's data, its validation.sets, and more; of a mixture, the mean too."""
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
