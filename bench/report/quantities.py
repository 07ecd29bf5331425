"""Numbers as people read them."""

from __future__ import annotations


def scaled(value: float, unit: str) -> str:
    """Format with an SI prefix: 3.35 TB, 12.3 GB, 4.5 ms."""
    if value == 0:
        return f"0 {unit}"
    for power, prefix in (
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1.0, ""),
        (1e-3, "m"),
        (1e-6, "µ"),
    ):
        if abs(value) >= power:
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.2g} {unit}"


def plain(value: float) -> str:
    """Format a count."""
    return f"{value:,.0f}"


def number(value: float) -> str:
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
