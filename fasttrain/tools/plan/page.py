"""A plan as a page: one file, no network, with the memory through a step and the speed over numbers of GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fasttrain.gpus import prices_from
from fasttrain.tools.plan.advice import about_scaling, advice, scaling
from fasttrain.tools.plan.estimate import Band, Plan
from fasttrain.tools.plan.memory import PARTS, Moment
from fasttrain.tools.plan.screen import MEANINGS, PARTS_OF_A_STEP
from fasttrain.units import count, memory_size

COLOURS = dict(zip(PARTS, ("#4269d0", "#a463f2", "#6cc5b0", "#3ca951", "#efb118", "#ff725c", "#9c9c9c"), strict=True))
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 320, 64, 34, 14


def write_page(plan: Plan, path: Path, problems: Sequence[str] = ()) -> None:
    path.write_text(page(plan, problems), "utf-8")


def page(plan: Plan, problems: Sequence[str] = ()) -> str:
    """The HTML."""
    hardware = plan.hardware
    name = escape(plan.settings.out.name)
    where = "this machine's CPU" if plan.measured else f"{hardware.gpus} x {escape(hardware.gpu.name)}"
    # The CPU is one hardware: there is nothing to scale over, and no table to advise from
    rows = [] if plan.measured else scaling(plan)
    sentences = advice(plan)[:-1] if plan.fits and not plan.measured else []  # the last is below the chart
    sections = [
        f"<h1>{name} on {where}</h1>",
        *(f'<p class="problem">{escape(problem)}</p>' for problem in problems),
        *(f'<p class="warning">{escape(warning)}</p>' for warning in plan.warnings),
        _tiles(plan),
        f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in plan.sizes.lines())}</ul>",
        f"<h2>Memory of a GPU through a step</h2><p>{_about_memory(plan)}</p>",
        _memory_chart(plan),
        _legend(plan),
        f"<h2>Where the time of a step goes</h2>{_step_bar(plan)}",
    ]
    if rows:
        sections += [
            f"<h2>More GPUs, fewer GPUs</h2><p>{escape(about_scaling(plan, rows))}</p>",
            _scaling_chart(plan, rows),
        ]
    if sentences:
        sections.append(f"<h2>Advice</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in sentences)}</ul>")
    how = (
        "The speed was measured on this machine, op by op." if plan.measured else
        "Speed, days and cost are predicted, by a model that is fitted to published runs; the bands are the error that "
        "it has on runs that it was not fitted to."
    )  # fmt: skip
    price = f" Prices: {escape(prices_from())}." if plan.cost else ""
    sections.append(f"<footer>{how}{price}</footer>")
    template = Path(__file__).with_name("page.html").read_text("utf-8")
    return template.replace("@@name@@", name).replace("@@body@@", "\n".join(sections))


def _tiles(plan: Plan) -> str:
    days, cost, memory = plan.days, plan.cost, plan.memory_band
    gib = _range(Band(*(size / 2**30 for size in memory)), 1)
    tiles = [
        ("parameters", count(plan.sizes.parameters.total), f"{plan.sizes.parameters.total:,}"),
        ("tokens", count(plan.sizes.tokens), f"{plan.sizes.tokens_per_parameter:,.1f} per parameter"),
        ("memory of a GPU", memory_size(memory.value), f"{gib} of {memory_size(plan.hardware.memory)}"),
        ("tokens/s per GPU", f"{plan.rate.value:,.0f}", f"{_range(plan.rate, 0)}; MFU {plan.mfu.value:.1%}"),
        ("days", f"{days.value:,.3g}", f"{days.low:,.3g} to {days.high:,.3g}; {plan.gpu_hours.value:,.0f} GPU-hours"),
    ]
    if cost:
        tiles.append(("USD", f"{cost.value:,.0f}", f"{_range(cost, 0)} at {plan.hardware.price:g} an hour"))
    cells = "".join(
        f"<div><small>{escape(a)}</small><b>{escape(b)}</b><small>{escape(c)}</small></div>" for a, b, c in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _about_memory(plan: Plan) -> str:
    fits = "It fits." if plan.fits else "It does not fit."
    peak, limit = plan.memory.peak, memory_size(plan.hardware.memory)
    return f"The peak, {memory_size(peak.total)} of {limit}, is at: {peak.name}. {fits}"


def _memory_chart(plan: Plan) -> str:
    moments, limit = plan.memory.moments, plan.hardware.memory
    highest = max(plan.memory.bytes, min(limit, 1.6 * plan.memory.bytes)) * 1.05
    x = [LEFT + i * (WIDTH - LEFT - 12) / (len(moments) - 1) for i in range(len(moments))]

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / highest * (HEIGHT - BOTTOM - TOP)

    shapes = _grid([(y(v), memory_size(v)) for v in _ticks(highest)])
    below = [0.0] * len(moments)
    for part in PARTS:
        above = [b + m.parts[part] for b, m in zip(below, moments, strict=True)]
        there = " ".join(f"{a:.1f},{y(b):.1f}" for a, b in zip(x, above, strict=True))
        back = " ".join(f"{a:.1f},{y(b):.1f}" for a, b in reversed(list(zip(x, below, strict=True))))
        shapes += f'<polygon fill="{COLOURS[part]}" points="{there} {back}"/>'
        below = above
    if limit <= highest:
        shapes += f'<line class="limit" x1="{LEFT}" x2="{WIDTH - 12}" y1="{y(limit):.1f}" y2="{y(limit):.1f}"/>'
        shapes += f'<text class="limit" x="{LEFT + 6}" y="{y(limit) - 5:.1f}">{memory_size(limit)} of the GPU</text>'
    peak = moments.index(plan.memory.peak)
    shapes += f'<line class="peak" x1="{x[peak]:.1f}" x2="{x[peak]:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    for name, first, last in _phases(moments):
        middle = (x[first] + x[last]) / 2
        anchor = "end" if last == len(moments) - 1 else "middle"
        shapes += f'<text text-anchor="{anchor}" x="{middle:.1f}" y="{HEIGHT - 12}">{name}</text>'
    shapes += _hover([(a, _told(m)) for a, m in zip(x, moments, strict=True)])
    return _svg("memory", shapes)


def _phases(moments: Sequence[Moment]) -> list[tuple[str, int, int]]:
    """Groups of moments to write below the chart."""
    groups = []
    for word in ("forward", "backward of block", "optimizer"):
        inside = [i for i, moment in enumerate(moments) if moment.name.startswith(word)]
        if inside:
            groups.append((word.split()[0], inside[0], inside[-1]))
    return groups


def _told(moment: Moment) -> str:
    parts = "\n".join(f"{part}: {memory_size(size)}" for part, size in moment.parts.items() if size)
    return f"{moment.name}: {memory_size(moment.total)}\n{parts}"


def _legend(plan: Plan) -> str:
    peak = plan.memory.peak
    rows = "".join(
        f'<tr><td><i style="background:{COLOURS[part]}"></i>{part}</td><td class="number">{memory_size(size)}</td>'
        f'<td class="number">{size / peak.total:.0%}</td><td>{MEANINGS[part]}</td></tr>'
        for part, size in peak.parts.items()
    )
    return f"<table>{rows}</table>"


def _step_bar(plan: Plan) -> str:
    colours = ("#4269d0", "#3ca951", "#efb118", "#a463f2", "#6cc5b0", "#ff725c", "#9c9c9c")
    parts = [(p, s) for p, s in plan.speed.parts.items() if s > 0]
    bar, rows = "", ""
    for (part, seconds), colour in zip(parts, colours, strict=False):
        share = seconds / plan.speed.seconds
        bar += f'<span style="width:{share:.2%};background:{colour}"></span>'
        rows += (
            f'<tr><td><i style="background:{colour}"></i>{PARTS_OF_A_STEP[part]}</td>'
            f'<td class="number">{seconds:.3f} s</td><td class="number">{share:.1%}</td></tr>'
        )
    return f'<div class="bar">{bar}</div><table>{rows}</table>'


def _scaling_chart(plan: Plan, rows: Sequence[dict[str, float]]) -> str:
    """Tokens per second and GPU: what is lost to communication shows as a fall."""
    highest = max(max(row["fsdp"], row["hsdp"]) / row["gpus"] for row in rows) * 1.1

    def x(gpus: float) -> float:
        return LEFT + 12 + math.log2(gpus) / math.log2(rows[-1]["gpus"]) * (WIDTH - LEFT - 40)

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - rate / highest * (HEIGHT - BOTTOM - TOP)

    step = 10.0 ** math.floor(math.log10(highest))
    step *= next(f for f in (0.2, 0.5, 1.0) if highest / (f * step) <= 8)
    shapes = _grid([(y(step * n), f"{count(step * n)}/s") for n in range(int(highest / step) + 1)])
    first_small = next((i for i, row in enumerate(rows) if row["too_small"]), len(rows))
    for name, colour in (("fsdp", "#4269d0"), ("hsdp", "#ff725c")):
        places = [f"{x(row['gpus']):.1f},{y(row[name] / row['gpus']):.1f}" for row in rows]
        solid, dashed = places[:first_small], places[max(first_small - 1, 0) :]
        shapes += f'<polyline class="rate" stroke="{colour}" points="{" ".join(solid)}"/>'
        shapes += f'<polyline class="rate" stroke="{colour}" stroke-dasharray="5 5" points="{" ".join(dashed)}"/>'
        for row, place in zip(rows, places, strict=True):
            cx, cy = place.split(",")
            fill = colour if row[f"{name}_fits"] else "var(--paper)"
            shapes += f'<circle cx="{cx}" cy="{cy}" r="4" fill="{fill}" stroke="{colour}"/>'
    for row in rows:
        shapes += f'<text text-anchor="middle" x="{x(row["gpus"]):.1f}" y="{HEIGHT - 12}">{int(row["gpus"])}</text>'
    if plan.hardware.gpus in [row["gpus"] for row in rows]:
        at = x(plan.hardware.gpus)
        shapes += f'<line class="peak" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    shapes += _hover([(x(row["gpus"]), _told_of_scaling(row)) for row in rows])
    key = (
        '<p class="key"><i style="background:#4269d0"></i>FSDP <i style="background:#ff725c"></i>HSDP, a node each '
        '<i class="hollow"></i>does not fit; dashed: the batch grows with the GPUs</p>'
    )
    return _svg("scaling", shapes) + key


def _told_of_scaling(row: dict[str, float]) -> str:
    lines = [f"{int(row['gpus'])} GPUs"]
    for name in ("fsdp", "hsdp"):
        fits = "" if row[f"{name}_fits"] else ", does not fit"
        rate = row[name] / row["gpus"]
        size = memory_size(row[f"{name}_memory"])
        lines.append(f"{name.upper()}: {rate:,.0f} tokens/s per GPU, {count(row[name])} in all, {size}{fits}")
    return "\n".join(lines)


def _ticks(highest: float) -> list[float]:
    """Four to eight round numbers of GiB, or MiB."""
    unit = 2**30 if highest >= 2**30 else 2**20
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if highest / unit / s <= 8)
    return [unit * step * n for n in range(int(highest / unit / step) + 1)]


def _grid(ticks: Sequence[tuple[float, str]]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>'
        for y, text in ticks
    )


def _hover(places: Sequence[tuple[float, str]]) -> str:
    """Invisible columns that a pointer finds."""
    width = (WIDTH - LEFT) / max(len(places), 1)
    return "".join(
        f'<rect class="hover" x="{x - width / 2:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - BOTTOM - TOP}" '
        f"data-tip='{escape(json.dumps(text), quote=True)}'/>"
        for x, text in places
    )


def _svg(name: str, shapes: str) -> str:
    return f'<svg id="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{shapes}</svg>'


def _range(band: Band, digits: int) -> str:
    return f"{band.low:,.{digits}f} to {band.high:,.{digits}f}"
