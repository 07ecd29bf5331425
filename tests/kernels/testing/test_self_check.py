import dataclasses

import pytest

from fasttrain_kernels.testing import self_check


def one_line(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())  # a narrow terminal wraps


def test_every_op_is_ok(capsys):
    assert self_check.main([]) == 0
    printed = one_line(capsys)
    assert "All ops OK." in printed
    assert printed.count(") OK") == len(self_check.CASES) * len(list(self_check.implementations()))


def test_a_wrong_op_fails_and_shows_in_the_exit_code(capsys, monkeypatch):
    case = next(case for case in self_check.CASES if case.name == "swiglu")
    wrong = dataclasses.replace(case, op=lambda gate, up: case.op(gate, up) * 1.1)
    monkeypatch.setattr(self_check, "CASES", [wrong])
    assert self_check.main([]) == 1
    assert "3 of 3 comparisons failed" in one_line(capsys)


def test_an_unknown_op_is_an_error_that_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit:
        self_check.main(["--op", "sigmoid"])
    assert exit.value.code == 2
    assert "no op is called sigmoid; there are rms_norm," in capsys.readouterr().err
