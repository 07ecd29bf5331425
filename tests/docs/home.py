"""A directory in which the commands of the documentation find what they name: texts, datasets, runs, settings."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np

from fasttrain import cli
from fasttrain.train import main as train
from tests.docs.pages import blocks
from tests.fasttrain.data.lint.test_checks import doubled
from tests.fasttrain.train.test_rollback import RUN as SPIKED
from tests.fasttrain.train.test_rollback import poisoned
from tests.runs import SMALL

DATASETS = ("data/my-text", "data/books", "data/web", "data/code", "my/dataset")  # the same as data/mine
RUNS = ("runs/a", "runs/b", "runs/base")  # the same as runs/tiny
WORDS = ["the", "model", "reads", "a", "text", "and", "writes", "what", "may", "come", "next"]


def make_home(home: Path) -> None:
    """Seconds of work; see copy_home."""
    _texts(home)
    prepare = ["my/notes", "web/*.jsonl.gz", "--out", "data/mine", "--tokenizer", "bytes", "--validation", "0.1"]
    assert cli.main(["data", "prepare", *prepare]) == 0
    for name in DATASETS:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(home / "data/mine")
    doubled(home / "data/doubled")
    nano = home / "nanoGPT/data/openwebtext"
    nano.mkdir(parents=True)
    for name, tokens in (("train", 20_000), ("val", 2_000)):
        ids = np.random.default_rng(0).integers(50_256, size=tokens, dtype=np.uint16)
        ids[::50] = 50_256
        ids.tofile(nano / f"{name}.bin")
    for block in blocks():
        if block.language == "toml" and (named := re.match(r"# ([\w-]+\.toml)\n", block.text)):
            (home / named[1]).write_text(block.text)
    options = ["--data.path", "data/mine", "--batch.steps", "16", "--log.tensorboard", "True"]  # an epoch
    assert train([*SMALL, *options]) == 0
    for name in RUNS:
        shutil.copytree(home / "runs/tiny", home / name)
    with poisoned(range(70, 75)):
        assert train([*SPIKED, "--out", "runs/spiked"]) == 0


def _texts(home: Path) -> None:
    draw = random.Random(0)
    (home / "my/notes/src").mkdir(parents=True)
    for number in range(40):
        (home / f"my/notes/{number:02}.md").write_text(f"# Note {number}\n{' '.join(draw.choices(WORDS, k=9))}\n")
    (home / "my/notes/src/parser.py").write_text("def parse(text):\n    return text.split()\n")
    (home / "my/prompt.txt").write_text("the model reads")
    (home / "web").mkdir()
    with gzip.open(home / "web/part-00.jsonl.gz", "wt") as file:
        for number in range(40):
            file.write(json.dumps(dict(text=f"page {number}: " + " ".join(draw.choices(WORDS, k=9)))) + "\n")


def copy_home(home: Path, copy: Path) -> None:
    """One for each block of commands: they may delete and overwrite."""
    shutil.copytree(home, copy, symlinks=True)
