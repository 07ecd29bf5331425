"""What a run shows while it goes: a live view on a terminal, plain lines in a log. Rank 0 only, on stdout.

    step 120/400 ━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ lr 2.4e-03  eta 1:12
    loss 3.214  norm 0.81  15.2k tok/s  MFU 41%  mem 0.9 GB  data 0.1%
    loss ██▇▆▅▄▄▃▃▂▂▂▂▁▁▁
    last event: step 97: the loss spiked ...

Validations and notes are lines that stay, above the live ones. The speed is that of the last steps (pace.py), so that
neither compilation nor a hiccup decides about the time that is left; loss and norm are of this step alone. The curve is
the loss since the process started (sparkline.py).

A terminal that is too narrow gets fewer figures. One that is gone, or a log on a full disk, costs lines, with one
warning, and not the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic

from rich.console import Console, Group, OverflowMethod
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fasttrain import config
from fasttrain.events import Event, EventKind, Severity
from fasttrain.metrics.pace import Pace
from fasttrain.metrics.sparkline import Sparkline
from fasttrain.units import clock, count, fixed, percent

_REFRESH = 0.2  # seconds between drawings of the live view, each of which takes about 1 ms
_BAR = 10  # columns that the progress bar has at least
_CURVE = 60  # columns that the curve has at most
_NEEDLESS = ("data", "norm", "mem", "MFU", "speed")  # what a narrow terminal goes without, in this order

_logger = logging.getLogger(__name__)


class Display:
    """Use as a context, or call close(): the terminal is given back."""

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
            self._print(self._line(step, values))

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

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, text: str) -> None:
        encoding = self._console.encoding
        text = text.encode(encoding, "replace").decode(encoding)  # a sample may have any character
        if self._live:
            self._safely(lambda: self._console.print(Text(text), soft_wrap=True))
        else:  # 20 times cheaper than through rich
            self._safely(lambda: print(text, file=self._console.file, flush=True))

    def _safely(self, write: Callable[[], None]) -> None:
        """The run goes on if what it says cannot be written."""
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
        """Without the learning rate, or even the bar, where there is no room for them."""
        count, right = f"step {self._count(step).strip()}", f"lr {lr}  eta {eta}"
        if len(f"{count}  {right}") + _BAR > columns:
            right = f"eta {eta}"
        if len(f"{count}  {right}") + _BAR > columns:
            return Text(f"{count} {right}", no_wrap=True, overflow="crop")
        top = Table.grid(padding=(0, 1), expand=True)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True)
        top.add_row(Text(count), ProgressBar(total=self._steps, completed=step), Text(right))
        return top

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        return f"step {self._count(step)}  {_joined(self._figures(step, values))}"

    def _count(self, step: int) -> str:
        return f"{step:>{max(5, len(str(self._steps)))}}/{self._steps}"

    def _figures(self, step: int, values: Mapping[str, float]) -> dict[str, str]:
        """Each as wide as it usually gets, so that the lines of a log are columns."""
        return {
            "loss": f"{fixed(values['loss'], 3):>6}",
            "norm": f"{fixed(values['grad_norm'], 2):>5}",
            "lr": f"{values['lr']:.1e}",
            "speed": f"{count(self._pace.tokens_per_second, 3):>5} tok/s",
            "MFU": f"{percent(self._pace.mfu):>4}",
            "mem": f"{fixed(values['memory'] / 1e9, 1):>5} GB",
            "data": f"{percent(self._pace.data_share):>4}",
            "eta": f"{clock(self._pace.remaining(self._steps - step)):>8}",
        }


def _joined(figures: Mapping[str, str]) -> str:
    return "  ".join(text if name == "speed" else f"{name} {text}" for name, text in figures.items())
