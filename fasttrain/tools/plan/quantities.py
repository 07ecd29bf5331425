"""Numbers as people write them: "12.8B" tokens, "550m" parameters, "32GB"; and back."""

from __future__ import annotations

import re

_POWERS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTES = {
    "": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip
_NUMBER = r"(\d+(?:[._]\d+)*(?:e\d+)?)"
# In a name, a size stands by itself: "llama2-7b", "550m", "0.6b"; "gpt2", "v2b" and "tiny-2" have none.
_STATED = re.compile(r"(?:^|[-_/ ])(\d+(?:\.\d+)?)([kmbt])(?=$|[-_/ .])", re.IGNORECASE)


def parse_count(text: str) -> float:
    """A number of tokens or parameters: "12.8B", "300m", "1e9", "1048576"."""
    return _parse(text, _POWERS, "a number such as 12.8B, 300m or 1048576")


def parse_bytes(text: str) -> float:
    """Bytes: "32GB" are 32e9, "32GiB" are 2**30 times 32."""
    return _parse(text, _BYTES, "a size such as 32GB, 24GiB or 10TB")


def stated_size(name: str) -> tuple[str, float] | None:
    """The size that a name states, as written and as a number of parameters; None if it states none."""
    found = _STATED.search(name)
    if not found:
        return None
    number, unit = found.groups()
    return f"{number}{unit}", float(number) * _POWERS[unit.lower()]


def count(value: float) -> str:
    """Four digits at most: 6.738B, 549.9M, 131.1k, 96."""
    for unit, power in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= power:
            return f"{value / power:.4g}{unit}"
    return f"{value:.4g}"


def gib(value: float) -> str:
    """Bytes in GiB, or MiB below a tenth of one."""
    return f"{value / 2**30:,.1f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:,.1f} MiB"


def gigabytes(value: float) -> str:
    """Bytes as file systems count them."""
    return f"{value / 1e12:,.2f} TB" if value >= 1e12 else f"{value / 1e9:,.2f} GB"


def duration(seconds: float) -> str:
    """In the unit that people would use."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


def _parse(text: str, units: dict[str, float], example: str) -> float:
    found = re.fullmatch(_NUMBER + r"\s*([a-z]*)", text.strip().replace(",", "_").lower())
    if not found or found[2] not in units or not (number := float(found[1].replace("_", ""))):
        raise ValueError(f"{text!r} must be {example}")
    return number * units[found[2]]
