"""The main curves as a picture, for a document or a message: the page's figures, without its interaction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fasttrain.events import Event, Severity
from fasttrain.fs import whole_file
from fasttrain.tools.report.columns import Buckets, bucket_starts, bucketed
from fasttrain.tools.report.record import RunRecord

try:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
except ImportError as error:
    raise ImportError("a picture needs matplotlib: pip install 'fasttrain[plot]'") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6bb3", "#cf5c0a", "#0c8562", "#a6508f", "#a87b00", "#2b96c4", "#6b6f76", "#8a4b2d")
# Information is not drawn
LEVELS = {Severity.ERROR: "#c4232d", Severity.ACTION: "#6b46b3", Severity.WARNING: "#b06f00"}
PARTS = {
    **{"data": "#e69f00", "wait": "#d9c93a", "forward": "#56b4e9"},
    **{"backward": "#0072b2", "optimizer": "#009e73", "step": "#0072b2", "record": "#9aa1aa"},
}
OTHER = "#a6508f"
SUFFIXES = (".png", ".svg")
POINTS = 2000


class Panel(NamedTuple):
    name: str  # of the column
    title: str
    factor: float = 1.0
    log: bool = False
    zero: bool = False  # the scale begins there


PANELS = (
    Panel("loss", "Loss (nats per token)"),
    Panel("lr", "Learning rate", zero=True),
    Panel("grad_norm", "Gradient norm, before clipping", log=True),
    Panel("tokens_per_second", "Tokens per second", zero=True),
    Panel("mfu", "MFU (%)", factor=100, zero=True),
    Panel("memory", "Memory, peak so far (GB)", factor=1e-9, zero=True),
)


def draw(records: Sequence[RunRecord], path: Path) -> list[Path]:
    """All panels in one file; or in a directory, each in its own. What was written."""
    panels = {panel.name: partial(_panel, records=records, panel=panel) for panel in PANELS}
    panels["step_time"] = partial(_step_time, record=records[0])
    if path.suffix in SUFFIXES:
        figure = Figure(figsize=(12, 10), layout="constrained")
        axes = figure.subplot_mosaic("AA;BC;DE;FG", height_ratios=(1.4, 1, 1, 1))
        for draw_panel, ax in zip(panels.values(), axes.values(), strict=True):
            draw_panel(ax)
        figure.suptitle(", ".join(record.name for record in records))
        with whole_file(path) as made:
            figure.savefig(made, dpi=120)
        return [path]
    if path.suffix:
        raise ValueError(f"--png {path}: a picture is {' or '.join(SUFFIXES)}, or name a directory")
    path.mkdir(parents=True, exist_ok=True)
    for name, draw_panel in panels.items():
        figure = Figure(figsize=(10, 5), layout="constrained")
        draw_panel(figure.subplots())
        with whole_file(path / f"{name}.png") as made:
            figure.savefig(made, dpi=120)
    return [path / f"{name}.png" for name in panels]


def _panel(ax: Axes, records: Sequence[RunRecord], panel: Panel) -> None:
    for record, colour in zip(records, cycle(COLOURS), strict=False):
        x, (mean, low, high) = _curve(record, panel.name)
        ax.fill_between(x, low * panel.factor, high * panel.factor, color=colour, alpha=0.2, lw=0)
        ax.plot(x, mean * panel.factor, color=colour, lw=1.2, label=record.name if len(records) > 1 else "training")
        if panel.name == "loss":
            _validations(ax, record, () if len(records) > 1 else COLOURS[1:], colour)
            for gone in record.columns.taken_back:
                ax.plot(gone["step"], gone["loss"], color=colour, lw=0.8, ls=":", alpha=0.8)
    if panel.log and any((record.columns[panel.name] > 0).any() for record in records):
        ax.set_yscale("log")
        for axis_formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")
    if panel.zero:
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    _finish(ax, records, panel.title, labels=panel.name == "loss")


def _step_time(ax: Axes, record: RunRecord) -> None:
    """Stacked phases of one run: those of several would hide each other."""
    parts = [name.removeprefix("time/") for name in record.columns.names if name.startswith("time/")]
    parts = [part for part in parts if part not in ("validation", "checkpoint")]
    if parts:
        curves = [_curve(record, f"time/{part}") for part in parts]
        stack = [np.nan_to_num(buckets.mean) * 1e3 for _, buckets in curves]
        colours = [PARTS.get(part, OTHER) for part in parts]
        ax.stackplot(curves[0][0], *stack, labels=parts, colors=colours, alpha=0.9, lw=0)
        ax.set_ylim(0, float(np.quantile(np.sum(stack, axis=0), 0.98)) * 1.25)
        ax.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")
    _finish(ax, [record], f"Step time of {record.name} (ms)", labels=False)


def _curve(record: RunRecord, name: str) -> tuple[np.ndarray, Buckets]:
    starts = bucket_starts(len(record.columns), POINTS)
    ends = np.append(starts[1:], len(record.columns)) - 1
    return record.columns["step"][ends], bucketed(record.columns[name], starts)


def _validations(ax: Axes, record: RunRecord, colours: Sequence[str], colour: str) -> None:
    """colours: of the sets; none: all of them have the run's."""
    for place, (name, lines) in enumerate(record.validations.items()):
        losses = np.array([line["loss"] for line in lines], dtype=float)
        shade = colours[place % len(colours)] if colours else colour
        steps, label = [line["step"] for line in lines], f"validation: {name}"
        ax.plot(steps, losses, "o-", color=shade, mfc="white", ms=4, lw=1, label=label)


def _finish(ax: Axes, records: Sequence[RunRecord], title: str, *, labels: bool) -> None:
    ax.set_title(title, loc="left", fontsize=10)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    if labels:
        ax.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2)
    for step, events in _by_place(records).items():
        first = min(events, key=lambda event: list(LEVELS).index(event.severity))
        ax.axvline(step, color=LEVELS[first.severity], lw=0.8, alpha=0.6)
        if labels:
            kinds = ", ".join(dict.fromkeys(event.kind for event in events))
            ax.annotate(
                kinds, (step, 1), xycoords=("data", "axes fraction"), xytext=(3, -2), textcoords="offset points",
                rotation=90, va="top", fontsize=8, color=LEVELS[first.severity],
            )  # fmt: skip


def _by_place(records: Sequence[RunRecord]) -> dict[int, list[Event]]:
    """Those that would be drawn upon each other are together."""
    found = [event for record in records for event in record.events if event.severity in LEVELS]
    near = max(record.columns["step"][-1] for record in records) / 80
    places: dict[int, list[Event]] = {}
    for event in sorted(found, key=lambda event: event.step):
        last = next(reversed(places), None)
        place = event.step if last is None or event.step - last > near else last
        places.setdefault(place, []).append(event)
    return places
