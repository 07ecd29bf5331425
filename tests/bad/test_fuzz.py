"""Whatever is in a file that fasttrain reads: a clear error, or a right result.

FUZZ_EXAMPLES=5000 tries so many of each, and others each time. python -m tests.bad.count prints how many are tried.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.cli import main
from fasttrain.config_toml import to_toml
from fasttrain.data.prepare import prepare
from fasttrain.recipes import RECIPES
from tests.bad.mutations import FUZZ, answered
from tests.bad.targets import TARGETS
from tests.fasttrain.conftest import *  # noqa: F403  (small_run)
from tests.fasttrain.data.test_formats import megatron, shard

TEXT = "Some words, and more words; é and 你好.\n" * 20


@pytest.fixture(scope="session")
def good(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each group of targets."""
    top = tmp_path_factory.mktemp("good")
    for number in range(8):
        (top / f"{number}.txt").write_text(TEXT * (number + 1))
    prepare([top / f"{number}.txt" for number in range(8)], top / "dataset", tokenizer=300, workers=1)
    (top / "tokens").mkdir()
    shutil.copy(top / "dataset" / "tokenizer.json", top / "tokens")
    (top / "tokens" / "train.bin").write_bytes(shard(*range(200)))
    (top / "megatron").mkdir()
    megatron(top / "megatron" / "train", *(list(range(1, 30)) for _ in range(5)))
    (top / "settings").mkdir()
    (top / "settings" / "run.toml").write_text(to_toml(RECIPES["tiny"]()))
    shutil.copytree(small_run, top / "run", symlinks=True)
    assert main(["export", str(small_run), "--out", str(top / "model"), "--shard-size", "100KB"]) == 0
    return top


CASES = [  # a picture takes a second
    pytest.param(group, name, marks=[pytest.mark.slow] if "picture" in name else [])
    for group, names in TARGETS.items()
    for name in names
]


@pytest.mark.parametrize(("group", "name"), CASES)
def test_a_changed_file_is_an_error_or_right(good, tmp_path, group, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    target, directory = TARGETS[group][name], Path(shutil.copytree(good / group, tmp_path / group, symlinks=True))
    file = directory / target.file
    content = file.read_bytes()
    assert answered(lambda: target.read(directory)) == "", "the good one is not right"

    @FUZZ
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        file.write_bytes(target.change(data, content))
        np.seterr(all="ignore")
        answered(lambda: target.read(directory))

    fuzz()
