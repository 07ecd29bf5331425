"""A real run on a real terminal, which changes its width under way; then the run crashes."""

import os
import pty
import re
import select
import struct
import subprocess
import sys
import textwrap
import time
from fcntl import ioctl
from termios import TIOCSWINSZ

from tests.runs import command

WIDTHS = {3: 60, 6: 160, 9: 36}  # columns from a step on
CRASH = 12

SCRIPT = f"""
    import fcntl, struct, sys, termios, time
    import fasttrain.train.loop
    from fasttrain.train import main

    real, steps = fasttrain.train.loop.train_step, iter(range(1, 100))

    def noted(*arguments, **options):
        step = next(steps)
        if step == {CRASH}:
            raise ZeroDivisionError("the crash")
        if step in {WIDTHS}:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, {WIDTHS}[step], 0, 0))
        time.sleep(0.21)  # every step is drawn
        return real(*arguments, **options)

    fasttrain.train.loop.train_step = noted
    main(sys.argv[1:])
"""


class Screen:
    """What a terminal shows: text, line ends, the sequences that the live view uses; what is too long wraps."""

    def __init__(self, columns):
        self.columns, self.rows, self.row, self.column = columns, [""], 0, 0
        self.cursor, self.wrapped = True, False

    def feed(self, text):
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]", text):
            if token == "\r":
                self.column = 0
            elif token == "\n":
                self._down()
            elif token.startswith("\x1b["):
                self._control(token)
            else:
                self._put(token)

    def _put(self, character):
        if self.column == self.columns:
            self.wrapped = True
            self._down()
            self.column = 0
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += 1

    def _down(self):
        self.row += 1
        self.rows += [""] * (self.row + 1 - len(self.rows))

    def _control(self, sequence):
        count = int(re.sub(r"\D", "", sequence) or 1)
        if sequence.endswith("A"):
            self.row -= count
        elif sequence == "\x1b[2K":
            self.rows[self.row] = ""
        elif sequence in ("\x1b[?25l", "\x1b[?25h"):
            self.cursor = sequence.endswith("h")
        else:
            assert sequence.endswith("m"), f"the screen of this test does not know {sequence!r}"


def output_of(arguments, columns):
    """All that a program writes to a terminal; stdout and stderr."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm-256color"}
    )
    os.close(theirs)
    read, deadline = b"", time.monotonic() + 180
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 1)[0]:
            try:
                read += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    return read.decode(), process.wait(timeout=30)


def test_the_live_view_of_a_run_that_crashes(tmp_path):
    settings = command(tmp_path / "run", "--batch.steps", 20, "--checkpoint.every", 0, "--validation.every", 0)
    text, code = output_of([sys.executable, "-c", textwrap.dedent(SCRIPT), *settings], columns=100)
    assert code == 1
    began = text.index("\x1b[?25l")  # the live view
    views = re.split(r"(?=\r\x1b\[2K)", text[began:])
    widths = [100] + [WIDTHS[step] for step in WIDTHS]
    assert len(views) > CRASH - 3

    # Nothing that is drawn is wider than the terminal was then
    seen = set()
    for view in views:
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", view).partition("Traceback")[0]
        longest = max(map(len, plain.split("\n")))
        if found := re.search(r"step (\d+)/20", plain):
            step = int(found[1])  # is told when the next one has been done
            changed = [at for at in WIDTHS if at <= step + 1]
            columns = WIDTHS[changed[-1]] if changed else 100
            assert longest <= columns, plain
            assert longest > columns - 3, plain  # the bar takes what there is
            seen.add(columns)
    assert seen == set(widths)

    # Read by a terminal that does not change, the last view is whole, and the traceback is below it
    screen = Screen(160)
    screen.feed(text.replace("\r\n", "\n\r"))
    assert screen.cursor
    last = next(i for i, row in enumerate(screen.rows) if "Traceback" in row)
    assert sum("/20 " in row for row in screen.rows) == 1, screen.rows  # one live view is left
    assert re.fullmatch(r"step 10/20 [━╸╺]{10,} eta \d+:\d\d", screen.rows[last - 3].rstrip())
    assert re.fullmatch(r"loss \d+\.\d{3}  .* tok/s.*", screen.rows[last - 2].rstrip())
    assert re.fullmatch(r"loss [▁▂▃▄▅▆▇█]+", screen.rows[last - 1].rstrip())
    assert "ZeroDivisionError: the crash" in text
