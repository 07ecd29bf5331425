"""Text cut into the words of a tokenizer, by Python's own regular expressions: 5 times as fast as the library's.

The patterns below are those of tokenizers in wide use, in terms of four classes of characters. Python knows nearly the
same classes by other names. Which characters it sees otherwise (½ is a number to one, a letter to the other; letters
that are newer than one of them) is asked of the library itself; a text that has one is left to the library.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from typing import Any

# {L} letters, {N} numbers, {S} space, {P} the rest. Possessive (++) where going back cannot help.
BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the library's default
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_OURS = r"(?i:'(?:[stmd]|re|ve|ll))|(?:[^\r\n\w]|_)?{L}++|{N}{1,3}| ?{P}++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    BYTE_LEVEL: r" ?{L}++| ?{N}++|'(?:[stmd]|re|ve|ll)| ?{P}++|\s+(?!\S)|\s+",  # GPT-2, GPT-NeoX, and trained_on
    LLAMA3: _OURS,
    LLAMA3.replace("{1,3}", ""): _OURS.replace("{1,3}", ""),  # Qwen: each digit by itself
}
CLASSES = {"{L}": r"[^\W\d_]", "{N}": r"\d", "{P}": r"(?:[^\w\s]++|_)"}


def cutter_of(description: dict[str, Any]) -> Callable[[str], list[str] | None] | None:
    """What cuts as a tokenizer does, or returns None for a text that it may cut otherwise; None: no such function."""
    pattern = PATTERNS.get(_pattern_of(description))
    if pattern is None:
        return None
    for name, characters in CLASSES.items():
        pattern = pattern.replace(name, characters)
    find = re.compile(pattern).findall
    normalized = bool(description["normalizer"])
    ascii_odd = re.compile(r"[\x1c-\x1f]").search  # space to Python

    def cut(text: str) -> list[str] | None:
        if ascii_odd(text) if text.isascii() else _is_odd(text):
            return None
        if normalized and not unicodedata.is_normalized("NFC", text):
            return None
        return find(text)

    return cut


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


def _is_odd(text: str) -> bool:
    suspicious, odd = _odd()
    return not odd.isdisjoint(suspicious.findall(text))


@functools.cache
def _odd() -> tuple[re.Pattern[str], frozenset[str]]:
    """The characters that Python puts into another class than the library, and what finds all that may be one."""
    from tokenizers import Regex, pre_tokenizers

    codes = [*range(0xD800), *range(0xE000, 0x33000), *range(0xE0000, 0xE0200)]  # all that are letters, and more
    characters = "".join(map(chr, codes))
    odd = {character for character in characters if unicodedata.category(character) == "Cn"}  # newer than this Python
    for theirs, ours in ((r"\p{L}+", CLASSES["{L}"]), (r"\p{N}+", CLASSES["{N}"]), (r"\s+", r"\s")):
        found = pre_tokenizers.Split(Regex(theirs), "removed", invert=True).pre_tokenize_str(characters)
        odd |= {*"".join(piece for piece, _ in found)} ^ {*re.findall(ours, characters)}
    # Python looks up characters below 65,536 at once; the ranges of others it would try one by one
    low = "".join(re.escape(character) for character in sorted(odd) if character < "\U00010000")
    return re.compile(f"[{low}\U00010000-\U0010ffff]"), frozenset(odd)
