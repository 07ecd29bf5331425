import math
import re
from contextlib import closing
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from fasttrain.config import LogConfig
from fasttrain.events import Event, EventKind
from fasttrain.metrics import display
from fasttrain.metrics.display import Display

VALUES = {
    "loss": 3.2141,
    "grad_norm": 0.8123,
    "lr": 2.4e-3,
    "tokens": 491_520,
    "epoch": 0.3,
    "tokens_per_second": 15_200.0,
    "mfu": 0.41,
    "memory": 0.9e9,
    "data_wait": 0.0003,
    "step_seconds": 0.25,
}
EXTREME = VALUES | {
    "loss": 123456.7,
    "grad_norm": 98765.4,
    "tokens_per_second": 99_949_000.0,
    "mfu": 1.0,
    "memory": 192e9,
    "data_wait": 0.25,
    "step_seconds": 9_999.0,
}


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def event(step, text):
    return Event(step=step, kind=EventKind.SPIKE, text=text)


def shown(values, *, steps=400, first=119, last=120, every=1):
    """The lines of a log, of steps that are all alike."""
    console = Console(file=StringIO())
    with closing(Display(LogConfig(every=every), steps=steps, is_main=True, console=console)) as view:
        for step in range(first, last + 1):
            view.step(step, values)
    return written(console).splitlines()


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(display, "monotonic", lambda: clock.now)
    return clock


class Terminal:
    """Knows what was drawn on it."""

    def __init__(self, columns=80):
        self.console = Console(force_terminal=True, width=columns, file=StringIO(), color_system=None, _environ={})

    def lines(self):
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", written(self.console))
        return [line.rstrip() for line in plain.splitlines() if line.strip()]


# In a log


def test_the_line_of_a_step():
    assert shown(VALUES)[-1] == (
        "step   120/400  loss  3.214  norm  0.81  lr 2.4e-03  15.2k tok/s  MFU  41%  mem   0.9 GB  data 0.1%"
        "  eta     1:10"
    )


def test_lines_are_columns():
    small = VALUES | {"loss": 0.5, "tokens_per_second": 724.0, "mfu": 0.012, "step_seconds": 86_400.0}
    large = VALUES | {"loss": 10.832, "grad_norm": 42.5, "tokens_per_second": 1.314e6, "memory": 72.4e9, "mfu": 1.0}
    lines = [shown(values)[-1] for values in (VALUES, small, large)]
    assert lines[1].endswith("  724 tok/s  MFU 1.2%  mem   0.9 GB  data 0.0%  eta 280d 00:00")
    assert "1.31M tok/s  MFU 100%  mem  72.4 GB" in lines[2]
    for word in ("loss", "norm", "lr", "tok/s", "MFU", "mem", "data", "eta"):
        assert len({line.index(word) for line in lines}) == 1


def test_every():
    assert [line.split("/")[0].split()[1] for line in shown(VALUES, steps=25, first=1, last=25, every=10)] == [
        "1",  # the first always: the run works
        "10",
        "20",
        "25",  # the last always
    ]


@pytest.mark.parametrize(("steps", "lines"), [(20, 20), (79, 79), (400, 41), (10_000, 1001)])
def test_a_log_has_about_forty_lines_of_a_short_run(steps, lines):
    assert len(shown(VALUES, steps=steps, first=1, last=steps, every=0)) == lines


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(loss):
    assert f"loss    {loss}  norm" in shown(VALUES | {"loss": loss})[-1]


def test_the_first_step_does_not_spoil_the_estimate():
    console = Console(file=StringIO())
    view = Display(LogConfig(every=1), steps=400, is_main=True, console=console)
    view.step(1, VALUES | {"step_seconds": 60.0, "tokens_per_second": 63.0})
    view.step(2, VALUES)
    first, second = written(console).splitlines()
    assert "   63 tok/s" in first
    assert first.endswith("eta    --:--")
    assert "15.2k tok/s" in second
    assert second.endswith("eta     1:40")  # 398 steps of 0.25 s


def test_speed_is_of_the_last_twenty_steps():
    console = Console(file=StringIO())
    view = Display(LogConfig(every=50), steps=10_000, is_main=True, console=console)
    fast = VALUES | {"step_seconds": 0.1, "tokens_per_second": 40_000.0, "mfu": 0.8, "data_wait": 0.0}
    slow = VALUES | {"step_seconds": 0.3, "tokens_per_second": 13_333.3, "mfu": 0.4, "data_wait": 0.1}
    for step in range(1, 101):
        view.step(step, slow if step > 90 else fast)
    _, before, after = written(console).splitlines()
    assert "  40k tok/s  MFU  80%" in before
    assert "  20k tok/s  MFU  50%" in after  # 10 steps of each: 80,000 tokens in 4 s, of which 1 s of waiting
    assert "data  25%" in after
    assert after.endswith("eta    33:00")


def test_validations_and_notes():
    console = Console(file=StringIO())
    view = Display(LogConfig(), steps=400, is_main=True, console=console)
    view.validation(100, "held-out", dict(loss=3.4123, perplexity=30.336, bits_per_byte=1.432))
    view.validation(100, "held-out", dict(loss=71.0, perplexity=6.8e30, bits_per_byte=29.3))
    view.note("[bold]a note[/bold] " + "x" * 100)
    assert written(console).splitlines() == [
        "step   100/400  validation held-out  loss 3.412  perplexity 30.34  bits/byte 1.432",
        "step   100/400  validation held-out  loss 71.000  perplexity 6.8e+30  bits/byte 29.300",
        "[bold]a note[/bold] " + "x" * 100,
    ]


def test_only_rank_0_prints(capsys):
    with closing(Display(LogConfig(), steps=400, is_main=False)) as view:
        view.step(1, VALUES)
        view.validation(1, "held-out", dict(loss=1.0, perplexity=2.7, bits_per_byte=0.5))
        view.note("note")
    assert capsys.readouterr() == ("", "")


def test_lines_go_to_stdout(capsys):
    with closing(Display(LogConfig(), steps=400, is_main=True)) as view:
        view.step(1, VALUES)
    out, err = capsys.readouterr()
    assert out.startswith("step     1/400  loss  3.214")
    assert err == ""


# On a terminal


def test_the_live_view(clock):
    terminal = Terminal()
    with closing(Display(LogConfig(every=50), steps=400, is_main=True, console=terminal.console)) as view:
        view.step(199, VALUES)
        clock.now += 1
        view.step(200, VALUES)
    top, figures, curve = terminal.lines()[-3:]
    assert re.fullmatch(r"step 200/400 [━╸╺ ]{42,} lr 2.4e-03  eta 0:50", top)
    assert len(top) == 80
    assert figures == "loss 3.214  norm 0.81  15.2k tok/s  MFU 41%  mem 0.9 GB  data 0.1%"
    assert curve == "loss ▁▁"


def test_the_bar_grows(clock):
    bars = []
    for step in (4, 200, 400):
        terminal = Terminal()
        with closing(Display(LogConfig(), steps=400, is_main=True, console=terminal.console)) as view:
            view.step(step, VALUES)
        bars.append(terminal.lines()[-2].count("━"))
    assert bars[0] < bars[1] < bars[2]


@pytest.mark.parametrize("values", [VALUES, EXTREME, VALUES | {"loss": math.nan, "grad_norm": math.inf}])
@pytest.mark.parametrize("steps", [400, 5_000_000])
def test_the_live_view_fits_eighty_columns(values, steps, clock):
    terminal = Terminal()
    with closing(Display(LogConfig(), steps=steps, is_main=True, console=terminal.console)) as view:
        for step in (1, 2, 3):
            view.step(step, values)
            clock.now += 1
    lines = terminal.lines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert lines[-2].startswith("loss ")
    assert lines[-2].endswith("%")


@pytest.mark.parametrize(("columns", "figures"), [
    (60, "loss 3.214  norm 0.81  15.2k tok/s  MFU 41%  mem 0.9 GB"),
    (40, "loss 3.214  15.2k tok/s  MFU 41%"),
    (20, "loss 3.214"),
    (8, "loss 3.…"),
])  # fmt: skip
def test_a_narrow_terminal_gets_fewer_figures(columns, figures, clock):
    terminal = Terminal(columns)
    with closing(Display(LogConfig(), steps=5_000_000, is_main=True, console=terminal.console)) as view:
        for step in (3_000_000, 3_000_001):
            view.step(step, VALUES)
            clock.now += 1
        view.event(event(3000001, "the loss spiked, and this is a long story"))
        view.step(3_000_002, VALUES)
    lines = terminal.lines()[-4:]
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("step 3000002/5000000"[: columns - 1])
    assert lines[1] == figures


def test_the_last_event_stays_in_view(clock):
    terminal = Terminal()
    with closing(Display(LogConfig(), steps=400, is_main=True, console=terminal.console)) as view:
        view.step(97, VALUES)
        clock.now += 1
        view.note("step 97: saved")
        view.event(event(97, "the MFU is low. What it is lost to:\n    waiting"))
        view.step(98, VALUES)
    assert terminal.lines()[-4:][0].startswith("step 98/400")
    assert terminal.lines()[-1] == "last event: step 97: the MFU is low. What it is lost to: waiting"
    assert terminal.lines().count("    waiting") == 1  # and it is told once, in full, above


@pytest.mark.parametrize(("kind", "stays"), [
    ("spike", True), ("rollback", True), ("slow-down", True), ("of tomorrow", True),
    ("start", False), ("finish", False), ("speed", False),
])  # fmt: skip
def test_information_does_not_take_the_place_of_an_event_that_counts(clock, kind, stays):
    terminal = Terminal()
    with closing(Display(LogConfig(), steps=400, is_main=True, console=terminal.console)) as view:
        view.step(96, VALUES)
        view.event(Event.of(dict(step=97, kind=kind, text="it happened")))
        clock.now += 1
        view.step(98, VALUES)
    assert (terminal.lines()[-1] == "last event: step 97: it happened") == stays


def test_an_event_in_a_log_is_a_line():
    console = Console(file=StringIO())
    Display(LogConfig(), steps=400, is_main=True, console=console).event(event(97, "the loss spiked"))
    assert written(console) == "step 97: the loss spiked\n"


class AsciiFile(StringIO):
    encoding = "ascii"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_stream_that_knows_ascii_only(terminal, clock):
    """A sample of the model's may have any character; that must not end the run."""
    console = Console(force_terminal=terminal, width=80, file=AsciiFile(), _environ={})
    with closing(Display(LogConfig(), steps=400, is_main=True, console=console)) as view:
        for step in (1, 2):
            view.step(step, VALUES)
            clock.now += 1
        view.note("a sample: naïve ▁▂▃")
        view.event(event(2, "x" * 100))
        view.step(3, VALUES)
    printed = written(console)
    assert printed.isascii()
    assert "a sample: na?ve ???" in printed


def test_a_full_disk_costs_lines_and_not_the_run(caplog):
    full = open("/dev/full", "w")  # noqa: SIM115
    with closing(Display(LogConfig(), steps=400, is_main=True, console=Console(file=full))) as view:
        for step in (1, 2):
            view.step(step, VALUES)
    with pytest.raises(OSError, match="No space left"):  # its buffer is still full: nothing was written
        full.close()
    assert [line.getMessage() for line in caplog.records] == [
        "display: cannot write: No space left on device; lines are lost until it can"
    ]


def test_no_color_is_respected(clock):
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        console = Console(force_terminal=True, width=80, file=StringIO(), color_system="standard", _environ=environment)
        with closing(Display(LogConfig(), steps=400, is_main=True, console=console)) as view:
            view.step(200, VALUES)
        assert bool(re.search(r"\x1b\[[39][0-9]m", written(console))) == coloured


def test_a_fast_run_is_not_drawn_at_every_step(clock):
    terminal = Terminal()
    with closing(Display(LogConfig(), steps=400, is_main=True, console=terminal.console)) as view:
        for step in range(1, 101):
            view.step(step, VALUES)
            clock.now += 0.01
    assert 2 <= len({line for line in terminal.lines() if line.startswith("step ")}) <= 7


def test_the_last_step_is_drawn_in_any_case(clock):
    terminal = Terminal()
    with closing(Display(LogConfig(), steps=400, is_main=True, console=terminal.console)) as view:
        view.step(399, VALUES)
        view.step(400, VALUES)
    assert terminal.lines()[-3].startswith("step 400/400 ")


def test_lines_that_stay_are_above_the_live_view(clock):
    terminal = Terminal()
    with closing(Display(LogConfig(), steps=400, is_main=True, console=terminal.console)) as view:
        view.step(100, VALUES)
        view.validation(100, "held-out", dict(loss=3.4123, perplexity=30.336, bits_per_byte=1.432))
        print("a stray line")  # of a library: rich takes it above too
    lines = terminal.lines()
    places = [next(i for i, line in enumerate(lines) if start in line) for start in ("validation", "a stray line")]
    assert places == sorted(places)
    assert lines[-2].startswith("step 100/400 ")
    assert lines.count("step   100/400  validation held-out  loss 3.412  perplexity 30.34  bits/byte 1.432") == 1
    assert written(terminal.console).endswith("\x1b[?25h")  # the cursor is back


def test_a_dumb_terminal_gets_plain_lines():
    console = Console(force_terminal=True, file=StringIO(), _environ={"TERM": "dumb"})
    Display(LogConfig(), steps=400, is_main=True, console=console).step(1, VALUES)
    assert written(console).startswith("step     1/400  loss  3.214")
    assert "\x1b" not in written(console)
