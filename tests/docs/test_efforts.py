"""Every test that docs/efforts.md names exists, and every effort names some."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "efforts.md").read_text()
EFFORTS = PAGE.split("\n## ")[1:]


def named_in(text: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", text)


@pytest.mark.parametrize("name", sorted(set(named_in(PAGE))))
def test_a_named_test_exists(name: str) -> None:
    path, function = name.split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_effort_has_commands_and_tests() -> None:
    assert len(EFFORTS) == 5
    for effort in EFFORTS:
        assert "```console" in effort
        assert len(named_in(effort)) >= 5
