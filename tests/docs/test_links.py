"""Every link and anchor of the documentation leads somewhere, and every page can be reached from its index."""

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links


def resolve(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = link.partition("#")
    return (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        if "://" in link:
            continue
        target, anchor = resolve(page, link)
        assert target.exists(), f"{page}: there is no {link}"
        assert target.is_relative_to(ROOT), f"{page}: {link} is outside of the repository"
        if anchor:
            assert anchor in anchors(target), f"{page}: {link}: {target.name} has {', '.join(sorted(anchors(target)))}"


def test_every_page_is_reached_from_the_index():
    index = DOCS / "README.md"
    reached, waiting = {index}, [index]
    while waiting:
        page = waiting.pop()
        for link in links(page):
            target, _ = resolve(page, link)
            if "://" not in link and target.suffix == ".md" and target not in reached and target.exists():
                reached.add(target)
                waiting.append(target)
    assert [page for page in DOCS.rglob("*.md") if page not in reached] == []


def test_headings_become_anchors_as_on_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# What, and *why*?\n## `data.mixture.NAME`\n## A [link](x.md)\n## A link\n```\n# none\n```\n")
    assert anchors(page) == {"what-and-why", "datamixturename", "a-link", "a-link-1"}
