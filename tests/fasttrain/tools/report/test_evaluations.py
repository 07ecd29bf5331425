"""What fasttrain eval found, on the page."""

from fasttrain.tools.report import read_records
from fasttrain.tools.report.page import page
from tests.fasttrain.tools.report.made import make_run, write_lines
from tests.fasttrain.tools.report.test_page import NASTY, content


def line(step: int, **more: object) -> dict:
    return dict(step=step, time=float(step), **more)


def test_the_newest_answer_to_each_question_stays_text(tmp_path):
    run = make_run(tmp_path / "run", 10)
    score = dict(set=NASTY, loss=2.5, tokens=64, suspicion=NASTY)
    task = dict(task="mine", metric="acc", filter="none", value=0.5, stderr=None, samples=4, fewshot=0)
    lines = [line(9, **score), line(9, **task), line(6, **score), line(9, **score | dict(loss=3.5))]
    write_lines(run / "evaluations.jsonl", [*lines, line(9, **score | dict(tokens=128))])
    (shown,) = content(page(read_records([run])))["runs"]
    found = [(each["step"], each.get("set"), each.get("loss"), each.get("tokens")) for each in shown["evaluations"]]
    assert found == [(6, NASTY, 2.5, 64), (9, NASTY, 3.5, 64), (9, None, None, None), (9, NASTY, 2.5, 128)]


def test_a_run_that_nobody_asked_about(tmp_path):
    (shown,) = content(page(read_records([make_run(tmp_path / "run", 10)])))["runs"]
    assert shown["evaluations"] == []
