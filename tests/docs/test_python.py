"""Every Python example runs, those of a page one after another; every example of settings and of JSON is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fasttrain.cli.parse import load
from fasttrain.metrics import logger as record
from fasttrain.recipes import RECIPES
from tests.docs.names import IN_A_TEST, NAMES
from tests.docs.pages import blocks

PAGES = sorted({block.page for block in blocks() if block.language == "python"})


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "SINKS", list(record.SINKS))  # a page adds to it
    names = dict(Path=Path, torch=torch) | NAMES.get(page, dict)()
    try:
        for block in blocks():
            if (block.page, block.language) == (page, "python"):
                text = block.text
                for written, instead in IN_A_TEST.items():
                    text = text.replace(written, instead)
                exec(compile("\n" * block.line + text, page, "exec"), names)
        HELD.get(page, lambda names: None)(names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _readme(names: dict) -> None:
    x, residual = names["block"](torch.randn(2, 24, 32), torch.zeros(2, 24, 32))
    assert x.shape == residual.shape == (2, 24, 32)
    names["loss"].backward()
    assert names["head_weight"].grad.isfinite().all()
    assert names["model"].config._attn_implementation == "fasttrain"


def _checkpoints(names: dict) -> None:
    assert names["list_checkpoints"](names["run"] / "checkpoints")[-1].step == 400


def _data(names: dict) -> None:
    assert names["batch"].tokens.numel() == 16 * 256
    assert names["step"] == 299


def _lint(names: dict) -> None:
    assert names["report"].having("error") == []


# What is to be seen afterwards
HELD = {
    "README.md": _readme,
    "docs/checkpoints.md": _checkpoints,
    "docs/data.md": _data,
    "docs/lint.md": _lint,
    "docs/kernels/testing.md": lambda names: names["test_scale"](),
}


def test_no_names_are_left_over() -> None:
    assert set(NAMES) | set(HELD) <= set(PAGES)


@pytest.mark.parametrize("block", [block for block in blocks() if block.language == "toml"], ids=str)
def test_settings_are_read(block, tmp_path) -> None:
    (tmp_path / "run.toml").write_text(block.text)
    load(["--config", str(tmp_path / "run.toml")], RECIPES)


@pytest.mark.parametrize("block", [block for block in blocks() if block.language == "json"], ids=str)
def test_json_is_json(block) -> None:
    """`...` stands for more of the same."""
    json.loads(block.text.replace(", ...", "").replace("...", "0"))


def test_every_block_has_a_known_language() -> None:
    known = {"", "sh", "bash", "console", "text", "python", "toml", "json"}
    assert [str(block) for block in blocks() if block.language not in known] == []
