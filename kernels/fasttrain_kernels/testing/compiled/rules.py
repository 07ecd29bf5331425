"""Rules that a shipped kernel must satisfy on every target, and regressions against stored figures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import triton

from fasttrain_kernels.testing.compiled.metadata import KernelMetadata
from fasttrain_kernels.testing.compiled.survey import Row

REGISTER_MARGIN = 8  # the hardware allocates registers in units of eight

# Kernels of these ops move their tensors in 128-bit accesses; attention is bound by its matmuls.
STREAMING = ("rms_norm", "add_rms_norm", "qk_norm_rope", "swiglu", "linear_cross_entropy")
# Of the global bytes of a kernel, counted by instructions. If one of five bulk tensors moves in narrow accesses, it is
# 0.8; what is below 1 otherwise are tables that all rows share.
WIDE_SHARE = 0.9

# Deliberate exceptions with their reason, by kernel and case. They still may not get worse than their stored figures.
ALLOWED_SPILLS: dict[tuple[str, str], str] = {
    ("_rms_norm_bwd_kernel", "bf16 N=16384"): "x, dout, weight and dweight of one row fill the registers of an SM",
}


def problems(row: Row) -> list[str]:
    """Return the rules that a kernel breaks."""
    if row.metadata is None:
        return [row.error]
    kernel, found = row.metadata, []
    if kernel.spills and (kernel.kernel, row.case) not in ALLOWED_SPILLS:
        found.append(
            f"spills {kernel.spill_stores} B and reloads {kernel.spill_loads} B per lane, "
            f"{kernel.loop_spills} B in loops"
        )
    if not kernel.fits:
        found.append(
            f"does not fit: {kernel.shared:,} B of shared memory (limit {kernel.limits.shared_per_block:,}), "
            f"{kernel.tensor_memory} columns of tensor memory, {kernel.num_warps} warps"
        )
    narrow = kernel.narrow_bulk and kernel.wide_share < WIDE_SHARE
    if row.op in STREAMING and narrow:
        found.append(
            f"moves only {kernel.wide_share:.0%} of its global bytes in 128-bit accesses (loads {kernel.loads}, copies "
            f"{kernel.copies}, stores {kernel.stores})"
        )
    if kernel.dots and row.case.startswith(("bf16", "fp16")) and not kernel.matrix:
        found.append("has a matmul without tensor cores")
    if kernel.unfenced:
        found.append(f"has {kernel.unfenced} matmuls that may read what cp.async delivered without fence.proxy.async")
    return found


def regressions(row: Row, stored: KernelMetadata) -> list[str]:
    """Return where a kernel is worse than its stored figures."""
    assert row.metadata is not None
    now, found = row.metadata, []

    def worse(what: str, then: object, is_now: object) -> None:
        found.append(f"{what} was {then} and is {is_now}")

    if now.registers > stored.registers + REGISTER_MARGIN:
        worse("registers", stored.registers, now.registers)
    if now.spill_stores + now.spill_loads > stored.spill_stores + stored.spill_loads:
        worse("spilled bytes", stored.spill_stores + stored.spill_loads, now.spill_stores + now.spill_loads)
    if now.shared > stored.shared:
        worse("shared memory", stored.shared, now.shared)
    if now.occupancy.warps < stored.occupancy.warps:
        worse("resident warps", stored.occupancy.warps, now.occupancy.warps)
    if now.wide_share < stored.wide_share - 0.005:
        worse("share of 128-bit accesses", f"{stored.wide_share:.0%}", f"{now.wide_share:.0%}")
    if stored.matrix and set(now.matrix) != set(stored.matrix):
        worse("matrix instructions", sorted(stored.matrix), sorted(now.matrix))
    return found


# Stored figures

Figures = dict[str, dict[str, dict[str, dict[str, Any]]]]  # target -> op -> key -> metadata


def figures(rows: Iterable[Row]) -> Figures:
    """Rows as nested plain data; entries that are zero or empty are dropped."""
    found: Figures = {}
    for row in rows:
        if row.metadata is not None:
            metadata = {k: v for k, v in asdict(row.metadata).items() if v and k not in ("kernel", "target")}
            found.setdefault(row.target, {}).setdefault(row.op, {})[row.key] = metadata
    return found


def stored_metadata(row: Row, stored: Figures) -> KernelMetadata | None:
    """Return the stored figures of a row's kernel, if there are any."""
    plain = stored.get(row.target, {}).get(row.op, {}).get(row.key)
    if plain is None or row.metadata is None:
        return None
    values: dict[str, Any] = {f.name: {} if str(f.type).startswith("dict") else 0 for f in fields(KernelMetadata)}
    for name, value in plain.items():
        by_width = isinstance(value, dict) and name != "matrix"
        values[name] = {int(bits): n for bits, n in value.items()} if by_width else value
    return KernelMetadata(**{**values, "kernel": row.metadata.kernel, "target": row.target})


def regressed(row: Row, stored: Figures) -> list[str]:
    """Return where a row is worse than its stored figures; empty if it has none."""
    then = stored_metadata(row, stored)
    return [] if then is None else regressions(row, then)


def read(path: Path) -> tuple[str, Figures]:
    """Return the Triton version that the figures hold for, and the figures."""
    content = json.loads(path.read_text())
    return content["triton"], content["targets"]


def write(path: Path, found: Figures) -> None:
    """Write one kernel per line, sorted, so that a diff shows which kernel changed."""
    lines = [f'{{"triton": {json.dumps(triton.__version__)}, "targets": {{']
    for target in sorted(found):
        lines.append(f'"{target}": {{')
        for op in sorted(found[target]):
            lines.append(f'  "{op}": {{')
            kernels = sorted(found[target][op].items())
            lines += [f"    {json.dumps(key)}: {json.dumps(metadata, sort_keys=True)}," for key, metadata in kernels]
            lines[-1] = lines[-1][:-1]
            lines.append("  },")
        lines[-1] = "  }"
        lines.append("},")
    lines[-1] = "}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "}}", ""]))
