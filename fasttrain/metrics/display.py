"""The terminal: a live view, or plain lines in a log. Only the main rank shows them, on stdout.

    step 120/400 ━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ lr 2.4e-03  eta 1:12
    loss 3.214  norm 0.81  15.2k tok/s  MFU 41%  mem 0.9 GB  data 0.1%
    loss ██▇▆▅▄▄▃▃▂▂▂▂▁▁▁
    last event: step 97: the loss spiked ...

Validations and notes are lines that stay, above the live ones. The speed is that of the last steps (Pace), so that
neither compilation nor a hiccup decides about the time that is left; loss and norm are of this step alone. The curve is
the loss since the process started (Sparkline).
A narrow terminal gets fewer figures. One that is gone, or a full disk, costs lines, with one warning, and not the run.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import monotonic

from rich.console import Console, Group, OverflowMethod
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fasttrain import config
from fasttrain.events import Event, EventKind, Severity
from fasttrain.units import clock, count, fixed, percent

_STEPS = 20


class Pace:
    """Of the last steps of this process. The first counts only as long as it is the only one."""

    def __init__(self) -> None:
        self._steps: deque[Mapping[str, float]] = deque(maxlen=_STEPS)
        self._settled = False

    def add(self, values: Mapping[str, float]) -> None:
        if len(self._steps) == 1 and not self._settled:
            self._steps.clear()
            self._settled = True
        self._steps.append(values)

    def mean(self, name: str) -> float:
        """Of a figure, over time."""
        return sum(step[name] * step["step_seconds"] for step in self._steps) / self._seconds

    @property
    def data_share(self) -> float:
        """Of the time, that was spent waiting for data."""
        return sum(step["data_wait"] for step in self._steps) / self._seconds

    def remaining(self, steps: int) -> float | None:
        """Seconds that so many steps will take; None: too early to say."""
        return steps * self._seconds / len(self._steps) if self._settled else None

    @property
    def _seconds(self) -> float:
        return sum(step["step_seconds"] for step in self._steps)


_BLOCKS = "▁▂▃▄▅▆▇█"
_POINTS = 512  # even


class Sparkline:
    """add() every step; text() when it is drawn."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._width = 1  # steps of a point
        self._open: list[float] = []  # steps of the next point

    def add(self, value: float) -> None:
        self._open.append(value)
        if len(self._open) == self._width:
            self._points.append(_mean(self._open))
            self._open = []
        if len(self._points) == _POINTS:
            self._points = _merged(self._points, _POINTS // 2)
            self._width *= 2

    def text(self, columns: int) -> str:
        """At most so many characters; empty before the second step."""
        points = self._points + ([_mean(self._open)] if self._open else [])
        if len(points) < 2 or columns < 2:
            return ""
        shown = _merged(points, columns)
        recent = [point for point in shown[len(shown) // 4 :] if math.isfinite(point)]
        low, high = min(recent, default=0.0), max(recent, default=0.0)
        return "".join(_block(point, low, high) for point in shown)


def _merged(points: Sequence[float], columns: int) -> list[float]:
    """Means of neighbours, as many as fit."""
    count = min(len(points), columns)
    edges = [len(points) * i // count for i in range(count + 1)]
    return [_mean(points[a:b]) for a, b in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # fmean raises for inf beside -inf


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    height = (value - low) / (high - low) if high > low else float(value > high)
    return _BLOCKS[min(max(int(height * len(_BLOCKS)), 0), len(_BLOCKS) - 1)]


_REFRESH = 0.2  # seconds between drawings of the live view, each of which takes about 1 ms
_BAR = 10  # columns that the progress bar has at least
_CURVE = 60  # columns that the curve has at most
_NEEDLESS = ("data", "norm", "mem", "MFU", "speed")  # what a narrow terminal goes without, in this order

_logger = logging.getLogger(__name__)


class Display:
    """What a run shows; close() gives the terminal back."""

    def __init__(
        self,
        log: config.LogConfig,
        *,
        steps: int,  # of the whole run
        is_main: bool,
        console: Console | None = None,  # None: stdout
    ) -> None:
        self._console = console or Console()
        self._steps, self._every, self._silent = steps, log.every, not is_main
        self._pace, self._losses, self._event = Pace(), Sparkline(), ""
        self._live: Live | None = None
        self._drawn = 0.0
        self._warned = False

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a step, the first of a run being 1, as the recorder gets them."""
        if self._silent:
            return
        self._pace.add(values)
        self._losses.add(values["loss"])
        last = step == self._steps
        if self._console.is_interactive:
            if last or monotonic() - self._drawn >= _REFRESH:
                self._safely(lambda: self._draw(step, values))
        elif last or step % self._every == 0:
            self._print(f"step {self._count(step)}  {_joined(self._figures(step, values))}")

    def validation(self, step: int, name: str, values: Mapping[str, float]) -> None:
        """A line that stays."""
        figures = f"loss {fixed(values['loss'], 3)}  perplexity {fixed(values['perplexity'], 2)}"
        if "bits_per_byte" in values:
            figures += f"  bits/byte {fixed(values['bits_per_byte'], 3)}"
        self.note(f"step {self._count(step)}  validation {name}  {figures}")

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self._silent:
            self._print(text)

    def event(self, event: Event) -> None:
        """A line that stays, and that the live view repeats until the next one if it is more than information."""
        if event.kind == EventKind.SAMPLE:
            self.note(f"a sample:\n{event.text}\n")
            return
        text = f"step {event.step}: {event.text}"
        if event.severity is not Severity.INFO:
            self._event = " ".join(text.split())
        self.note(text)

    def close(self) -> None:
        if self._live:
            live, self._live = self._live, None
            self._safely(live.stop)

    def _print(self, text: str) -> None:
        encoding = self._console.encoding
        text = text.encode(encoding, "replace").decode(encoding)  # a sample may have any character
        if self._live:
            self._safely(lambda: self._console.print(Text(text), soft_wrap=True))
        else:  # 20 times cheaper than through rich
            self._safely(lambda: print(text, file=self._console.file, flush=True))

    def _safely(self, write: Callable[[], None]) -> None:
        """The run continues if what it says cannot be written."""
        try:
            write()
        except OSError as error:
            if not self._warned:
                _logger.warning("display: cannot write: %s; lines are lost until it can", error.strerror or error)
                self._warned = True

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        if self._live is None:
            # Drawn by hand: a thread that does would run beside the training step.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._console.show_cursor(True)  # whoever is killed cannot do it later
        self._live.update(self._view(step, values), refresh=True)
        self._drawn = monotonic()

    def _view(self, step: int, values: Mapping[str, float]) -> Group:
        columns, ascii_only = self._console.width, self._console.options.ascii_only
        shown = {name: text.strip() for name, text in self._figures(step, values).items()}
        top = self._progress(step, columns, lr=shown.pop("lr"), eta=shown.pop("eta"))
        for name in _NEEDLESS:
            if len(_joined(shown)) > columns:
                del shown[name]
        lines = [_joined(shown)]
        if not ascii_only and (curve := self._losses.text(min(columns, _CURVE) - len("loss "))):
            lines.append(f"loss {curve}")
        if self._event:
            lines.append(f"last event: {self._event}")
        overflow: OverflowMethod = "crop" if ascii_only else "ellipsis"
        return Group(top, *(Text(line, no_wrap=True, overflow=overflow) for line in lines))

    def _progress(self, step: int, columns: int, *, lr: str, eta: str) -> Table | Text:
        """Without the learning rate, or even the bar, where they do not fit."""
        count = f"step {self._count(step).strip()}"
        for right in (f"lr {lr}  eta {eta}", f"eta {eta}"):
            if len(f"{count}  {right}") + _BAR <= columns:
                top = Table.grid(padding=(0, 1), expand=True)
                for ratio in (None, 1, None):
                    top.add_column(no_wrap=True, ratio=ratio)
                top.add_row(Text(count), ProgressBar(total=self._steps, completed=step), Text(right))
                return top
        return Text(f"{count} {right}", no_wrap=True, overflow="crop")

    def _count(self, step: int) -> str:
        return f"{step:>{max(5, len(str(self._steps)))}}/{self._steps}"

    def _figures(self, step: int, values: Mapping[str, float]) -> dict[str, str]:
        """Each as wide as it usually gets, so that the lines of a log are columns."""
        return {
            "loss": f"{fixed(values['loss'], 3):>6}",
            "norm": f"{fixed(values['grad_norm'], 2):>5}",
            "lr": f"{values['lr']:.1e}",
            "speed": f"{count(self._pace.mean('tokens_per_second'), 3):>5} tok/s",
            "MFU": f"{percent(self._pace.mean('mfu')):>4}",
            "mem": f"{fixed(values['memory'] / 1e9, 1):>5} GB",
            "data": f"{percent(self._pace.data_share):>4}",
            "eta": f"{clock(self._pace.remaining(self._steps - step)):>8}",
        }


def _joined(figures: Mapping[str, str]) -> str:
    return "  ".join(text if name == "speed" else f"{name} {text}" for name, text in figures.items())
