"""The training command in a process of its own, as users start it, on one thread a rank."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasttrain.metrics.jsonl import read_metrics


def finished_run(program: Sequence[str], out: Path, *options: Any) -> list[dict[str, float]]:
    """Run the command to its end, and return its metrics."""
    command = [*program, "--out", str(out), "--log.tensorboard", "False", *map(str, options)]
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return read_metrics(out)
