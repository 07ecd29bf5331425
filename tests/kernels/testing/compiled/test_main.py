"""The command."""

import re

import pytest
import triton

from fasttrain_kernels.testing.compiled import rules
from fasttrain_kernels.testing.compiled.__main__ import main


def test_command_prints_a_table_and_writes_the_figures(tmp_path, capsys):
    arguments = ["--target", "sm_90", "--op", "swiglu", "--jobs", "1", "--json", str(tmp_path / "figures.json")]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "sm_90 (H100, H200)" in printed
    assert re.search(r"swiglu_bwd +bf16 F=14336", printed)
    assert "0 problems" in printed
    assert set(rules.read(tmp_path / "figures.json")[1]["sm_90"]) == {"swiglu"}


def test_command_stores_figures_and_compares_with_them(tmp_path, capsys):
    stored = tmp_path / "figures.json"
    arguments = ["--target", "sm_90", "--op", "swiglu", "--jobs", "1", "--stored", str(stored)]
    assert main([*arguments, "--update"]) == 0
    version, figures = rules.read(stored)
    for kernel in figures["sm_90"]["swiglu"].values():
        kernel["registers"] -= 2 * rules.REGISTER_MARGIN
    rules.write(stored, figures)
    assert version == triton.__version__
    assert main(arguments) == 1
    assert "registers was" in capsys.readouterr().out


def test_command_updates_no_file_but_the_given_one(capsys):
    with pytest.raises(SystemExit):
        main(["--update"])
    assert "--update needs --stored FILE" in capsys.readouterr().err
