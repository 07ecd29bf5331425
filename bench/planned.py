"""A plan of a run on this CPU, or the run itself, each in a process of its own: python -m bench.planned plan|run ARGS.

Prints peak bytes of the process and tokens per second of CPU time, as JSON; after a run, also what a plan says now.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import fasttrain.train
from fasttrain.cli.parse import load
from fasttrain.metrics.hardware import used_memory
from fasttrain.recipes import RECIPES
from fasttrain.tools.plan.cpu import estimate_on_cpu, resident_memory
from fasttrain.tools.plan.sizes import vocab_of
from fasttrain.train import loop
from fasttrain.train.step import train_step

CPU = torch.device("cpu")
WARM_UP = 2  # steps


def plan(arguments: list[str]) -> dict[str, float]:
    process = resident_memory()
    settings = load(arguments, RECIPES)
    found = estimate_on_cpu(settings, vocab=vocab_of(settings), process=process, clock=time.process_time)
    parts = {f"time/{part}": seconds for part, seconds in found.speed.parts.items()}
    return {"bytes": found.memory.bytes, "rate": found.rate.value} | parts


def run(arguments: list[str]) -> dict[str, float]:
    settings = load(arguments, RECIPES)
    seconds, peak = list[float](), [0]

    def timed(*args: Any, **options: Any) -> Any:
        begin = time.process_time()
        result = train_step(*args, **options)
        seconds.append(time.process_time() - begin)
        peak[0] = used_memory(CPU)
        return result

    with patch.object(loop, "train_step", timed), contextlib.redirect_stdout(sys.stderr):
        assert fasttrain.train.main(arguments) == 0
    tokens = settings.batch.sequences * settings.data.sequence
    return {
        "bytes": peak[0],
        "rate": tokens / statistics.median(seconds[WARM_UP:]),
        "planned": plan(arguments)["rate"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, result, *rest = sys.argv[1:]
    Path(result).write_text(json.dumps({"plan": plan, "run": run}[command](rest)))
