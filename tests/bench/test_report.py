"""python -m bench.report: the README's table, and the page, from stored runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench import tracking
from bench.figures import exact, memory, ratio, seconds
from bench.report import __main__ as command
from bench.report.content import places, targets
from bench.report.markdown import BEGIN, END, markdown, write
from bench.report.page import page
from bench.report.quantities import number, plain, scaled
from fasttrain.tools.webpage import Axis, Series, chart, ticks_of

CPU = {"cpu": "A CPU <1>", "cores": 2, "gpu": None, "gpus": 0}
GPU = {"cpu": "A CPU", "cores": 8, "gpu": "NVIDIA H100", "gpus": 1}


def kernel_rows(implementation: str, factor: float, *, tokens: int, passes: str = "forward+backward") -> tracking.Rows:
    about = {
        "op": "swiglu", "pass": passes, "size": {"M": tokens, "F": 64}, "dtype": "fp32",
        "implementation": implementation, "bytes": tokens * 640, "flops": tokens * 15,
        "bandwidth": 2e10, "peak_flops": 6e10,
    }  # fmt: skip
    time = tokens * 1e-6 * factor
    figures = {
        "time": seconds(time), "of eager": ratio(factor), "peak": exact(tokens * 100 * factor, "B"),
        "of the limit": ratio(tokens * 640 / 2e10 / time, margin=None),
    }  # fmt: skip
    return {f"swiglu M{tokens}/{implementation}/{name}": f.row() | {"about": about} for name, f in figures.items()}


def vocabulary_rows(implementation: str, factor: float) -> tracking.Rows:
    rows = {}
    for vocab in (1000, 4000):
        about = {"op": "linear_cross_entropy", "pass": "memory", "size": {"V": vocab}, "dtype": "fp32"}
        row = memory(vocab * factor).row() | {"about": about | {"implementation": implementation}}
        rows[f"linear_cross_entropy memory V{vocab}/{implementation}/peak"] = row
    return rows


def stored(folder: Path) -> Path:
    rows: tracking.Rows = {"step/ours, against theirs/x": ratio(1.2, at_least=1.1).row()}
    for implementation, factor in (("fasttrain", 0.5), ("eager", 1.0), ("torch", 0.75)):
        for tokens in (100, 1000):
            rows |= kernel_rows(implementation, factor, tokens=tokens)
        rows |= vocabulary_rows(implementation, factor)
    head: dict[str, Any] = dict(changes="", versions={"torch": "2.13.0"})
    older = {"step/ours, against theirs/x": ratio(1.1, at_least=1.1).row()}
    tracking.save(tracking.Run(date="2026-01-01T00:00:00", commit="aaa", hardware=CPU, rows=older, **head), folder)
    tracking.save(tracking.Run(date="2026-01-02T00:00:00", commit="bbb", hardware=CPU, rows=rows, **head), folder)
    gpu = tracking.Run(
        date="2026-01-01T12:00:00", commit="bbb", hardware=GPU, rows=older, sensors={"sm_clock": 1980}, **head
    )
    tracking.save(gpu, folder)
    return folder


def test_the_table(tmp_path):
    text = markdown(places(tracking.history(stored(tmp_path))))
    assert text.startswith("On A CPU <1>, 2 cores (2026-01-02, bbb, torch 2.13.0):\n")
    assert "| op, forward+backward | size | eager's time | fasttrain | torch | peak memory of `fasttrain` |" in text
    assert "| `swiglu` | M1000 F64 fp32 | 1 ms | 0.50 | 0.75 | 0.50 of 100 kB |" in text  # the largest size
    assert "| step: ours, against theirs, x | 1.2 | ≥ 1.1 |" in text
    assert "On 1 x NVIDIA H100" in text


def test_nothing_stored():
    assert "make bench-save" in markdown([])
    assert "make bench-save" in page([], [])


def test_writing_the_readme_twice_changes_it_once(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{BEGIN}\nold \\1 text\n{END}\n\nafter\n")
    folder = stored(tmp_path / "history")
    arguments = ["--results", str(folder), "--write", str(readme)]
    assert command.main(arguments) == 0
    once = readme.read_text()
    assert once.startswith(f"before\n\n{BEGIN}\nOn A CPU")
    assert once.endswith(f"|\n{END}\n\nafter\n")
    assert "old" not in once
    assert "H100" not in once  # measured before
    assert command.main(arguments) == 0
    assert readme.read_text() == once
    assert write(readme, "other")
    assert not write(readme, "other")


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_file_without_marks_is_left_alone(tmp_path, text, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(SystemExit):
        command.main(["--results", str(stored(tmp_path / "h")), "--write", str(readme)])
    assert "README.md needs one line <!-- bench -->" in capsys.readouterr().err
    assert readme.read_text() == text


def test_wrong_input_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--results", str(tmp_path / "nowhere")])
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SystemExit):
        command.main(["--results", str(tmp_path), "--markdown"])
    assert "bad.json is not a result of the benchmarks" in capsys.readouterr().err


class Page(HTMLParser):
    """Every tag is closed, and nothing comes from elsewhere."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_shows_all(tmp_path):
    out = tmp_path / "bench.html"
    assert command.main(["--results", str(stored(tmp_path / "h")), "--out", str(out)]) == 0
    html = out.read_text()
    texts = Page(html).texts
    for title in ("A CPU <1>, 2 cores", "Roofline, fp32", "Time against size", "Ratios with a limit", "History"):
        assert title in texts
    assert "Memory against vocabulary: linear_cross_entropy" in texts
    assert [
        t for t in texts if t.startswith("fasttrain: swiglu forward+backward, M1000 F64 fp32: 500 µs, 0.50 of eager")
    ]
    assert any("sm_clock 1980" in text for text in texts)
    assert "http" not in html


def test_predictions_are_marked(tmp_path):
    row = {
        "op": "rms_norm", "pass": "forward", "provider": "fasttrain", "shape": "8x8", "target": "sm_90",
        "bytes_memory": 1000, "flops": 500, "predicted_us": [1, 2, 4],
    }  # fmt: skip
    path = tmp_path / "static.json"
    path.write_text(json.dumps([row, row | {"launch": "second"}, row | {"provider": "liger"}]))
    (target,) = targets(path)
    assert [(p.provider, p.bytes) for p in target.points] == [("fasttrain", 2000), ("liger", 1000)]
    assert [p.seconds[1] for p in target.points] == pytest.approx([4e-6, 2e-6])
    texts = Page(page([], [target])).texts
    assert "h100-sxm, bf16: predicted" in texts
    assert "rms_norm forward, fasttrain, 8x8: 4 µs predicted" in texts
    assert targets(tmp_path / "none.json") == []


def test_hardware_without_anything_to_show_has_no_section(tmp_path):
    rows = {"start/first step": seconds(1.0).row()}
    tracking.save(
        tracking.Run(
            date="2026-01-01T00:00:00", commit="a", hardware=CPU, rows=rows, changes="", versions={"torch": "2"}
        ),
        tmp_path,
    )
    assert "A CPU" not in page(places(tracking.history(tmp_path)), [])


def test_the_stored_figures_make_a_page():
    Page(page(places(tracking.history(tracking.HISTORY)), targets()))


@pytest.mark.parametrize("high", [0.3, 1.0, 6.9, 7.1, 9.99, 10.0, 3_456.0])
def test_a_linear_axis_has_a_few_round_ticks(high):
    ticks = ticks_of(Axis("", plain, log=False), 0, high)
    assert 3 <= len(ticks) <= 8
    assert high / 2 < ticks[-1] <= high


def test_points_are_where_they_belong():
    axis = Axis("", plain)
    svg = chart("x", [Series("a", [(10, 10), (100, 100), (1000, 1000)], "red")], axis, axis)
    found = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert found[1][0] == pytest.approx((found[0][0] + found[2][0]) / 2, abs=0.2)  # by powers of ten
    assert found[0][1] > found[1][1] > found[2][1]  # up is more
    line = re.search(r'<polyline class="line"[^>]* points="([^"]+)"', svg)
    assert line
    assert line[1].split()[0] == f"{found[0][0]},{found[0][1]}"


@pytest.mark.parametrize(
    ("axis", "low", "high", "ticks"),
    [
        (Axis("", plain), 0.9, 1200, [1, 10, 100, 1000]),
        (Axis("", plain), 1, 9, [1, 2, 5]),
        (Axis("", plain, log=False), 0, 1.5, [0, 0.5, 1.0, 1.5]),
        (Axis("", plain, ticks=[5, 50]), 1, 10, [5]),
    ],
)
def test_ticks(axis, low, high, ticks):
    assert ticks_of(axis, low, high) == pytest.approx(ticks)


def test_numbers():
    assert [scaled(v, "B/s") for v in (3.35e12, 999, 0, 2.5e-6)] == ["3.35 TB/s", "999 B/s", "0 B/s", "2.5 µB/s"]
    assert [plain(v) for v in (512, 8192, 32000)] == ["512", "8,192", "32,000"]
    assert [number(v) for v in (0.4567, 12345.6)] == ["0.457", "12,346"]
