"""Rules: ours against the baselines, and fresh rows against the stored ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import triton

from bench.static.prediction import BAND
from bench.static.survey import StaticRow
from bench.static.torch_ops import BLAS

STORED = Path(__file__).parents[1] / "results" / "static.json"
OURS = "fasttrain"
# One pass cannot be compared: gradients are computed in forward by some, in backward by others.
WHOLE = ("linear_cross_entropy",)
BYTES = ("bytes_issued", "bytes_memory", "bytes_lru", "bytes_unique")
# Where logits that are stored cost more bytes than logits that are computed again: few features to a token, so that a
# logit takes few FLOPs. There the bytes must pay: fewer FLOPs, fewer bytes issued, less time by all predictions.
TRADED = (("linear_cross_entropy", "8192x1024, V=151936"),)
MOST_MATMULS = 1.0  # executed by tensor cores, of those needed
_SIZEABLE = 0.05  # of the bytes of a pass: the width of kernels below does not matter
# What is exact. Predicted times follow from it, and from a model that may change.
EXACT = (
    *("launches", *BYTES, "bytes_limit", "flops", "special"),
    *("registers", "spills", "shared", "occupancy", "limiter", "width_bits", "matrix", "mma_ratio"),
)


def passes(rows: Iterable[StaticRow]) -> dict[tuple[str, ...], dict[str, list[StaticRow]]]:
    """(op, shape, target, pass) -> provider -> its rows."""
    found: dict[tuple[str, ...], dict[str, list[StaticRow]]] = {}
    for row in rows:
        direction = "whole" if row.op in WHOLE else row.direction
        key = (row.op, row.shape, row.target, direction)
        found.setdefault(key, {}).setdefault(row.provider, []).append(row)
    return found


def total(rows: Iterable[StaticRow], figure: str) -> int:
    return sum(getattr(row, figure) for row in rows)


def narrowest(rows: Sequence[StaticRow]) -> int:
    """The width of the narrowest kernel that moves a sizeable part of the bytes."""
    enough = _SIZEABLE * sum(row.bytes_issued for row in rows)
    return min((row.width_bits for row in rows if row.width_bits and row.bytes_issued >= enough), default=128)


def problems(rows: Sequence[StaticRow]) -> list[str]:
    """Return where ours spills, moves more bytes than a baseline, or moves them in narrower accesses."""
    found = [f"{_name(r)} {r.launch}: spills {r.spills} B per lane" for r in rows if r.provider == OURS and r.spills]
    found += [f"{_name(r)} {r.launch}: executes {r.mma_ratio} times its matmuls" for r in rows if _repeats(r)]
    for key, providers in passes(rows).items():
        ours = providers.pop(OURS, [])
        for provider, theirs in providers.items():
            if ours:
                found += [f"{' '.join(key)}: {text}" for text in _worse(provider, ours, theirs)]
    return found


def _repeats(row: StaticRow) -> bool:
    """Whether warps repeat the matmuls of others."""
    return row.mma_ratio is not None and row.mma_ratio > MOST_MATMULS


def _worse(provider: str, ours: Sequence[StaticRow], theirs: Sequence[StaticRow]) -> Iterable[str]:
    for figure in _compared(ours[0], theirs):
        mine, other = total(ours, figure), total(theirs, figure)
        if mine > other:
            yield f"{figure} {mine:,} and {provider}'s {other:,}, {mine / other - 1:+.2%}"
    if narrowest(ours) < narrowest(theirs):
        yield f"accesses of {narrowest(ours)} bits and {provider}'s of {narrowest(theirs)}"
    if _traded(ours[0], theirs):
        for i, case in enumerate(BAND):
            us, their_us = (sum(row.predicted_us[i] for row in rows) for rows in (ours, theirs))
            if us >= their_us:
                yield (
                    f"more bytes than {provider}, and {us:,.0f} us in the {case} case, not less than {their_us:,.0f}"
                )


def _traded(ours: StaticRow, theirs: Sequence[StaticRow]) -> bool:
    stores_logits = any(row.launch.startswith(BLAS) for row in theirs)
    return (ours.op, ours.shape) in TRADED and not stores_logits


def _compared(ours: StaticRow, theirs: Sequence[StaticRow]) -> Sequence[str]:
    """The figures that ours may not exceed."""
    if _traded(ours, theirs):
        return "bytes_issued", "flops"
    # Distinct bytes are counted by launch: one huge launch is credited with a cache that holds gigabytes, and the same
    # work in several launches with none. Where some have one launch and others many, only what passes a cache of
    # the card's size compares, however it replaces (docs/kernels/static.md).
    return BYTES[:-1] if ours.op in WHOLE else BYTES


def changes(fresh: Iterable[StaticRow], stored: Iterable[StaticRow]) -> list[str]:
    """Exact figures that are not the stored ones, and kernels that came or went."""
    fresh = list(fresh)
    before, found = {_key(row): row for row in stored}, []
    surveyed, now = {_key(row)[:-2] for row in fresh}, {_key(row) for row in fresh}
    for key, row in before.items():
        if key[:-2] in surveyed and key not in now:
            found.append(f"{_name(row)} {row.launch}: is stored, and not launched")
    for row in fresh:
        then = before.get(_key(row))
        if then is None:
            found.append(f"{_name(row)} {row.launch}: is not stored")
            continue
        for figure in EXACT:
            if getattr(row, figure) != getattr(then, figure):
                was, is_now = getattr(then, figure), getattr(row, figure)
                found.append(f"{_name(row)} {row.launch}: {figure} was {was} and is {is_now}")
    return found


def _name(row: StaticRow) -> str:
    return f"{row.op} {row.shape} {row.target} {row.direction} {row.provider}"


def _key(row: StaticRow) -> tuple[str, ...]:
    return row.provider, row.op, row.shape, row.dtype, row.target, row.direction, row.launch


# The file: a list of rows, one a line, each with the versions that it holds for


def read(path: Path = STORED) -> list[StaticRow]:
    plain = json.loads(path.read_text())
    return [StaticRow.of({k: v for k, v in row.items() if k not in ("triton", "version")}) for row in plain]


def stored_triton(path: Path = STORED) -> str:
    """The Triton that the stored rows of ours were compiled with: another one compiles differently."""
    return next(row["triton"] for row in json.loads(path.read_text()) if row["provider"] == OURS)


def plain(rows: Iterable[StaticRow], version: Callable[[str], str]) -> list[dict[str, Any]]:
    """Rows as they are stored, with the version of their provider."""
    return [row.plain() | {"version": version(row.provider), "triton": triton.__version__} for row in rows]


def write(rows: Sequence[dict[str, Any]], path: Path = STORED) -> None:
    """One row a line, sorted by op, target and provider, so that a diff shows what changed."""
    ordered = sorted(rows, key=lambda r: (r["op"], r["shape"], r["target"], r["provider"]))
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in ordered) + "\n]\n")


def grouped(rows: Sequence[StaticRow]) -> Iterable[tuple[tuple[str, str], list[StaticRow]]]:
    """Group rows by op and shape."""
    for key, same in groupby(rows, key=lambda row: (row.op, row.shape)):
        yield key, list(same)
