"""What a run asks of its data before the first step: the quick part of the linter."""

from __future__ import annotations

from collections.abc import Iterable

from fasttrain import config
from fasttrain.data.dataset import Dataset
from fasttrain.data.lint.findings import Finding
from fasttrain.data.lint.run import lint
from fasttrain.data.lint.source import Lintable

VERIFIED = 2**28  # bytes whose checksums are compared before every run: a fraction of a second. Of more, sizes are


def suspicions(datasets: Iterable[Lintable], settings: config.DataConfig) -> list[str]:
    """What may be wrong, a line each. Errors raise, unless data.lint says that they are no more than suspicions."""
    if settings.lint == "off":
        return []
    lines = []
    for dataset in datasets:
        if isinstance(dataset, Dataset):
            dataset.verify(VERIFIED)
        report = lint(dataset, quick=True, sequence=settings.sequence, max_examples=1)
        errors = report.having("error")
        if errors and settings.lint == "stop":
            found = "\n".join(f"  {_line(error)}" for error in errors)
            raise ValueError(
                f"data: samples of {dataset.path} are not fit to train on:\n{found}\n"
                f"  `fasttrain data lint {dataset.path}` looks at all of it; --data.lint warn trains on it as it is"
            )
        lines += [f"{dataset.path}: {_line(finding)}" for finding in (*errors, *report.having("warning"))]
    return lines


def _line(finding: Finding) -> str:
    place = ""
    if finding.examples:
        example = finding.examples[0]
        document = "" if example.document is None else f"document {example.document:,}, "
        place = f" (first seen in {example.split}: {document}token {example.offset:,})"
    return f"{finding.check}: {finding.text}{place}"
