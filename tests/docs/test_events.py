"""docs/events.md has every kind of event and exit code, and every kind that the code uses is one of its kinds."""

from __future__ import annotations

import ast
import re

from fasttrain.events import ENDS, STARTS, EventKind, ExitCode, Severity
from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "events.md").read_text()
QUIET = {"start", "sample", "finish", "speed", "pause over"}  # nothing is left to do
TITLES = {
    Severity.ERROR: "Errors",
    Severity.WARNING: "Warnings",
    Severity.ACTION: "Actions",
    Severity.INFO: "Information",
}


def test_every_kind_is_listed_once_under_its_severity_with_what_is_left_to_do() -> None:
    assert set(TITLES) == set(Severity)
    for severity, title in TITLES.items():
        (section,) = re.findall(rf"^## {title}$(.+?)^## ", PAGE, re.M | re.S)
        entries = re.findall(r"^- `([^`]+)`: (.+?)(?=^- |\Z)", section, re.M | re.S)
        assert sorted(kind for kind, _ in entries) == sorted(kind for kind in EventKind if kind.severity is severity)
        assert {kind for kind, text in entries if "**You**" not in text} <= QUIET
    assert not [kind for kind in QUIET if re.search(rf"- `{kind}`: [^\n]+\n  \*\*You", PAGE)]


def test_every_exit_code_is_listed() -> None:
    codes = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.M))
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
