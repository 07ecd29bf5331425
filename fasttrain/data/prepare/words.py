"""Text cut into the words of a tokenizer, by Python's own regular expressions: many times as fast as the library's.

The patterns below are those of tokenizers in wide use, in terms of classes of characters. Python has nearly the same
classes by other names. Which characters it puts elsewhere (½ is a number to one, and a letter to the other; so is what
is newer than one of them) is asked of the library itself, and a text that has such a character is left to the library.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the library's default
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")  # each digit by itself

# L letters, N numbers, S space, T all but space, P what is none of them, O all but letters, numbers and line ends.
# Possessive (++) where going back cannot help.
_LLAMA3 = "(?i:'(?:[stmd]|re|ve|ll))|<O>?<L>++|<N>{1,3}| ?<P>++[\r\n]*+|<S>*[\r\n]+|<S>+(?!<T>)|<S>+"
PATTERNS = {
    BYTE_LEVEL: " ?<L>++| ?<N>++|'(?:[stmd]|re|ve|ll)| ?<P>++|<S>+(?!<T>)|<S>+",
    LLAMA3: _LLAMA3,
    QWEN: _LLAMA3.replace("{1,3}", ""),
}
# sets of few ranges are half as fast again as classes of all characters (14 and 21 MB/s)
ASCII = dict(
    L="[A-Za-z]", N="[0-9]", S=r"[\t-\r ]", T=r"[^\t-\r ]", P=r"[^\t-\r A-Za-z0-9]", O=r"[^\r\nA-Za-z0-9]"
)  # fmt: skip
UNICODE = dict(L=r"[^\W\d_]", N=r"\d", S=r"\s", T=r"\S", P=r"(?:[^\w\s]++|_)", O=r"(?:[^\r\n\w]|_)")


def cutter_of(description: dict[str, Any]) -> Callable[[str], list[str] | None] | None:
    """What cuts as a tokenizer does, or returns None for a text that it may cut otherwise; None: no such function."""
    pattern = PATTERNS.get(_pattern_of(description))
    if pattern is None:
        return None
    cut_ascii, cut_unicode = _compiled(pattern, ASCII).findall, _compiled(pattern, UNICODE).findall
    normalizes, characters = bool(description["normalizer"]), Characters()

    def cut(text: str) -> list[str] | None:
        if text.isascii():
            return cut_ascii(text)
        if characters.has_odd(text) or (normalizes and not unicodedata.is_normalized("NFC", text)):
            return None
        return cut_unicode(text)

    return cut


class Characters:
    """Which characters are odd: of another class to the library, or newer than this Python."""

    def __init__(self) -> None:
        self._plain = {chr(code) for code in range(128)} - {*"\x1c\x1d\x1e\x1f"}  # those are space to Python
        self._odd: set[str] = set()

    def has_odd(self, text: str) -> bool:
        found = set(text) - self._plain
        if new := found - self._odd:
            odd = _odd("".join(new))
            self._odd |= odd
            self._plain |= new - odd
        return not self._odd.isdisjoint(found)


def _odd(characters: str) -> set[str]:
    from tokenizers import Regex, pre_tokenizers

    odd = {character for character in characters if unicodedata.category(character) == "Cn"}
    for theirs, ours in ((r"\p{L}+", "L"), (r"\p{N}+", "N"), (r"\s+", "S")):
        found = pre_tokenizers.Split(Regex(theirs), "removed", invert=True).pre_tokenize_str(characters)
        odd |= {*"".join(piece for piece, _ in found)} ^ {*re.findall(UNICODE[ours], characters)}
    return odd


def _compiled(pattern: str, classes: dict[str, str]) -> re.Pattern[str]:
    return re.compile(re.sub("<(.)>", lambda name: classes[name[1]], pattern))


def _pattern_of(description: dict[str, Any]) -> str:
    """How a byte-level BPE cuts; empty if it is something else."""
    model, steps = description["model"], description["pre_tokenizer"]
    if model["type"] != "BPE" or model.get("dropout") or not steps:
        return ""
    if description["normalizer"] not in (None, dict(type="NFC")):
        return ""
    byte_level = dict(type="ByteLevel", add_prefix_space=False)
    if byte_level.items() <= steps.items():
        return BYTE_LEVEL if steps.get("use_regex", True) else ""
    if steps["type"] != "Sequence" or len(steps["pretokenizers"]) != 2:
        return ""
    split, bytes_ = steps["pretokenizers"]
    if not (dict(type="Split", behavior="Isolated", invert=False).items() <= split.items()):
        return ""
    return split["pattern"].get("Regex", "") if (byte_level | dict(use_regex=False)).items() <= bytes_.items() else ""
