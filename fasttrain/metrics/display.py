"""The terminal: a live view, or plain lines in a log. Only the main rank shows them, on stdout.

    step 120/400 ━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ lr 2.4e-03  eta 1:12
    loss 3.214  norm 0.81  15.2k tok/s  MFU 41%  mem 0.9 GB  data 0.1%
    loss ██▇▆▅▄▄▃▃▂▂▂▂▁▁▁
    last event: step 97: the loss spiked ...

Validations and notes are lines that stay, above the live ones. The speed is that of the last steps, and the first of a
process counts only as long as it is the only one, so that neither compilation nor a hiccup decides about the time that
is left; loss and norm are of this step alone. The curve is the loss since the process started.
A narrow terminal gets fewer figures. One that is gone, or a full disk, costs lines, with one warning, and not the run.
"""

import logging
import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

import numpy as np
from rich.console import Console, Group, OverflowMethod
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fasttrain import config
from fasttrain.events import Event, EventKind, Severity
from fasttrain.units import clock, count, fixed, percent

_RECENT = 20  # steps whose speed is shown
_BLOCKS = "▁▂▃▄▅▆▇█"
_REFRESH = 0.2  # seconds between drawings of the live view, each of which takes about 1 ms
_BAR = 10  # columns that the progress bar has at least
_CURVE = 60  # columns that the curve has at most
_LINES, _RARELY = 40, 10  # that a short run has in a log; steps between those of a long one
_NEEDLESS = ("data", "norm", "mem", "MFU", "speed")  # what a narrow terminal goes without, in this order

_logger = logging.getLogger(__name__)


def sparkline(values: Sequence[float], columns: int) -> str:
    """At most so many characters, each the mean of neighbours; "!" is not finite. Empty before the second value."""
    points = min(len(values), columns)
    if points < 2:
        return ""
    starts = np.arange(points) * len(values) // points
    with np.errstate(invalid="ignore"):  # inf beside -inf
        means = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
    recent = [mean for mean in means[points // 4 :].tolist() if math.isfinite(mean)]
    low, high = min(recent, default=0.0), max(recent, default=0.0)
    return "".join(_block(mean, low, high) for mean in means.tolist())


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    height = (value - low) / (high - low) if high > low else float(value > high)
    return _BLOCKS[min(max(int(height * len(_BLOCKS)), 0), len(_BLOCKS) - 1)]


class Display:
    """What a run of so many steps shows, on stdout if no console is given; close() gives the terminal back."""

    def __init__(self, log: config.LogConfig, *, steps: int, is_main: bool, console: Console | None = None) -> None:
        self._console = console or Console()
        self._steps, self._silent = steps, not is_main
        self._every = log.every or min(max(steps // _LINES, 1), _RARELY)
        self._recent: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self._losses, self._event = array("d"), ""
        self._live: Live | None = None
        self._drawn = 0.0
        self._warned = False

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a step, the first of a run being 1, as the recorder gets them."""
        if self._silent:
            return
        if len(self._losses) == 1:
            self._recent.clear()
        self._recent.append(values)
        self._losses.append(values["loss"])
        last = step == self._steps
        if self._console.is_interactive:
            if last or monotonic() - self._drawn >= _REFRESH:
                self._safely(lambda: self._draw(step, values))
        elif last or len(self._losses) == 1 or step % self._every == 0:
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
        except Exception as error:  # mostly of the system; but no run dies of what it says
            if not self._warned:
                reason = getattr(error, "strerror", None) or error
                _logger.warning("display: cannot write: %s; lines are lost until it can", reason)
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
        if not ascii_only and (curve := sparkline(self._losses, min(columns, _CURVE) - len("loss "))):
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
        seconds = [recent["step_seconds"] for recent in self._recent]
        is_early, elapsed = len(self._losses) == 1, sum(seconds)

        def mean(name: str) -> float:
            return sum(recent[name] * weight for recent, weight in zip(self._recent, seconds, strict=True)) / elapsed

        return {
            "loss": f"{fixed(values['loss'], 3):>6}",
            "norm": f"{fixed(values['grad_norm'], 2):>5}",
            "lr": f"{values['lr']:.1e}",
            "speed": f"{count(mean('tokens_per_second'), 3):>5} tok/s",
            "MFU": f"{percent(mean('mfu')):>4}",
            "mem": f"{fixed(values['memory'] / 1e9, 1):>5} GB",
            "data": f"{percent(sum(recent['data_wait'] for recent in self._recent) / elapsed):>4}",
            "eta": f"{clock(None if is_early else (self._steps - step) * elapsed / len(seconds)):>8}",
        }


def _joined(figures: Mapping[str, str]) -> str:
    return "  ".join(text if name == "speed" else f"{name} {text}" for name, text in figures.items())
