"""fasttrain plan against runs: on this machine's CPU in memory and speed, and on GPUs against what others published.

The CPU is measured by CPU time, which a busy machine disturbs least; a plan is made before and after each run.
"""

import json
import os
import statistics
import subprocess
import sys

from bench.figures import memory, rate
from tests.fasttrain.tools.plan.published import points

MAX_MEMORY_ERROR, MAX_SPEED_ERROR = 0.10, 0.20
COMMON = (
    "--log.tensorboard False --validation.every 0 --checkpoint.every 0 --validation.sequences 8 --optim.warmup 2 "
    "--parallel.compile off"
)
RUNS = {
    "tiny, 2M": "--recipe tiny --batch.steps 10",
    "15M, large vocabulary": "--recipe tiny --model.layers 2 --model.hidden 512 --model.heads 8 --model.kv_heads 4 "
    "--model.head_dim 64 --model.ffn 1408 --model.vocab 16384 --batch.sequences 4 --batch.micro 4 --batch.steps 6",
    "9M, accumulated, recomputed": "--recipe tiny --model.layers 8 --model.hidden 256 --model.heads 4 "
    "--model.kv_heads 4 --model.head_dim 64 --model.ffn 704 --batch.sequences 8 --batch.micro 2 "
    "--parallel.recompute full --batch.steps 5",
    "5M, long sequences": "--recipe tiny --data.sequence 1024 --model.hidden 256 --model.heads 4 --model.kv_heads 2 "
    "--model.head_dim 64 --model.ffn 768 --batch.sequences 2 --batch.micro 2 --batch.steps 6",
}


def test_runs_on_this_cpu(report, tmp_path):
    rows = {}
    for number, (name, settings) in enumerate(RUNS.items()):
        arguments = [*f"{settings} {COMMON}".split(), "--out", str(tmp_path / str(number))]
        before, measured = (_ask(command, arguments, tmp_path) for command in ("plan", "run"))
        planned = statistics.mean((before["rate"], measured["planned"]))
        rows[name] = {
            "memory planned": memory(before["bytes"]),
            "memory measured": memory(measured["bytes"]),
            "memory": before["bytes"] / measured["bytes"] - 1,
            "planned": rate(planned, "tokens/s"),
            "measured": rate(measured["rate"], "tokens/s"),
            "speed": planned / measured["rate"] - 1,
        }
    report("plan_cpu: planned against measured, runs of the trainer on this CPU, float32, one thread", rows)
    assert all(abs(row["memory"]) <= MAX_MEMORY_ERROR for row in rows.values())
    assert all(abs(row["speed"]) <= MAX_SPEED_ERROR for row in rows.values())


def test_published_runs(report):
    """The figures that the documentation gives; tests/fasttrain/tools/plan/test_published.py sets the limits."""
    rows = {}
    for held_out, name in ((False, "fitted"), (True, "held out")):
        chosen = [point for point in points() if point.held_out == held_out]
        for source in [None, *dict.fromkeys(point.source for point in chosen)]:
            errors = [abs(point.error()) for point in chosen if source in (None, point.source)]
            rows[f"{name}: {source or 'all'}"] = {
                "runs": len(errors),
                "median": statistics.median(errors),
                "greatest": max(errors),
            }
    report("plan_published: relative error of tokens per second and GPU", rows)


def _ask(command, arguments, directory):
    result = directory / "result.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "bench.planned", command, str(result), *arguments], env=environment, check=True
    )
    return json.loads(result.read_text())
