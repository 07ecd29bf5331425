"""A dataset at a glance: how long documents are, how often tokens occur, and what changes along the stream."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fasttrain.data.lint.findings import LintReport, Profile
from fasttrain.fs import whole_file

try:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
except ImportError as error:
    raise ImportError("a plot needs matplotlib: pip install 'fasttrain[plot]'") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"train": "#1f5fa8", "validation": "#d1741f"}
RED, OTHER = "#c0262d", "#3a8f5c"
PARTS = {  # of what is repeated: the label, and the colour
    "loops": ("tokens in loops", RED),
    "copies": ("documents that are copies", "#7a4fa3"),
    "repeated text": ("spans seen before", COLOURS["train"]),
}
PER_PART = 8  # documents to a point of a line along the stream


def draw(report: LintReport, path: Path) -> None:
    """Four panels; the ending of the name decides about the format."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    errors, warnings = len(report.having("error")), len(report.having("warning"))
    what = "samples of " if report.quick else ""
    read = f"{what}{Path(report.dataset).name}: {sum(report.read.values()):,} tokens"
    figure.suptitle(f"{read}; errors: {errors}, warnings: {warnings}", color=RED if errors else "black")
    for axes, panel in zip(figure.subplots(2, 2).flat, (_lengths, _ranks, _separators, _repetition), strict=True):
        panel(axes, report)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=120)


def _lengths(axes: Axes, report: LintReport) -> None:
    for name, profile in report.profiles.items():
        if not profile.lengths.sum():
            continue
        edges, counts = _coarser(profile)
        used, colour = int(np.flatnonzero(counts)[0]), COLOURS.get(name, OTHER)
        axes.stairs(counts[used:], edges[used:], color=colour, label=f"{name}: {counts.sum():,} documents", fill=False)
        middle = int(np.searchsorted(np.cumsum(profile.lengths), profile.lengths.sum() / 2))
        axes.axvline(profile.length_edges[middle], color=colour, lw=0.8, ls=":")
    axes.set(xscale="log", yscale="log", title="Document lengths", ylabel="documents")
    axes.set_xlabel("tokens of a document (dotted: half are shorter)")


def _coarser(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """Four classes to an octave: fewer than were counted, for a line without teeth."""
    wanted = 2 ** (np.arange(0, 48 * 4) / 4)
    first = np.unique(np.searchsorted(profile.length_edges[:-1], wanted[wanted <= profile.length_edges[-1]]))
    first = first[first < len(profile.lengths)]
    return np.append(profile.length_edges[first], profile.length_edges[-1]), np.add.reduceat(profile.lengths, first)


def _ranks(axes: Axes, report: LintReport) -> None:
    """A straight line is what text has; a step is padding, or a token that should not be there."""
    for name, profile in report.profiles.items():
        counts = np.sort(profile.histogram[profile.histogram > 0])[::-1]
        if not len(counts):
            continue
        rank = np.arange(1, len(counts) + 1)
        label = f"{name}: {len(counts):,} of {len(profile.histogram):,} ids used"
        axes.plot(rank, counts / counts.sum(), color=COLOURS.get(name, OTHER), label=label)
    size = max(len(profile.histogram) for profile in report.profiles.values())
    rank = np.arange(1, size + 1)
    axes.plot(rank, 1 / rank / (1 / rank).sum(), color="#999999", lw=0.8, ls="--", label="Zipf's law: 1 / rank")
    axes.set(xscale="log", yscale="log", title="Tokens by rank", xlabel="rank of the id", ylabel="share of all tokens")


def _separators(axes: Axes, report: LintReport) -> None:
    for name, profile in report.profiles.items():
        _along(axes, profile, "separators", COLOURS.get(name, OTHER), f"{name}: separators")
        if np.nansum(profile.along["doubled separators"]):
            _along(axes, profile, "doubled separators", RED, f"{name}: doubled")
    axes.set(title="Separators along the stream", xlabel="position in the split (%)", ylabel="per million tokens")
    axes.set_ylim(bottom=0)


def _repetition(axes: Axes, report: LintReport) -> None:
    """Show the training data: held-out documents are few."""
    name = "train" if "train" in report.profiles else next(iter(report.profiles))
    profile = report.profiles[name]
    for key, (label, colour) in PARTS.items():
        if key in profile.along:
            _along(axes, profile, key, colour, label, scale=100)
    axes.set(title=f"Repetition along the stream: {name}", xlabel="position in the split (%)", ylabel="share (%)")
    axes.set_ylim(0, max(1, axes.get_ylim()[1]))


def _along(axes: Axes, profile: Profile, key: str, colour: str, label: str, *, scale: float = 1) -> None:
    """Draw a line of as many parts as there are documents for: with a few in each, all would be noise."""
    values, documents = profile.along[key] * scale, int(profile.lengths.sum())
    parts = next((n for n in (200, 100, 50, 20, 10) if n * PER_PART <= documents and n <= len(values)), 5)
    groups = values.reshape(parts, -1)
    read = np.isfinite(groups).any(1)
    places = (np.arange(parts) + 0.5) / parts * 100
    axes.plot(places[read], np.nanmean(groups[read], 1), color=colour, lw=1.2, label=label, marker=".", ms=4)
    axes.set_xlim(0, 100)
