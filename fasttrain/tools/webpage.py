"""Pages of figures: one HTML file each, no network, no scripts; hover over a mark for its numbers. Plots are SVG, with
axes by powers of ten or linear.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import repeat
from pathlib import Path
from string import Template
from typing import Literal

COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#a463f2", "#d99a00", "#6cc5b0", "#9c6b4e", "#9498a0")
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40  # of a plot, around its axes
Point = tuple[float, float]


def page(title: str, sections: Iterable[str], *, width: int) -> str:
    """The HTML of a page."""
    template = Template(Path(__file__).with_name("webpage.html").read_text("utf-8"))
    return template.substitute(title=escape(title), body="\n".join(sections), width=width)


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Cells are HTML; the second and the third of a row are figures."""
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
    titles = "".join(f"<th>{title}</th>" for title in head)
    return f'<div class="scroll"><table><tr>{titles}</tr>{"".join(lines)}</table></div>'


def mark(colour: str, *, hollow: bool = False, square: bool = False) -> str:
    """The sign of a series in a legend."""
    fill = "" if hollow else f";background:{colour}"
    return f'<i class="{"square" * square}" style="border-color:{colour}{fill}"></i>'


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: str
    draw: Literal["line+marks", "marks", "line", "dashes", "area"] = "line+marks"  # line: named where it begins
    hollow: bool = False
    square: bool = False
    bars: Sequence[Point] = ()  # least and most y of each point
    words: Sequence[str] = ()  # of each point, on hover


@dataclass(frozen=True)
class Axis:
    label: str
    format: Callable[[float], str]  # of a number
    log: bool = True
    ticks: Sequence[float] = ()
    pad: float = 0.05  # share of the range to add to it


def legend(series: Iterable[Series]) -> str:
    marks = (
        f"<span>{mark(s.colour, hollow=s.hollow, square=s.square)}{escape(s.name)}</span>"
        for s in {(s.name, s.colour): s for s in series}.values()
    )
    return f'<p class="legend">{"".join(marks)}</p>'


def chart(
    name: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    width: int = 440,
    height: int = 300,
    here: float | None = None,  # an x to mark
    columns: Sequence[tuple[float, str]] = (),  # x, and words for whoever points anywhere above it
) -> str:
    """Draw one plot."""
    to_x = _Scale(x, [p[0] for s in series for p in s.points], LEFT, width - RIGHT)
    heights = [v for s in series for v in (*(p[1] for p in s.points), *(v for bar in s.bars for v in bar))]
    to_y = _Scale(y, heights, height - BOTTOM, TOP)
    shapes = _text('text-anchor="end"', width - RIGHT, height - 6, x.label) + _text("", 4, TOP - 9, y.label)
    for tick in to_x.ticks():
        at = to_x(tick)
        shapes += _line('class="grid"', (at, to_y.begin), (at, TOP))
        shapes += _text('text-anchor="middle"', at, to_y.begin + 15, x.format(tick))
    for tick in to_y.ticks():
        at = to_y(tick)
        shapes += _line('class="grid"', (LEFT, at), (to_x.end, at))
        shapes += _text('text-anchor="end"', LEFT - 5, at + 4, y.format(tick))
    shapes += "".join(_series(s, to_x, to_y) for s in series)
    if here is not None:
        shapes += _line('class="here"', (to_x(here), to_y.begin), (to_x(here), TOP))
    wide = (to_x.end - LEFT) / max(len(columns), 1)
    for place, words in columns:
        shapes += (
            f'<rect class="hover" x="{to_x(place) - wide / 2:.1f}" y="{TOP}" width="{wide:.1f}" '
            f'height="{to_y.begin - TOP}"><title>{escape(words)}</title></rect>'
        )
    return (
        f'<svg viewBox="0 -16 {width} {height + 16}" role="img" aria-label="{escape(name)}">'
        f"<title>{escape(name)}</title>{shapes}</svg>"
    )


class _Scale:
    """From the numbers of an axis to places on the page."""

    def __init__(self, axis: Axis, values: Iterable[float], begin: float, end: float) -> None:
        self.axis, self.begin, self.end = axis, begin, end
        at = sorted(map(math.log, values) if axis.log else (0.0, *values))
        pad = axis.pad * ((at[-1] - at[0]) or 10)
        self._first, self._last = (at[0] - pad if axis.log else at[0]), at[-1] + pad

    def __call__(self, value: float) -> float:
        at = math.log(value) if self.axis.log else value
        return self.begin + (at - self._first) / (self._last - self._first) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        bounds = self._first, self._last
        return ticks_of(self.axis, *(map(math.exp, bounds) if self.axis.log else bounds))


def ticks_of(axis: Axis, low: float, high: float) -> list[float]:
    """Powers of ten and, where space allows, values between them; or round steps."""
    if axis.ticks:
        return [t for t in axis.ticks if low <= t <= high]
    if not axis.log:
        step = 10.0 ** math.floor(math.log10(high))
        step *= next(f for f in (0.1, 0.2, 0.5, 1.0, 2.0) if high / (f * step) <= 7)
        return [step * n for n in range(int(high / step) + 1)]
    decades = math.log10(high / low)
    every = max(1, round(decades / 5))
    inside = (1,) if decades > 3 else (1, 3) if decades > 1.4 else (1, 2, 5)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**p for p in powers if p % every == 0 for m in inside if low <= m * 10.0**p <= high]


def _series(s: Series, to_x: _Scale, to_y: _Scale) -> str:
    places = [(to_x(x), to_y(y)) for x, y in s.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    if s.draw == "area":
        return f'<polygon fill="{s.colour}" points="{path}"/>'
    shapes = ""
    if s.draw != "marks" and len(places) > 1:
        dashes = ' stroke-dasharray="5 5"' if s.draw == "dashes" else ""
        shapes += f'<polyline class="line" stroke="{s.colour}"{dashes} points="{path}"/>'
    if s.draw == "line":
        shapes += _text(f'style="fill:{s.colour}"', places[0][0] + 6, places[0][1] - 5, s.name)
    for (x, _), (low, high) in zip(places, s.bars, strict=False):
        shapes += _line(f'stroke="{s.colour}"', (x, to_y(low)), (x, to_y(high)))
    if s.draw.endswith("marks"):
        shapes += "".join(
            _mark(s, x, y, words) for (x, y), words in zip(places, s.words or repeat(s.name), strict=False)
        )
    return shapes


def _mark(s: Series, x: float, y: float, words: str) -> str:
    fill = "var(--paper)" if s.hollow else s.colour
    inside = f'fill="{fill}" stroke="{s.colour}" stroke-width="1.5"><title>{escape(words)}</title>'
    if s.square:
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {inside}</rect>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {inside}</circle>'


def _line(attributes: str, begin: Point, end: Point) -> str:
    return f'<line {attributes} x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'


def _text(attributes: str, x: float, y: float, text: str) -> str:
    return f'<text {attributes} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
