"""The page in a real browser: Debian's Chromium, driven by Playwright (make test-browser)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fasttrain.tools.report.page import write_page
from fasttrain.tools.report.record import read_records
from tests.fasttrain.tools.report.made import BEGAN, event_line, make_run, steps, write_lines

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
try:
    from playwright.sync_api import Page, sync_playwright
except ImportError:
    sync_playwright = None

pytestmark = [
    pytest.mark.skipif(sync_playwright is None, reason="needs playwright (make test-browser)"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
SPIKE = event_line(
    120, "spike", "loss 4.9 instead of 3.1", tokens=120 * 4096, action="rolled back to step 100",
    evidence=dict(z=12.4, series="loss"), documents=[f"corpus/part-7.jsonl:{line}" for line in range(60)],
)  # fmt: skip
PHONE, DESK = dict(width=390, height=844), dict(width=1280, height=900)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has none
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """One run with events, and two compared."""
    folder = tmp_path_factory.mktemp("pages")
    events = [SPIKE, event_line(200, "slow-down", NASTY), event_line(150, "sample", f"def f():\n    {NASTY}")]
    a = make_run(folder / "a", 300, blocks=4, events=events)
    (a / "metrics.jsonl").unlink()
    lines = steps(1, 300, blocks=4)
    lines[40] |= dict(loss=None, grad_norm=None, nonfinite=["loss", "grad_norm"])
    write_lines(a / "metrics.jsonl", [*lines[:117], *steps(118, 121, blocks=4, raised=1.5), *lines[100:]])
    b = make_run(folder / "b", 200, planned=300, lr=3e-4, seed=1)
    write_page(read_records([a]), folder / "one.html")
    write_page(read_records([a, b]), folder / "two.html")
    write_page(read_records([b]), folder / "running.html", running=True)
    return {name: folder / f"{name}.html" for name in ("one", "two", "running")}


@pytest.fixture
def visit(browser) -> Iterator[Any]:
    """Open a page; at the end, nothing may have failed, and nothing may have been asked of a network."""
    troubles: list[str] = []
    contexts = []

    def visit(path: Path, *, size: dict[str, int] = DESK, theme: str = "light", fragment: str = "") -> Page:
        context = browser.new_context(viewport=size, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("requestfailed", lambda request: troubles.append(f"failed: {request.url}"))
        page.on("request", lambda r: None if r.url.startswith("file:") else troubles.append(f"request: {r.url}"))
        page.goto(f"{path.as_uri()}{fragment}")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not troubles


def paths(page: Page, chart: str) -> list[str]:
    return page.locator(f"#chart-{chart} path[data-line]").evaluate_all("all => all.map((p) => p.getAttribute('d'))")


def hover(page: Page, share: float, chart: str = "loss") -> str:
    """What the little window says at a place across a chart's plot."""
    box = page.locator(f"#chart-{chart} > svg").bounding_box()
    left, right = 54, box["width"] - 14
    page.mouse.move(box["x"] + left + share * (right - left), box["y"] + box["height"] / 2)
    return page.locator("#tip").inner_text()


def overflow(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def test_content(visit, pages):
    page = visit(pages["one"])
    assert page.title() == "a · fasttrain"
    assert page.locator("h1").inner_text() == "a"
    head = page.locator("#head").inner_text()
    for text in ("finished", "300 of 300 steps", "12.3M parameters", "8 x NVIDIA H100", "8 ranks", "1.23M"):
        assert text in head
    charts = page.locator(".chart h3").all_inner_texts()
    for title in ("Loss", "Learning rate", "Gradient norm", "Gradient norm by block", "Tokens per second", "MFU"):
        assert title in charts
    for title in ("Step time", "Memory", "Steps not saved yet", "Age of the last checkpoint"):
        assert title in charts
    assert len(paths(page, "blocks-0")) == 4
    assert len(paths(page, "time-0")) == 6
    assert page.locator("#chart-loss [data-ghost]").count() == 1
    assert page.locator("#events tbody tr").count() == 3
    assert page.locator("#checkpoints tbody tr").count() == 3
    assert "verified when it was written" in page.locator("#checkpoints").inner_text()
    assert "optim" in page.locator(".settings").inner_text()


def test_what_a_run_writes_is_text(visit, pages):
    page = visit(pages["one"])
    assert NASTY in page.locator("#events").inner_text()
    assert NASTY in page.locator(".sample").inner_text()
    hover(page, 200 / 300)
    assert NASTY in page.locator("#tip").inner_text()
    assert page.evaluate("window.hacked") is None


def test_hover_reads_values_and_events(visit, pages):
    page = visit(pages["one"])
    shown = hover(page, 0.25)
    assert "step 75 " in shown
    assert "training" in shown
    assert "smoothed" in shown
    shown = hover(page, 120 / 300)
    for text in ("spike at step 120", "loss 4.9 instead of 3.1", "rolled back to step 100", "z: 12.4", "57 more"):
        assert text in shown
    assert "not finite" in hover(page, 41 / 300)
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_zoom_by_drag_and_back(visit, pages):
    page = visit(pages["one"])
    before = paths(page, "lr")
    box = page.locator("#chart-loss > svg").bounding_box()
    assert page.locator("#reset").is_disabled()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 100, steps=5)
    page.mouse.up()
    assert "zoom=" in page.url
    assert paths(page, "lr") != before  # all charts
    page.locator("#reset").click()
    assert paths(page, "lr") == before
    page.locator("#events .go").first.click()  # an event's step: a look from nearby
    assert "zoom=" in page.url
    page.locator("#chart-lr > svg").dblclick()
    assert "zoom=" not in page.url


def test_axis_smoothing_scale_and_marks(visit, pages):
    page = visit(pages["one"])
    page.get_by_role("button", name="Tokens", exact=True).click()
    assert "x=tokens" in page.url
    assert "M" in page.locator("#chart-lr > svg").text_content()
    page.get_by_role("button", name="Hours", exact=True).click()
    assert "min" in page.locator("#chart-lr > svg").text_content()
    smooth = paths(page, "loss")
    page.locator("#smooth").fill("0")
    assert paths(page, "loss") != smooth
    raw = paths(page, "loss")
    page.locator("#chart-loss button", has_text="log").click()
    assert paths(page, "loss") != raw
    assert page.locator("#chart-loss button", has_text="log").get_attribute("aria-pressed") == "true"
    assert page.locator("#chart-loss .mark.bad").count() == 1
    page.locator("#marks").uncheck()
    assert page.locator(".mark").count() == 0


def test_a_view_survives_loading_again(visit, pages):
    page = visit(pages["one"], fragment="#x=hours&smooth=0.9&marks=0&log=loss")
    before = paths(page, "loss")
    page.reload()
    assert paths(page, "loss") == before
    assert page.locator("#smooth").input_value() == "0.9"


def test_keys_move_along_a_curve(visit, pages):
    page = visit(pages["one"])
    page.locator("#chart-lr > svg").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "step 3 " in page.locator("#tip").inner_text()


def test_comparison(visit, pages):
    page = visit(pages["two"])
    assert page.locator("#figures tbody tr").count() == 2
    table = page.locator("#differences").inner_text()
    assert "optim.lr" in table
    assert "clip" not in table
    assert len(paths(page, "lr")) == 2
    colours = "all => all.map((p) => getComputedStyle(p).stroke)"
    curves = page.locator("#chart-lr path[data-line]").evaluate_all(colours)
    assert curves == page.locator("#chart-grad_norm path[data-line]").evaluate_all(colours)
    assert len(set(curves)) == 2
    page.locator(".chip", has_text="b").click()
    assert len(paths(page, "lr")) == 1
    assert "hide=b" in page.url
    page.locator(".chip", has_text="b").click()
    assert len(paths(page, "lr")) == 2


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_on_a_phone_nothing_sticks_out(visit, pages, name, theme):
    page = visit(pages[name], size=PHONE, theme=theme)
    assert overflow(page) <= 0
    page.locator("#more > summary").click()
    for fold in page.locator("details > summary").all():
        if fold.is_visible():
            fold.click()
    assert overflow(page) <= 0


def test_dark_by_the_system_and_by_hand(visit, pages):
    ground = "getComputedStyle(document.body).backgroundColor"
    page = visit(pages["one"], theme="dark")
    dark = page.evaluate(ground)
    page.locator("#theme").click()
    light = page.evaluate(ground)
    assert light != dark
    assert visit(pages["one"], theme="light").evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light  # the choice stays


def opened_at_noon(browser: Any, path: Path) -> Page:
    """With a clock that only goes on when it is told to."""
    page = browser.new_context(viewport=DESK).new_page()
    page.clock.install(time=BEGAN + 100)
    page.goto(f"{path.as_uri()}#x=tokens")
    return page


def test_the_page_of_a_running_run_loads_itself_again(browser, pages):
    page = opened_at_noon(browser, pages["running"])
    with page.expect_event("load"):  # waits for as long as a busy machine takes
        page.clock.run_for(31_000)
    assert "x=tokens" in page.url
    page.context.close()


def test_the_page_of_a_finished_run_does_not(browser, pages):
    page = opened_at_noon(browser, pages["one"])
    page.evaluate("window.same = true")
    page.clock.run_for(200_000)
    page.wait_for_timeout(500)
    assert page.evaluate("window.same")
    page.context.close()


def test_as_many_points_as_a_page_ever_has(visit, tmp_path):
    page_path = tmp_path / "long.html"
    write_page(read_records([make_run(tmp_path / "long", 6000, blocks=32)]), page_path)
    page = visit(page_path)
    assert len(paths(page, "blocks-0")) == 32
    assert "training" in hover(page, 0.5)
