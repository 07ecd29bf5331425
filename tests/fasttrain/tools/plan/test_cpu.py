"""The plan of a run on this CPU against the run. bench/test_plan.py has more shapes, and the limit of the speed."""

import json
import os
import statistics
import subprocess
import sys

import pytest

from fasttrain.data.corpus import standard_library
from fasttrain.metrics.jsonl import read_metrics

RUN = [
    "--recipe", "tiny", "--model.layers", "3", "--model.hidden", "192", "--model.heads", "6", "--model.ffn", "512",
    "--batch.sequences", "8", "--batch.micro", "4", "--batch.steps", "5", "--optim.warmup", "2", "--parallel.compile",
    "off",
]  # fmt: skip
QUIET = ["--log.tensorboard", "False", "--validation.sequences", "8", "--validation.every", "0"]


@pytest.mark.slow
def test_memory_within_a_tenth_and_speed_of_that_order(tmp_path):
    standard_library()
    out, environment = ["--out", str(tmp_path / "run")], os.environ | {"OMP_NUM_THREADS": "1"}
    # Through a shell: Linux counts the memory of whoever starts a process as the new one's peak
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "fasttrain"]
    planned = subprocess.run(
        [*command, "plan", *RUN, *out, "--gpu", "cpu", "--json"], env=environment, capture_output=True
    )
    assert planned.returncode == 0, planned.stderr
    answer = json.loads(planned.stdout)
    done = subprocess.run([*command, "train", *RUN, *out, *QUIET], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    steps = read_metrics(tmp_path / "run")
    assert answer["memory_gib"]["value"] * 2**30 == pytest.approx(steps[-1]["memory"], rel=0.10)
    measured = statistics.median(step["tokens_per_second"] for step in steps[1:])
    assert 0.25 < answer["tokens_per_second_per_gpu"]["value"] / measured < 4  # others use the machine too
