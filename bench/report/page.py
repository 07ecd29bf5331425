"""The stored figures as a page: one file, no network, no scripts; hover over a mark for its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from bench.report.content import EAGER, OURS, Kernel, Place, Predicted, PredictedTarget, Roof
from bench.report.quantities import number, plain, scaled
from fasttrain.tools import webpage
from fasttrain.tools.webpage import COLOURS, Axis, Series, chart, legend, table

IMPLEMENTATIONS = {
    name: COLOURS[i]
    for i, name in enumerate(
        (OURS, "fasttrain, compiled", EAGER, "compiled", "torch", "Liger", "cut-cross-entropy", "other")
    )
}
OPS = (
    *("rms_norm", "add_rms_norm", "qk_norm_rope", "swiglu", "attention"),
    *("linear_cross_entropy", "cross_entropy_rows", "linear"),
)
OP_COLOURS = dict(zip(OPS, COLOURS, strict=False))
VARYING = ("M", "T", "V")


_PREDICTED = (
    "Not measured: computed from the bytes, FLOPs and instructions of the compiled kernels (python -m bench.static). A "
    "bar spans the predicted range."
)


def page(places: Sequence[Place], targets: Sequence[PredictedTarget]) -> str:
    """The HTML."""
    sections = ["<h1>fasttrain: benchmarks</h1>", _about(places, targets)]
    for place in places:
        newest = place.runs[-1]
        shown = [_measured_roofline(place), _times(place), _memory(place), _gates(place), _history(place)]
        if any(shown):
            about = f"Newest: {escape(newest.label)}. {_clocks(newest.sensors)}"
            sections += [f"<h2>{escape(place.name)}</h2><p>{about}</p>", *shown]
    if targets:
        sections.append(f"<h2>Predicted for GPUs</h2><p>{_PREDICTED}</p>")
        sections.append(_cards(_predicted_roofline(target) for target in targets))
        sections.append(legend(_op_legend(targets)))
    return webpage.page("fasttrain: benchmarks", sections, width=1320)


def _about(places: Sequence[Place], targets: Sequence[PredictedTarget]) -> str:
    if not places and not targets:
        return "<p>Nothing has been measured yet: make bench-save.</p>"
    measured = [place for place in places if place.hardware["gpu"]]
    gpus = "" if measured else " No GPU has been measured yet: figures for GPUs below are predicted, and marked."
    return (
        "<p>Filled marks are measured, hollow ones predicted; round ones are fasttrain's. Times are medians; only "
        f"implementations of one run are compared with each other, and runs with others on the same hardware.{gpus}</p>"
    )


def _clocks(sensors: dict[str, float]) -> str:
    return escape("At its end: " + ", ".join(f"{k} {v:g}" for k, v in sensors.items()) + ".") if sensors else ""


def _roofline(title: str, series: list[Series], roof: Roof) -> str:
    xs = [x for s in series for x, _ in s.points]
    knee = roof.flops / roof.bandwidth
    low, high = min([*xs, knee]) / 2, max([*xs, knee]) * 4
    limit = Series("", [(low, low * roof.bandwidth), (knee, roof.flops), (high, roof.flops)], "var(--ink)", draw="line")
    x = Axis("FLOP per byte", lambda v: f"{v:g}")
    y = Axis("FLOP/s", lambda v: scaled(v, ""))
    caption = f"{scaled(roof.bandwidth, 'B/s')}, {scaled(roof.flops, 'FLOP/s')}"
    return f"<h3>{escape(title)}</h3><small>{caption}</small>{chart(title, [limit, *series], x, y)}"


def _measured_roofline(place: Place) -> str:
    cards = []
    for dtype, roof in place.roof.items():
        kernels = [k for k in place.kernels if k.dtype == dtype and k.flops and k.figures.get("time")]
        best = [k for k in kernels if k.implementation.startswith(OURS)]
        series = [
            Series(op, [(k.flops / k.bytes, k.flops / k.figures["time"]) for k in of], OP_COLOURS[op], draw="marks",
                   words=[_label(k) for k in of])
            for op in OPS if (of := [k for k in best if k.op == op])
        ]  # fmt: skip
        if series:
            cards.append(_roofline(f"Roofline, {dtype}", series, roof) + legend(series))
    return _cards(cards)


def _predicted_roofline(target: PredictedTarget) -> str:
    series = []
    for op in OPS:
        for ours in (True, False):
            of = [p for p in target.points if p.op == op and (p.provider == OURS) is ours and p.flops]
            if of:
                series.append(_predicted_series(op, of, ours))
    return _roofline(f"{target.name}, bf16: predicted", series, target.roof)


def _predicted_series(op: str, of: Sequence[Predicted], ours: bool) -> Series:
    return Series(
        op,
        [(p.flops / p.bytes, p.flops / p.seconds[1]) for p in of],
        OP_COLOURS[op],
        draw="marks",
        hollow=True,
        square=not ours,
        bars=[(p.flops / p.seconds[2], p.flops / p.seconds[0]) for p in of],
        words=[f"{p.op} {p.passes}, {p.provider}, {p.shape}: {scaled(p.seconds[1], 's')} predicted" for p in of],
    )


def _op_legend(targets: Sequence[PredictedTarget]) -> list[Series]:
    predicted = {point.op for target in targets for point in target.points}
    marks = [Series(op, (), colour, hollow=True) for op, colour in OP_COLOURS.items() if op in predicted]
    return [*marks, Series("square: other libraries", (), "var(--soft)", hollow=True, square=True)]


def _times(place: Place) -> str:
    """One plot for each op and pass that was measured at several sizes."""
    cards, groups = [], {}  # type: ignore[var-annotated]
    for k in place.kernels:
        if "time" in k.figures:
            rest = tuple((letter, n) for letter, n in k.size.items() if letter != _letter(place, k))
            groups.setdefault((k.op, k.passes, k.dtype, _letter(place, k), rest), []).append(k)
    for (op, passes, dtype, letter, rest), kernels in groups.items():
        series = _by_implementation(kernels, letter)
        if max(len(s.points) for s in series) > 1:
            title = f"{op}, {passes}, {dtype}"
            sizes = sorted({k.size[letter] for k in kernels})
            x = Axis(f"{letter} ({' '.join(f'{a}{n}' for a, n in rest)})", plain, ticks=sizes)
            plot = chart(title, series, x, Axis("seconds", lambda v: scaled(v, "s")))
            cards.append(f"<h3>{escape(title)}</h3>{plot}{legend(series)}")
    return f"<h3>Time against size</h3>{_cards(cards)}" if cards else ""


def _letter(place: Place, kernel: Kernel) -> str:
    """The letter that varies between the sizes of an op."""
    others = [k.size for k in place.kernels if (k.op, k.passes) == (kernel.op, kernel.passes)]
    return max(VARYING, key=lambda letter: len({size.get(letter) for size in others}))


def _by_implementation(kernels: Sequence[Kernel], letter: str) -> list[Series]:
    found: dict[str, list[Kernel]] = {}
    order = list(IMPLEMENTATIONS)
    for k in sorted(
        kernels, key=lambda k: (order.index(k.implementation) if k.implementation in order else 99, k.size[letter])
    ):
        found.setdefault(k.implementation, []).append(k)
    return [
        Series(name, [(k.size[letter], k.figures["time"]) for k in of], _colour(name), square=not name.startswith(OURS),
               words=[_label(k) for k in of])
        for name, of in found.items()
    ]  # fmt: skip


def _label(k: Kernel) -> str:
    f = k.figures
    return (
        f"{k.implementation}: {k.op} {k.passes}, {k.shape} {k.dtype}: {scaled(f['time'], 's')}, "
        f"{f['of eager']:.2f} of eager, {f['of the limit']:.0%} of the limit, peak {scaled(f['peak'], 'B')}"
    )


def _memory(place: Place) -> str:
    found = place.memory_over_vocabulary()
    if not found:
        return ""
    series = [
        Series(name, points, _colour(name), square=name != OURS,
               words=[f"{name}, vocabulary {v:,.0f}: {scaled(b, 'B')}" for v, b in points])
        for name, points in found.items()
    ]  # fmt: skip
    sizes = sorted({v for points in found.values() for v, _ in points})
    x, y = Axis("vocabulary", plain, ticks=sizes), Axis("peak bytes", lambda v: scaled(v, "B"))
    title = "Memory against vocabulary: linear_cross_entropy"
    return _cards([f"<h3>{title}</h3>{chart(title, series, x, y)}{legend(series)}"])


def _gates(place: Place) -> str:
    """Ratios with a limit, as a table."""
    rows = []
    for name, row in sorted(place.rows.items()):
        limit = [f"{sign} {row[key]:g}" for key, sign in (("at_most", "≤"), ("at_least", "≥")) if key in row]
        if limit and row["kind"] == "ratio":
            rows.append((escape(name), number(row["value"]), limit[0]))
    shown = table(rows, ("figure", "measured", "limit"))
    return f"<details><summary>Ratios with a limit</summary>{shown}</details>" if rows else ""


def _history(place: Place) -> str:
    """Gating ratios over the runs of this hardware, where there are several."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for number_, run in enumerate(place.runs):
        for name, row in run.rows.items():
            if row["kind"] == "ratio" and "margin" in row:
                lines.setdefault(name, []).append((number_ + 1, row["value"], run.label))
    cards = []
    for name, found in sorted(lines.items()):
        if len(found) > 1:
            words = [f"{label}: {value:.3f}" for _, value, label in found]
            series = [Series(name, [(x, y) for x, y, _ in found], COLOURS[0], words=words)]
            runs = Axis("run", lambda v: f"{v:g}", log=False, ticks=[x for x, _, _ in found])
            cards.append(f"<h3>{escape(name)}</h3>{chart(name, series, runs, Axis('', lambda v: f'{v:g}', log=False))}")
    return f"<details><summary>History</summary>{_cards(cards)}</details>" if cards else ""


def _colour(implementation: str) -> str:
    return IMPLEMENTATIONS.get(implementation, IMPLEMENTATIONS["other"])


def _cards(cards: Iterable[str]) -> str:
    inside = "".join(f"<section>{card}</section>" for card in cards)
    return f'<div class="cards">{inside}</div>' if inside else ""
