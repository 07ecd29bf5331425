"""docs/events.md from fasttrain/events.py: every kind of event with its meaning and remedy, and the exit codes.

python -m tests.docs.events_page --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from fasttrain.events import EventKind, ExitCode, Severity

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
COMMAND = "python -m tests.docs.events_page --write"
WIDTH = 118
HEAD = """# Events and exit codes

<!-- Written from fasttrain/events.py; to update it: {command} -->

Every event is a line of `events.jsonl` and the terminal, a mark in TensorBoard and W&B, and a row of
[the report](report.md). Rules: [monitor.md](monitor.md).

```json
{{"step": 74, "time": 1767225600.0, "tokens": 18944, "kind": "rollback", "text": "rolled back to ...",
 "action": "rolls back to step 60, skips 7 batches", "evidence": {{"value": 8.9, "expected": 5.1, "z": 41.0, ...}},
 "documents": ["json/decoder.py", ...]}}
```

`step` counts completed steps; `action` is what the run does about it; `documents` are up to 50 (`fasttrain
data locate` lists all).
"""
CODES_HEAD = """
## Exit codes

| code | meaning |
|---|---|
"""
CODES_TAIL = """| 128 + n | signal n: saved and stopped as asked (SIGINT 130, SIGUSR1 138, SIGTERM 143) |
| 137 | SIGKILL, mostly for lack of memory: lower `batch.micro`; the same command resumes |

torchrun exits with 0 or 1; its last lines have ranks' codes.
"""
TITLES = {
    Severity.ERROR: "Errors",
    Severity.WARNING: "Warnings",
    Severity.ACTION: "Actions",
    Severity.INFO: "Information",
}


def page() -> str:
    codes = (f"| {int(code)} | {code.meaning} |\n" for code in ExitCode)
    return "".join([HEAD.format(command=COMMAND), *_sections(), CODES_HEAD, *codes, CODES_TAIL])


def _sections() -> Iterator[str]:
    for severity, title in TITLES.items():
        yield f"\n## {title}\n\n"
        for kind in EventKind:
            if kind.severity is severity:
                yield _entry(kind)


def _entry(kind: EventKind) -> str:
    lines = [_filled(f"- `{kind}`: {kind.meaning}.")]
    if kind.remedy:
        lines.append(_filled(f"  **You**: {kind.remedy}."))
    return "".join(f"{line}\n" for line in lines)


def _filled(text: str) -> str:
    return fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        print(f"usage: {COMMAND}")
        sys.exit(0 if "--help" in sys.argv else 2)
    PAGE.write_text(page())
