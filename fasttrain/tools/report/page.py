"""The page itself: one HTML file with its style, its scripts and its data, that asks no network for anything.

Whatever a run has written is data in it, never markup: the scripts put it in as text. A policy in the page lets no
script run but its own, and no request leave.
"""

import base64
import hashlib
import html
import json
import os
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

import fasttrain
from fasttrain.rundir import RunDir
from fasttrain.tools.report.content import page_content
from fasttrain.tools.report.record import RunRecord, catch_up, read_records, state_of

SCRIPTS = ("text.js", "view.js", "scales.js", "chart.js", "charts.js", "tables.js", "page.js")
PATIENCE = 1.0  # seconds that a run under way waits for its page


def write_report(runs: Sequence[Path], out: Path, *, running: bool | None = None) -> None:
    """For a run to call as it goes. running: None: by what the runs have written.

    A run that resumes after half a million steps has half a gigabyte to read: it does so in its first calls, a second
    in each, and leaves the former page as it is until then.
    """
    if not running or catch_up(runs, patience=PATIENCE):
        write_page(read_records(runs), out, running=running)


def write_page(records: Sequence[RunRecord], out: Path, *, running: bool | None = None) -> None:
    """Write a page: whoever opens it has the former one or this one, whole.

    Without fsync, unlike fs.write_file: that could wait for a checkpoint that is being written.
    """
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.write_text(page(records, running=running), "utf-8")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def page(records: Sequence[RunRecord], *, running: bool | None = None) -> str:
    """The HTML of a page."""
    states = [state_of(record, running=running) for record in records]
    content = page_content(records, states) | dict(written=time.time(), version=fasttrain.__version__)
    script = "\n".join(["(() => {", '"use strict";', *map(_asset, SCRIPTS), "})();"])
    return Template(_asset("page.html")).substitute(  # what is put in is not looked at again
        title=html.escape(f"{', '.join(record.name for record in records)} · fasttrain"),
        policy=f"default-src 'none'; style-src {_hash(style := _asset('page.css'))}; script-src {_hash(script)}",
        style=style,
        data=encoded(content),
        script=script,
    )


def encoded(value: Any) -> str:
    """JSON without anything that could end a script element. nan and infinities are null."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return f"[{','.join([f'{v:.6g}' if v - v == 0 else 'null' for v in value.tolist()])}]"
    if isinstance(value, np.ndarray):
        return f"[{','.join(map(str, value.tolist()))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{encoded(str(key))}:{encoded(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(encoded, value))}]"
    if isinstance(value, float) and value - value != 0:
        return "null"
    text = json.dumps(value, default=str)  # ASCII: U+2028 is escaped as well
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (resources.files("fasttrain.tools.report") / "assets" / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class ReportRefresher:
    """Keeps the page of a run up to date; not too often, since it takes some 50 ms."""

    INTERVAL = 30.0  # seconds, as often as a page that is looked at reloads itself

    def __init__(self, run: RunDir) -> None:
        self._run, self._due = run, 0.0

    def __call__(self, running: bool) -> None:
        if not running or time.monotonic() >= self._due:
            self._due = time.monotonic() + self.INTERVAL
            write_report([self._run.path], self._run.report, running=running)
