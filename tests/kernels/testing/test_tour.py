import dataclasses

import pytest

from fasttrain_kernels.testing import tour


def one_line(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())  # a narrow terminal wraps


def test_the_tour_finds_every_op_right(capsys):
    assert tour.main([]) == 0
    printed = one_line(capsys)
    assert "Every op is right." in printed
    assert printed.count(") right") == len(tour.CASES) * len(list(tour.forms()))


def test_a_wrong_op_is_called_wrong_and_shows_in_the_exit_code(capsys, monkeypatch):
    case = next(case for case in tour.CASES if case.name == "swiglu")
    wrong = dataclasses.replace(case, op=lambda gate, up: case.op(gate, up) * 1.1)
    monkeypatch.setattr(tour, "CASES", [wrong])
    assert tour.main([]) == 1
    assert "3 of 3 comparisons are wrong" in one_line(capsys)


def test_an_unknown_op_is_an_error_that_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit:
        tour.main(["--op", "sigmoid"])
    assert exit.value.code == 2
    assert "no op is called sigmoid; there are rms_norm," in capsys.readouterr().err
