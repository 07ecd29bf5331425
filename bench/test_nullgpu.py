"""What the host spends on a GPU's behalf, on the null GPU (make nullgpu): calls of ops, and a whole step.

CPU time of one process, as ratios within one run; launches and copies are exact. Nothing is computed, so no time of a
GPU is measured.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.figures import exact, memory, ratio, seconds
from bench.nullgpu.__main__ import ENVIRONMENT

pytestmark = pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="there is no null GPU (make nullgpu)")

HERE = Path(__file__).parent / "nullgpu"
MOST = {"torch": 2.0, "Liger": 0.55}  # of their host time, forward and backward; the aim of 0.5 is missed by swiglu
STEPS = 24
TRAIN = f"""-m fasttrain.train --recipe 124m --batch.sequences 32 --batch.steps {STEPS} --optim.warmup 2 --data.lint off
    --validation.every 0 --validation.sequences 1 --validation.sample= --checkpoint.every 0""".split()
RUNS = {
    "plain GPT-2, compiled": [str(HERE / "gpt2.py"), "--steps", str(STEPS)],
    "plain GPT-2, eager": [str(HERE / "gpt2.py"), "--steps", str(STEPS), "--eager"],
    "fasttrain, compiled": [*TRAIN, "--parallel.compile", "on"],
    "fasttrain, eager": [*TRAIN, "--parallel.compile", "off"],
    "fasttrain, captured": [*TRAIN, "--parallel.compile", "on", "--parallel.cuda_graph", "True"],
}


def on_null_gpu(*arguments, **options):
    done = subprocess.run(
        [sys.executable, "-m", "bench.nullgpu", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        **options,
    )
    return done


def test_calls_of_ops(report):
    done = on_null_gpu(str(HERE / "calls.py"))
    assert done.returncode == 0, done.stderr
    table = {}
    for op, found in json.loads(done.stdout).items():
        ours = found["fasttrain"]
        row = {name: seconds(spent / 1e6) for name, spent in ours.items()}
        for name in found.keys() - {"fasttrain"}:
            both = ours["forward and backward"] / found[name]["forward and backward"]
            row[f"of {name}'s"] = ratio(both, at_most=MOST[name])
        table[op] = row
    report("host_calls: CPU time of a call of an op, bf16, on the null GPU", table)


def test_a_step_of_124m(report, tmp_path):
    figures: dict[str, Any] = {}
    for name, program in RUNS.items():
        path = tmp_path / f"{len(figures)}.json"
        out = ["--out", str(tmp_path / f"run-{len(figures)}")] if "fasttrain" in name else []
        done = on_null_gpu("--json", str(path), *program, *out)
        assert path.exists(), done.stderr
        figures[name] = json.loads(path.read_text())
    plain = {form: _host(figures[f"plain GPT-2, {form}"]) for form in ("compiled", "eager")}
    limits = {"fasttrain, captured": 0.6, "fasttrain, eager": 2.2, "fasttrain, compiled": 3.2}
    table = {}
    for name, found in figures.items():
        last = found["counts"][-1]
        against = plain["eager" if name.endswith("eager") else "compiled"]
        table[name] = {
            "host": seconds(_host(found)),
            "of plain's": ratio(_host(found) / against, at_most=limits.get(name), margin=0.3),
            "launches": exact(last.get("launches", 0), ""),
            "in graphs": exact(last.get("launches in graphs", 0), ""),
            "copies on the device": exact(
                last.get("copies d2d", 0) + last.get("copies d2d in graphs", 0), "", at_most=2
            ),
            "allocated": memory(found["allocated"]),
            "reserved of allocated": ratio(found["reserved"] / found["allocated"], margin=None),
        }
        if "fasttrain" in name:
            assert last.get("copies h2d pageable", 0) == 0
            waits = {key for key, count in last.items() if key.startswith("sync:") and count}
            assert waits <= {"sync:cudaEventSynchronize"}  # for the step before
    report("host_step_124m: a step of 32 x 1,024 tokens, bf16, one GPU, on the null GPU", table)


def _host(found):
    """The median of the later steps."""
    taken = sorted(found["seconds"][STEPS // 2 :])
    return taken[len(taken) // 2]
