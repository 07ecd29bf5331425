"""Without lm-evaluation-harness, --tasks says how to get it, before any work."""

import sys

import pytest

from fasttrain import cli


def test_the_error_has_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "fasttrain.tools.harness", raising=False)
    with pytest.raises(SystemExit) as exit:
        cli.main(["eval", str(tmp_path), "--tasks", "hellaswag"])
    assert exit.value.code == 2
    assert "pip install 'fasttrain[eval]'" in capsys.readouterr().err
