"""Launches for several GPUs, on as many CPU ranks: shortened, but started by torchrun as the pages have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.metrics.jsonl import read_metrics
from tests.docs.pages import ROOT, commands
from tests.docs.running import IN_A_TEST, shortened

MOST = 600  # seconds
LAUNCHES = sorted({c.text for c in commands() if c.text.startswith("torchrun ") and "--nnodes" not in c.text})


@pytest.mark.docs
@pytest.mark.parametrize("text", LAUNCHES)
def test_a_launch_trains(text: str, home: Path) -> None:
    launcher, options = text.split()[1:], []
    at = launcher.index("fasttrain.train") + 1
    launcher, options = launcher[:at], [IN_A_TEST.get(word, word) for word in launcher[at:]]
    words = [*launcher, *shortened(options), "--batch.micro", "1", "--out", "runs/launched"]
    environment = os.environ | dict(PYTHONPATH=f"{ROOT}:{ROOT / 'kernels'}", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=home, env=environment, timeout=MOST, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "8 ranks on cpu" in done.stdout
    assert [line["step"] for line in read_metrics(Path("runs/launched"))] == [1, 2, 3, 4, 5, 6]
