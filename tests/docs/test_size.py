"""The documentation stays short: words in all, lines of the README, columns of a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT

WORDS, LINES, COLUMNS = 25_000, 150, 120
MOST = {"monitor.md": 1300, "events.md": 1000, "faults.md": 900, "config.md": 2400}


def test_the_pages_have_few_words() -> None:
    words = {page.name: len(page.read_text().split()) for page in DOCS.glob("*.md")}
    assert {name: words[name] for name, most in MOST.items() if words[name] > most} == {}
    assert sum(len(page.read_text().split()) for page in DOCS.rglob("*.md")) <= WORDS


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit(page: Path) -> None:
    """The README's measured tables are written by bench.report."""
    measured = page.read_text().partition("<!-- bench -->")[2].partition("<!-- /bench -->")[0].splitlines()
    lines = [line for line in page.read_text().splitlines() if len(line) > COLUMNS]
    assert [line for line in lines if line not in measured] == []
