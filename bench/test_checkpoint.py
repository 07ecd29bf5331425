"""The stall of training by a checkpoint, saved in the background or not."""

import statistics
import sys

from bench.commands import finished_run
from bench.figures import memory, ratio, seconds
from fasttrain.checkpoint.committed import list_checkpoints

EVERY, STEPS = 4, 13  # the first of three saves allocates its staging memory, and is skipped
MAX_STALL = 0.25  # of the time that training waits for a save that is not in the background
MODEL = ["--model.layers", 6, "--model.hidden", 512, "--model.heads", 8, "--model.kv_heads", 8, "--model.ffn", 1536]
BATCH = ["--data.sequence", 64, "--batch.sequences", 4, "--batch.micro", 4, "--batch.steps", STEPS, "--optim.warmup", 2]
NO_EXTRAS = ["--validation.every", 0, "--validation.sequences", 1, "--validation.sample", "", "--data.lint", "off"]


def test_a_save_in_the_background_holds_up_training_for_a_moment(report, tmp_path):
    waits, size = {}, 0
    for name, background in {"in the background": True, "while training waits": False}.items():
        options = [*MODEL, *BATCH, *NO_EXTRAS, "--checkpoint.every", EVERY, "--checkpoint.background", background]
        out = tmp_path / name.replace(" ", "-")
        lines = finished_run([sys.executable, "-m", "fasttrain.train"], out, "--log.report", False, *options)
        size = list_checkpoints(out / "checkpoints")[-1].bytes
        # What follows a step is in the phases of the next one.
        waits[name] = [line["time/checkpoint"] for line in lines if line["step"] % EVERY == 1 and line["step"] > 1][1:]
    stall, wait = (statistics.median(found) for found in waits.values())
    report(
        f"checkpoint: a save of {size / 1e6:,.0f} MB, every {EVERY} steps",
        {
            "in the background": {
                "stall": seconds(stall),
                "of waiting": ratio(stall / wait, at_most=MAX_STALL, margin=None),
            },
            "while training waits": {"stall": seconds(wait), "checkpoint": memory(size)},
        },
    )
