"""The pages of the documentation, as the tests see them: fenced blocks, the commands in them, links and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PROGRAM = "(?:fasttrain|python|make|pip|torchrun|pytest|sbatch|tensorboard)"
SHELL = ("", "sh", "bash", "console")  # languages of blocks that are typed into a shell


@dataclass(frozen=True)
class Block:
    """Between two fences; or commands that are indented instead."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line for a shell, without its comment."""

    page: str
    line: int
    text: str
    shown: str = ""  # what the page shows of its output

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


@cache
def blocks() -> list[Block]:
    """Of all pages."""
    return [block for page in PAGES for block in _blocks(page)]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in re.finditer(r"^```([\w-]*)\n(.*?)^```$", text, re.S | re.M):
        yield Block(str(page.relative_to(ROOT)), text[: found.start()].count("\n") + 1, found[1], found[2])
    outside = _without_blocks(text)
    for found in re.finditer(rf"(?:^    {PROGRAM} .*\n)+", outside, re.M):
        line = outside[: found.start()].count("\n")
        yield Block(str(page.relative_to(ROOT)), line, "", dedent(found[0]))


def _without_blocks(text: str) -> str:
    """With empty lines in their place."""
    return re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)


def commands() -> list[Command]:
    """In the order of pages and lines."""
    return [command for block in blocks() if block.language in SHELL for command in commands_of(block)]


def commands_of(block: Block) -> Iterator[Command]:
    """In a console block those behind a $, each with the output under it; in others every line."""
    is_console = block.language == "console"
    lines = list(_whole_lines(block))
    for number, (line, text) in enumerate(lines):
        if is_console and not text.startswith("$ "):
            continue
        shown = []
        for _, after in lines[number + 1 :] if is_console else ():
            if after.startswith("$ "):
                break
            shown.append(after)
        if command := _without_comment(text.removeprefix("$ ")):
            yield Command(block.page, line, command, "\n".join(shown))


def _whole_lines(block: Block) -> Iterator[tuple[int, str]]:
    """With those that a backslash or an open quote continues put together."""
    begun, start = "", 0
    for number, text in enumerate(block.text.splitlines(), block.line + 1):
        start = start if begun else number
        whole = begun + text
        is_typed = block.language != "console" or whole.startswith("$ ")
        if is_typed and text.endswith("\\"):
            begun = whole.removesuffix("\\")
        elif is_typed and _is_open(whole):
            begun = whole + "\n"
        else:
            begun = ""
            yield start, whole
    assert not begun, f"{block}: the command {begun!r} has no end"


def _is_open(line: str) -> bool:
    """A quote has no end."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def _without_comment(line: str) -> str:
    """Up to the first # that is not in quotes."""
    if "\n" in line:
        return line
    starts = [found.start() for found in re.finditer(r"(^|\s+)#", line)]
    return line[: next((start for start in starts if not _is_open(line[:start])), len(line))]


def inline_commands() -> list[Command]:
    """Between backticks in the text: a program, and more than one word."""
    found = []
    for page in PAGES:
        text = _without_blocks(page.read_text())
        for code in re.finditer(rf"`({PROGRAM} [^`]+)`", text):
            line = text[: code.start()].count("\n") + 1
            found.append(Command(str(page.relative_to(ROOT)), line, " ".join(code[1].split())))
    return found


def links(page: Path) -> list[str]:
    """Targets of [text](target), outside of blocks."""
    text = re.sub(r"`[^`\n]*`", "", _without_blocks(page.read_text()))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """What #... may name, as GitHub makes it of headings."""
    text = _without_blocks(page.read_text())
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 1
        while (unique := name if number == 1 else f"{name}-{number - 1}") in found:
            number += 1
        found.add(unique)
    return found
