"""The measured tables of the README, between two marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench.report.content import EAGER, Kernel, Place
from bench.report.quantities import number, scaled

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
IMPLEMENTATIONS = ("fasttrain", "fasttrain, compiled", "compiled", "torch", "Liger", "cut-cross-entropy")


def markdown(places: Sequence[Place]) -> str:
    """Tables by hardware: the kernels at their largest size, and every ratio that has a limit."""
    if not places:
        return "Nothing has been measured yet: `make bench-save`."
    return "\n\n".join(part for place in places for part in _of_place(place))


def write(path: Path, text: str) -> bool:
    """Replace what is between the marks; False if it was the same."""
    before = path.read_text()
    if before.count(BEGIN) != 1 or before.count(END) != 1 or before.index(BEGIN) > before.index(END):
        raise ValueError(f"{path} needs one line {BEGIN} and, below it, one line {END}: the table goes between them")
    after = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{text}\n{END}", before, flags=re.S)
    path.write_text(after)
    return after != before


def _of_place(place: Place) -> list[str]:
    parts = []
    if rows := _kernel_rows(place):
        head = ["op, forward+backward", "size", "eager's time", *IMPLEMENTATIONS, "peak memory of `fasttrain`"]
        parts.append(_table([*head], rows))
    if rows := _limited_rows(place):
        parts.append(_table(["figure", "measured", "limit"], rows))
    return [f"On {place.name} ({place.runs[-1].label}):", *parts] if parts else []


def _kernel_rows(place: Place) -> list[list[str]]:
    """One row per op, with times as shares of eager's."""
    groups: dict[tuple[str, str], dict[str, dict[str, Kernel]]] = {}
    for one in place.kernels:
        if one.passes == "forward+backward":
            groups.setdefault((one.op, one.dtype), {}).setdefault(one.shape, {})[one.implementation] = one
    rows = []
    for (op, dtype), shapes in sorted(groups.items()):
        shape, found = max(shapes.items(), key=lambda item: max(k.bytes + k.flops for k in item[1].values()))
        if EAGER not in found:
            continue
        shares = [f"{found[name].figures['of eager']:.2f}" if name in found else "" for name in IMPLEMENTATIONS]
        ours, eager = (found[name].figures["peak"] if name in found else 0.0 for name in ("fasttrain", EAGER))
        peak = f"{ours / eager:.2f} of {scaled(eager, 'B')}" if ours and eager else ""
        rows.append([f"`{op}`", f"{shape} {dtype}", scaled(found[EAGER].figures["time"], "s"), *shares, peak])
    return rows


def _limited_rows(place: Place) -> list[list[str]]:
    rows = []
    for name, row in sorted(place.rows.items()):
        limit = [f"{sign} {row[key]:g}" for key, sign in (("at_most", "≤"), ("at_least", "≥")) if key in row]
        if row["kind"] == "ratio" and limit and "about" not in row:
            rows.append([name.replace("/", ": ", 1).replace("/", ", "), number(row["value"]), limit[0]])
    return rows


def _table(head: list[str], rows: list[list[str]]) -> str:
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]  # without empty columns
    lines = [[head[i] for i in used], ["---"] * len(used), *([row[i] for i in used] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
