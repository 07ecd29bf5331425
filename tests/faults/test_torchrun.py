"""A mistake of the user under torchrun: it is told at the end, and starting again costs no time."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.conftest import Row
from tests.faults.processes import launched, torchrun
from tests.runs import command

OPTIONS = ("--standalone", "--nproc_per_node=2", "--max-restarts=3", "-m", "fasttrain.train")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        pytest.param(["--data.path", "/nowhere"], "dataset: /nowhere does not exist", marks=pytest.mark.faults),
        (["--optim.lr", "x"], "an argument is wrong; the message is above"),
    ],
)
def test_a_mistake_is_the_last_word_and_its_retries_are_short(
    tmp_path: Path, row: Row, mistake: list[str], message: str
) -> None:
    with launched([*torchrun(*OPTIONS), *command(tmp_path / "run", *mistake)]) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    ends = [float(second) for second in re.findall(r"^E\d{4} \d\d:\d\d:(\d\d\.\d+).* failed", said, re.M)]
    assert len(ends) == 4
    retries = [(after - before) % 60 for before, after in pairwise(ends)]
    assert max(retries) < 2.5, said  # one that imports torch takes longer; alone on a machine they take 0.6 s
    assert said.count("fasttrain.train: error: as before: ") == 3
    assert said.count("could not convert string to float") <= 1
    root = said[said.index("Root Cause") :]
    assert "exitcode  : 2" in root
    assert message in root  # what anybody reads last
    assert "To enable traceback" not in said
    assert said.count("Traceback") == 1  # torchrun's own, above the message
    row(
        "a mistake under `--max-restarts=3`",
        happened=f"each retry ended within {max(retries):.1f} s",
        lost="nothing",
        reported="the message, last; torchrun: 1",
    )
