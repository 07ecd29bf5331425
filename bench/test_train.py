"""The default run: how soon it starts, and what everything around the model's own step costs."""

import os
import subprocess
import sys
import time
from unittest.mock import patch

import fasttrain.train
from bench.figures import ratio, seconds
from fasttrain.data.corpus import standard_library
from fasttrain.data.datasets import open_dataset
from fasttrain.metrics.jsonl import read_metrics
from fasttrain.train import loop
from fasttrain.train.step import train_step
from fasttrain.train.validate import validate

START, DATASET, AROUND = 20.0, 15.0, 0.02  # the limits: seconds, seconds, share of the model's own time
STEPS = 60


def test_the_first_step_comes_soon(report, tmp_path):
    """Wall time of a new process, and of the same run with compiled blocks, first and second time."""
    open_dataset()  # in the cache
    compiled = ["--parallel.compile", "on"]
    starts = {"default": [], "compiled, first time": compiled, "compiled, second time": compiled}
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    taken = {name: _seconds_to_first_step(tmp_path / name, options, environment) for name, options in starts.items()}
    most = {"default": START}
    table = {name: {"clock": seconds(value, at_most=most.get(name))} for name, value in taken.items()}
    report("train_start: seconds to the first line of the default run", table)


def _seconds_to_first_step(out, options, environment):
    begin = time.perf_counter()
    command = [sys.executable, "-m", "fasttrain.train", "--out", str(out), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    while not read_metrics(out):  # a step is logged when the next one is done
        assert process.poll() is None
        time.sleep(0.02)
    taken = time.perf_counter() - begin
    process.kill()
    process.wait()
    return taken


def test_the_default_dataset_is_built_soon(report, tmp_path):
    begin = time.perf_counter()
    standard_library(tmp_path)
    taken = seconds(time.perf_counter() - begin, at_most=DATASET)
    report("train_dataset: building the default dataset", {"standard library": {"clock": taken}})


def test_what_is_around_a_step_costs_little(report, tmp_path):
    """Data, metrics, TensorBoard, checks and checkpoints every ten steps, in CPU time of all threads.

    Validation is not included: it is the model's own work.
    """
    clock = time.process_time
    inside, marks = [], []

    def timed(function):
        def run(*args, **options):
            begin = clock()
            marks.append(begin)
            result = function(*args, **options)
            inside.append(clock() - begin)
            marks.append(clock())
            return result

        return run

    argv = ["--out", str(tmp_path / "run"), "--batch.steps", str(STEPS), "--checkpoint.every", "10"]
    with (
        patch.object(loop, "train_step", timed(train_step)),
        patch.object(loop, "validate", timed(validate)),
    ):
        assert fasttrain.train.main([*argv, "--validation.every", "0", "--parallel.compile", "on"]) == 0
    # Without the first steps, which compile
    model, total = sum(inside[5:]), marks[-1] - marks[10]
    around = (total - model) / model
    report(
        f"train_around: the default run, {STEPS} steps, one checkpoint in ten",
        {
            "around the step": {
                "share": ratio(around, at_most=AROUND, margin=None),  # of two large numbers: a third more is noise
                "a step": seconds((total - model) / (len(inside) - 5)),
            }
        },
    )
