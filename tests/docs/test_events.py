"""docs/events.md is what fasttrain/events.py says, and every kind that the code uses is one of its kinds."""

from __future__ import annotations

import ast
import re

from fasttrain.events import ENDS, STARTS, EventKind, ExitCode, Severity
from tests.docs.events_page import COMMAND, PAGE, TITLES, page
from tests.docs.pages import ROOT

QUIET = {"start", "sample", "finish", "speed", "pause over"}  # nothing is left to do


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), f"docs/events.md is not what the code says; to update it: {COMMAND}"


def test_every_kind_is_listed_once_with_what_is_left_to_do() -> None:
    entries = re.findall(r"^- `([^`]+)`: (.+?)(?=^- |^## )", page(), re.M | re.S)
    assert sorted(kind for kind, _ in entries) == sorted(EventKind)
    assert {kind for kind, text in entries if "**You**" not in text} == QUIET
    assert set(TITLES) == set(Severity)


def test_every_exit_code_is_listed() -> None:
    codes = dict(re.findall(r"^\| (\d+) \| (.*) \|$", page(), re.M))
    assert set(codes) == {str(int(code)) for code in ExitCode} | {"137"}
    for code, kind in ((3, "stop"), (4, "not saved"), (5, "rank failure")):
        assert f"`{kind}`" in codes[str(code)]


def test_events_are_made_of_kinds_only() -> None:
    """`Event(kind=...)` never gets a text of its own, and no kind is left over."""
    used: set[str] = set()
    for path in (ROOT / "fasttrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "EventKind":
                used.add(node.attr)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Event":
                kinds = [keyword.value for keyword in node.keywords if keyword.arg == "kind"]
                assert not any(isinstance(kind, ast.Constant) for kind in kinds), f"{path}:{node.lineno}"
    assert used >= {kind.name for kind in EventKind}
    assert set(STARTS + ENDS) <= set(EventKind)
