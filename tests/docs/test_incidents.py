"""docs/incidents.md has a section for every kind of incident in the code, and for nothing else; and every exit code."""

from __future__ import annotations

import ast
import re

from fasttrain import train
from fasttrain.tools.report.events import LEVELS
from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "incidents.md").read_text()
# Kinds that are computed, as the source has them, and what they can be
COMPUTED = {
    "verdict.kind": ("warning", "spike"),
    "f'{sick.kind} block'": ("dead block", "exploding block"),
    "incident.kind": (),  # those of Monitor, which are told as they come
    "kind": (),  # of a function that passes it on
}


def kinds() -> set[str]:
    """Of .event(step, KIND, ...), Incident(KIND, ...) and Event(kind=KIND), all over fasttrain."""
    found: set[str] = set()
    for path in (ROOT / "fasttrain").rglob("*.py"):
        if path.parent.name == "report":  # it reads them
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (kind := _kind(node)) is not None:
                found.update(_values(kind, path.name))
    return found


def _kind(call: ast.Call) -> ast.expr | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    place = {"event": 1, "Incident": 0}.get(name)
    if place is not None and len(call.args) > place:
        return call.args[place]
    if name in ("Event", "Incident"):
        return next((keyword.value for keyword in call.keywords if keyword.arg == "kind"), None)
    return None


def _values(kind: ast.expr, where: str) -> tuple[str, ...]:
    if isinstance(kind, ast.Constant):
        return (kind.value,)
    if isinstance(kind, ast.IfExp):
        return (*_values(kind.body, where), *_values(kind.orelse, where))
    source = ast.unparse(kind)
    assert source in COMPUTED, f"{where}: what can {source} be? say it in COMPUTED"
    return COMPUTED[source]


def test_every_kind_has_its_section_and_every_section_its_kind():
    sections = re.findall(r"^### (.+)$", PAGE, re.M)
    assert sorted(sections) == sorted(kinds())


def test_the_page_about_watching_has_them_all():
    table = (DOCS / "watch.md").read_text().partition("| kind | when |")[2].partition("\n\n")[0]
    named = {name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert named == kinds()


def test_the_report_knows_no_other_kinds():
    assert set(LEVELS) <= kinds()


def test_every_section_says_what_is_left_for_the_reader():
    quiet = {"start", "sample", "finish", "speed", "pause over"}  # nothing is
    for section in PAGE.split("\n### ")[1:]:
        kind, _, text = section.partition("\n")
        assert ("**You**" in text or "**you**" in text) == (kind not in quiet), kind


def test_exit_codes_are_those_of_the_code():
    codes = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.M))
    assert set(codes) == {"0", "1", "2", "3", "4", "5", "137"}
    assert "#stop" in codes[str(train.STOPPED)]
    assert "#unsaved" in codes[str(train.UNSAVED)]
    assert "#lost-rank" in codes[str(train.LOST)]
    watch = re.findall(r"^\| (\d+) \|", (DOCS / "watch.md").read_text().partition("## Exit codes")[2], re.M)
    assert {"0", "1", "2", "3", "4", "5"} <= set(watch)
