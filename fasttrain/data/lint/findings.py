"""What the linter found: one finding for each check and split, and the report of all."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

FORMAT = "fasttrain lint"
VERSION = 1
SYSTEMATIC = 1e-3  # a larger share is the work of a program, not of a few odd documents

Severity = Literal["ok", "warning", "error"]
FAULTS: tuple[Severity, ...] = ("error", "warning")


@dataclass(frozen=True, kw_only=True)
class Example:
    """A place in the stream."""

    split: str
    document: int | None  # counted from 0; None: the stream has no index of documents
    offset: int  # of the token in the split
    text: str  # decoded, or the ids where there is no tokenizer
    source: str | None = None  # the file that the document came from, if the dataset knows


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """The result of a check. "ok" says what was measured, the others what is wrong and what to do."""

    check: str
    split: str
    severity: Severity
    count: int  # how often it was seen,
    of: int  # among how many
    unit: str  # of both
    text: str
    examples: tuple[Example, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.count / self.of if self.of else 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A split as the plot shows it. The arrays over `bins` go along the stream."""

    tokens: int
    lengths: np.ndarray  # documents of each class of lengths,
    length_edges: np.ndarray  # in tokens, one more than classes
    histogram: np.ndarray  # how often each id was seen
    along: Mapping[str, np.ndarray]  # shares, or rates; NaN where nothing was read


@dataclass(frozen=True, kw_only=True)
class LintReport:
    """All findings, in the order of the checks."""

    dataset: str
    quick: bool
    seconds: float
    read: Mapping[str, int]  # tokens of each split that were looked at
    findings: tuple[LintFinding, ...]
    profiles: Mapping[str, Profile]

    def having(self, severity: Severity) -> list[LintFinding]:
        return [finding for finding in self.findings if finding.severity == severity]

    def exit_code(self, *, strict: bool = False) -> int:
        return int(bool(self.having("error")) or (strict and bool(self.having("warning"))))

    def to_json(self) -> str:
        counts = {f"{severity}s": len(self.having(severity)) for severity in FAULTS}
        findings = [asdict(finding) | {"rate": finding.rate} for finding in self.findings]
        content = dict(format=FORMAT, version=VERSION, dataset=self.dataset, quick=self.quick)
        content |= dict(seconds=round(self.seconds, 3), read=dict(self.read), **counts, findings=findings)
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def graded(count: int, of: int, levels: tuple[float, float]) -> Severity:
    """The severity of a share that is wrong: an error, or a warning, above these levels of (warning, error)."""
    rate, (warning, error) = count / max(of, 1), levels
    return "error" if rate > error else "warning" if rate > warning else "ok"
