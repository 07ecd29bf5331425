"""Plots as SVG, both axes by powers of ten or linear: points, lines, bars of uncertainty, and words on hover."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 300, 58, 14, 12, 40
COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#a463f2", "#d99a00", "#6cc5b0", "#9c6b4e", "#9498a0")
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: str
    line: bool = True
    hollow: bool = False  # predicted
    square: bool = False
    bars: Sequence[Point] = ()  # least and most y of each point
    words: Sequence[str] = ()  # of each point, on hover


@dataclass(frozen=True)
class Axis:
    label: str
    format: Callable[[float], str]  # of a number
    log: bool = True
    least: float | None = None
    most: float | None = None
    ticks: Sequence[float] = field(default=())


def chart(name: str, series: Sequence[Series], x: Axis, y: Axis, roof: Sequence[Point] = ()) -> str:
    """Draw one plot; `roof` is the line that nothing can exceed."""
    points = [p for s in series for p in s.points] + list(roof)
    ys = [b for s in series for bar in s.bars for b in bar] + [p[1] for p in points]
    to_x = _scale(x, [p[0] for p in points], LEFT, WIDTH - RIGHT)
    to_y = _scale(y, ys, HEIGHT - BOTTOM, TOP)
    shapes = [_grid(x, to_x, True), _grid(y, to_y, False)]
    if roof:
        shapes.append(f'<polyline class="roof" points="{_path(roof, to_x, to_y)}"/>')
    shapes += [_series(s, to_x, to_y) for s in series]
    shapes.append(f'<text text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">{escape(x.label)}</text>')
    shapes.append(f'<text x="4" y="{TOP - 9}">{escape(y.label)}</text>')
    return (
        f'<svg viewBox="0 {-16} {WIDTH} {HEIGHT + 16}" role="img" aria-label="{escape(name)}">'
        f"<title>{escape(name)}</title>{''.join(shapes)}</svg>"
    )


def legend(series: Sequence[Series]) -> str:
    seen = {(s.name, s.colour): s for s in series}
    marks = "".join(
        f'<span><i class="{"square" if s.square else ""}" style="{_mark(s)}"></i>{escape(s.name)}</span>'
        for s in seen.values()
    )
    return f'<p class="legend">{marks}</p>'


def _mark(s: Series) -> str:
    return f"border-color:{s.colour}" + ("" if s.hollow else f";background:{s.colour}")


def _scale(axis: Axis, values: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    low = min(values) if axis.least is None else axis.least
    high = max(values) if axis.most is None else axis.most
    if axis.log:
        a, b = math.log(low), math.log(high)
    else:
        a, b = min(low, 0.0), high
    pad = 0.05 * (b - a) or 0.5
    first, last = (a - pad if axis.log else a), b + pad

    def place(value: float) -> float:
        at = math.log(value) if axis.log else value
        return begin + (at - first) / (last - first) * (end - begin)

    place.bounds = (math.exp(first), math.exp(last)) if axis.log else (first, last)  # type: ignore[attr-defined]
    return place


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


def _grid(axis: Axis, to: Callable[[float], float], across: bool) -> str:
    shapes = ""
    for tick in ticks_of(axis, *to.bounds):  # type: ignore[attr-defined]
        at, label = to(tick), escape(axis.format(tick))
        if across:
            shapes += f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            shapes += f'<text text-anchor="middle" x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}">{label}</text>'
        else:
            shapes += f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            shapes += f'<text text-anchor="end" x="{LEFT - 5}" y="{at + 4:.1f}">{label}</text>'
    return shapes


def _series(s: Series, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    shapes = ""
    if s.line and len(s.points) > 1:
        shapes += f'<polyline class="line" stroke="{s.colour}" points="{_path(s.points, to_x, to_y)}"/>'
    for (x, _), (low, high) in zip(s.points, s.bars, strict=False):
        at = f"{to_x(x):.1f}"
        shapes += f'<line stroke="{s.colour}" x1="{at}" x2="{at}" y1="{to_y(low):.1f}" y2="{to_y(high):.1f}"/>'
    for number, (x, y) in enumerate(s.points):
        shapes += _point(s, to_x(x), to_y(y), s.words[number] if s.words else s.name)
    return shapes


def _point(s: Series, x: float, y: float, words: str) -> str:
    fill = "var(--paper)" if s.hollow else s.colour
    inside = f'fill="{fill}" stroke="{s.colour}" stroke-width="1.5"><title>{escape(words)}</title>'
    if s.square:
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {inside}</rect>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {inside}</circle>'


def _path(points: Sequence[Point], to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    return " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)
