"""How figures are written for people, and read from them."""

import math
import re

_POWERS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTES = {
    "": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip
_MOST = 1e18
_NUMBER = r"(\d+(?:[._]\d+)*(?:e\d+)?)"


def count(value: float, digits: int = 4) -> str:
    """6.738B, 549.9M, 131.1k, 96."""
    for unit, power in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= power * (1 - 0.5 * 10.0**-digits):  # what would be rounded up to 1000 of the unit below
            return f"{value / power:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def disk_size(size: float) -> str:
    """Bytes as file systems count them: 37.7 MB, 80.9 GB."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= power:
            return f"{size / power:,.1f} {unit}"
    return f"{size:.0f} B"


def memory_size(size: float) -> str:
    """Bytes as memory is counted: 79.2 GiB, or MiB below a tenth of one."""
    return f"{size / 2**30:,.1f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:,.1f} MiB"


def duration(seconds: float) -> str:
    """4.2 days, 3.1 hours, 20.0 minutes, 1.3 s."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


def clock(seconds: float | None) -> str:
    """1:12, 2:01:05, 3d 04:12; --:-- when it is not known."""
    if seconds is None:
        return "--:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def percent(share: float) -> str:
    """41%, and 1.2% below ten."""
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def fixed(value: float, decimals: int) -> str:
    """3.214; 340 from a hundred on; 5.0e+30 from a hundred thousand on; nan and inf as such."""
    if abs(value) >= 1e5 and math.isfinite(value):
        return f"{value:.1e}"
    return f"{value:.{0 if abs(value) >= 100 else decimals}f}"


def plural(number: int, noun: str) -> str:
    """1 rank, 8 ranks."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def parse_count(text: str) -> float:
    """A number of tokens or parameters: "12.8B", "300m", "1e9", "1048576"."""
    return _parse(text, _POWERS, "a number such as 12.8B, 300m or 1048576")


def parse_bytes(text: str) -> float:
    """Bytes: "32GB" are 32e9, "32GiB" are 2**30 times 32."""
    return _parse(text, _BYTES, "a size such as 32GB, 24GiB or 10TB")


def _parse(text: str, units: dict[str, float], example: str) -> float:
    found = re.fullmatch(_NUMBER + r"\s*([a-z]*)", text.strip().replace(",", "_").lower())
    number = float(found[1].replace("_", "")) * units.get(found[2], 0) if found else 0
    if not 0 < number <= _MOST:
        raise ValueError(f"{text!r} must be {example}, above 0 and at most {_MOST:.0e}")
    return number
